"""Conversation with the job's store: a proof that both sides know the start's token, then numbered messages.

The server greets with a random challenge. The client answers with its own and with a code that only the token
makes of both (HMAC-SHA256, RFC 2104); the server answers in kind. What follows carries a code of its number
and its bytes, with a key that the token makes of both challenges: nothing can be changed, repeated, or taken
from another connection or start. Until then each side reads a fixed number of bytes, and parses nothing.

Agents know the token from the options of `keep`, and ranks from their agents. The server is store_server.py,
the client store_client.py.
"""

import hmac
import secrets
import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

import msgspec

MAX_MESSAGE_BYTES = 128 << 20  # a list of 64 MiB has room
PROOF_BYTES = 32
NONCE_BYTES = 32
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
_MAGIC = b"moe_ft/2"
_TAG_BYTES = 16  # of the name of the run, so that a client knows another job's store
GREETING_BYTES = len(_MAGIC) + NONCE_BYTES + _TAG_BYTES
_CODE_BYTES = 16
_HEADER = struct.Struct(f">I{_CODE_BYTES}s")
HEADER_BYTES = _HEADER.size


class StoreRequest(msgspec.Struct, array_like=True, frozen=True):
    """One operation on the store.

    Attributes:
        keys: those that a "wait" asks for; one for the others, none for "count".
        value: to be written.
        expected: by "compare_set".
        amount: of "add"; of the keys of a "wait", how many it waits for.
        wait_s: seconds that a "wait" may take.
        start: of the bytes that a "wait" returns of a value.
    """

    op: Literal["wait", "set", "add", "append", "compare_set", "delete", "count"]
    keys: Sequence[str] = ()
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    wait_s: float = 0.0
    start: int = 0


class StoreReply(msgspec.Struct, array_like=True, frozen=True):
    """Answer to a request: a value, a number, and those of a "wait" by key, None where there is none."""

    value: bytes = b""
    number: int = 0
    values: Sequence[bytes | None] = ()


ENCODER = msgspec.msgpack.Encoder()
REQUEST = msgspec.msgpack.Decoder(StoreRequest)
REPLY = msgspec.msgpack.Decoder(StoreReply)


def greeting(run: str) -> bytes:
    """Return what the server of a run sends first: its name, a challenge, and a tag of the run."""
    return _MAGIC + secrets.token_bytes(NONCE_BYTES) + _tag(run)


def is_greeting(received: bytes) -> bool:
    """Return whether a server of this kind has sent this."""
    return len(received) == GREETING_BYTES and received.startswith(_MAGIC)


def is_of_run(received: bytes, run: str) -> bool:
    """Return whether the server that greets is that of a run."""
    return received.endswith(_tag(run))


def _tag(run: str) -> bytes:
    return sha256(run.encode()).digest()[:_TAG_BYTES]


def proof(token: bytes, role: bytes, greeted: bytes, nonce: bytes) -> bytes:
    """Return what proves a token; the role keeps one side from sending back what the other one said."""
    return hmac.digest(token, role + greeted + nonce, "sha256")


class Seal:
    """Codes of the messages of one direction, in their order. Owned by one thread at a time."""

    def __init__(self, token: bytes, role: bytes, greeted: bytes, nonce: bytes) -> None:
        self._key = proof(token, b"key " + role, greeted, nonce)
        self._number = 0

    def seal(self, message: StoreRequest | StoreReply) -> bytes:
        """Return a message as it is sent."""
        body = ENCODER.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(body)} bytes are too many for the job's store")
        return _HEADER.pack(len(body), self._next(body)) + body

    def check(self, header: bytes, body: bytes) -> None:
        """Raise ConnectionError unless this is the next message of the other side."""
        if not hmac.compare_digest(_HEADER.unpack(header)[1], self._next(body)):
            raise ConnectionError("a message was not sent by a process of this start")

    def _next(self, body: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8) + body, "sha256")[:_CODE_BYTES]


def length_of(header: bytes) -> int:
    """Return the bytes that follow a header; raises ConnectionError if no message is so long."""
    num_bytes = int(_HEADER.unpack(header)[0])
    if num_bytes > MAX_MESSAGE_BYTES:
        raise ConnectionError(f"a message of {num_bytes} bytes does not come from moe_ft")
    return num_bytes
