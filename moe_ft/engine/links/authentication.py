"""Proof of two ranks to each other that they know the token of the start, without showing it.

Each side sends a random challenge, and answers the other's with a code that only the token makes of both
(HMAC-SHA256, RFC 2104). All messages have a fixed size: before the proof nothing is allocated or parsed that
a stranger has chosen. What is said afterwards is messages.py; it is neither encrypted nor signed.
"""

import hmac
import secrets
import socket

from moe_ft.engine.links.messages import Deadline, receive, send_all

_GREETING = b"moe_ft/1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32


def receive_challenge(connection: socket.socket, deadline: Deadline) -> bytes:
    """Return the server's challenge.

    Raises:
        ConnectionError: if the server closes instead, which has too many strangers or no token yet.
    """
    return bytes(receive(connection, len(_GREETING) + _NONCE_BYTES, deadline))


def answer_challenge(
    connection: socket.socket, token: str, challenge: bytes, deadline: Deadline
) -> None:
    """Prove the token to the server, and see that it knows it too.

    Raises:
        ConnectionError: if it is no server of this start.
    """
    greeting, theirs = challenge[: len(_GREETING)], challenge[len(_GREETING) :]
    if greeting != _GREETING:
        raise ConnectionError(f"what listens there is no server of {_GREETING.decode()}")
    own = secrets.token_bytes(_NONCE_BYTES)
    send_all(connection, own + _proof(token, b"client", theirs, own), deadline)
    try:
        proof = bytes(receive(connection, _PROOF_BYTES, deadline))
    except ConnectionError:
        proof = b""  # the server closes: our proof is wrong for it
    if not hmac.compare_digest(proof, _proof(token, b"server", theirs, own)):
        raise ConnectionError("the token is wrong: another job or an older start")


def challenge_client(connection: socket.socket, token: str, deadline: Deadline) -> None:
    """Have a client prove the token, then prove it to the client.

    Raises:
        ConnectionError: if the client does not know the token.
    """
    own = secrets.token_bytes(_NONCE_BYTES)
    send_all(connection, _GREETING + own, deadline)
    answer = bytes(receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline))
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", own, theirs)):
        raise ConnectionError("the token is wrong: another job or an older start")
    send_all(connection, _proof(token, b"server", own, theirs), deadline)


def _proof(token: str, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return what proves the token; the role keeps one side from sending back what the other one said."""
    return hmac.digest(token.encode(), role + server_nonce + client_nonce, "sha256")
