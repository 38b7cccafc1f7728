"""Messages of ranks over a connection, and the proof before them that both sides know the start's token.

A message is a length, a JSON header and, for some, raw bytes; it is neither encrypted nor signed. For the
proof each side sends a random challenge, and answers the other's with a code that only the token makes of
both (HMAC-SHA256, RFC 2104). It has a fixed size: nothing is allocated or parsed that a stranger has chosen.
"""

import hmac
import secrets
import struct
from typing import Annotated

import msgspec

from moe_ft.engine.links.transport import CHUNK_BYTES, Connection, Deadline

_MAX_HEADER_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")
_GREETING = b"moe_ft/1"
_NONCE_BYTES = 32
_PROOF_BYTES = 32

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Put(msgspec.Struct, frozen=True, tag=True):
    """Keep a replica: followed by the index, an update, a stretch of the region, and slots of the pool.

    Attributes:
        keep_iteration: the last iteration of the newest complete window, which must not be overwritten.
        start_byte: of the stretch; 0 for the whole file up to its end, else the peer must hold the window
            without its newest snapshot already.
        slots: names of the units that follow, in this order; the peer has all others of the pool.
        update_bytes: of the step that the peer repeats in place of the stretch, 0 for none.
        gradient_bytes: that follow the update.
        checksum: of the stretch, where that is added to parity; empty for a replica.
        window_byte: where the snapshot begins of which such a stretch is a part, as `start_byte`.
    """

    source: int
    keep_iteration: int | None
    index_bytes: _Count
    start_byte: _Count
    data_bytes: _Count
    slots: tuple[str, ...] = ()
    slot_bytes: _Count = 0
    update_bytes: _Count = 0
    gradient_bytes: _Count = 0
    checksum: str = ""
    window_byte: _Count = 0


class Get(msgspec.Struct, frozen=True, tag=True):
    """Send a range of a file in the node's memory directory; -1 for all of it."""

    path: str
    offset: _Count
    num_bytes: Annotated[int, msgspec.Meta(ge=-1)]


class GetParts(msgspec.Struct, frozen=True, tag=True):
    """Send ranges of a unit that an index in the node's memory directory names, if the unit is intact.

    Attributes:
        position: number of the snapshot that has it at COMPUTE; -1 for FULL.
        checksum: of the whole unit.
        ranges: in bytes, from the start of the unit.
    """

    path: str
    unit: str
    position: int
    checksum: str
    ranges: tuple[tuple[int, int], ...]


class Join(msgspec.Struct, frozen=True, tag=True):
    """Take this connection for one stream of a pair: the last one of them carries everything else too.

    Attributes:
        pair: the same for its streams, and for no other.
        num_before: streams that have joined it before, if this is the last one.
    """

    pair: str
    num_before: int | None = None


class PeerReply(msgspec.Struct, frozen=True, tag="Reply"):
    """Answers all of them; an empty error means success. Followed by num_bytes raw bytes.

    Attributes:
        checksum: of these bytes, if they are parts of a unit.
        wants_state: the update could not be repeated, or came out otherwise: the state is needed.
        made: checksum of what came out otherwise.
        is_base_damaged: the state from which it came out is not the one that its index describes.
    """

    error: str = ""
    num_bytes: _Count = 0
    checksum: str = ""
    wants_state: bool = False
    made: str = ""
    is_base_damaged: bool = False


REQUEST = msgspec.json.Decoder(Put | Get | GetParts | Join)
REPLY = msgspec.json.Decoder(PeerReply)


def send(
    connection: Connection, header: Put | Get | GetParts | Join | PeerReply, deadline: Deadline
) -> None:
    """Send a header."""
    encoded = msgspec.json.encode(header)
    connection.send(_LENGTH.pack(len(encoded)) + encoded, deadline)


def receive(connection: Connection, num_bytes: int, deadline: Deadline) -> bytearray:
    """Return the next bytes."""
    content = bytearray(num_bytes)
    connection.receive_into(memoryview(content), deadline)
    return content


def pass_over(connection: Connection, num_bytes: int, deadline: Deadline) -> None:
    """Receive what nobody wants, so that the next message can follow."""
    while num_bytes > 0:
        num_bytes -= len(receive(connection, min(num_bytes, CHUNK_BYTES), deadline))


def receive_header(connection: Connection, deadline: Deadline) -> bytearray:
    """Return the next header; raises ConnectionError if it is none."""
    (num_bytes,) = _LENGTH.unpack(receive(connection, _LENGTH.size, deadline))
    if num_bytes > _MAX_HEADER_BYTES:
        raise ConnectionError(f"a header of {num_bytes} bytes does not come from moe_ft")
    return receive(connection, num_bytes, deadline)


def receive_challenge(connection: Connection, deadline: Deadline) -> bytes:
    """Return the server's challenge; raises ConnectionError if it has too many strangers or no token yet."""
    return bytes(receive(connection, len(_GREETING) + _NONCE_BYTES, deadline))


def answer_challenge(
    connection: Connection, token: str, challenge: bytes, deadline: Deadline
) -> None:
    """Prove the token to the server; raises ConnectionError if that does not know it too."""
    greeting, theirs = challenge[: len(_GREETING)], challenge[len(_GREETING) :]
    if greeting != _GREETING:
        raise ConnectionError(f"what listens there is not a server of {_GREETING.decode()}")
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.send(own + _proof(token, b"client", theirs, own), deadline)
    try:
        proof = bytes(receive(connection, _PROOF_BYTES, deadline))
    except ConnectionError:
        proof = b""  # the server closes: our proof is wrong for it
    if not hmac.compare_digest(proof, _proof(token, b"server", theirs, own)):
        raise ConnectionError("the token is wrong: another job or an older start")


def challenge_client(connection: Connection, token: str, deadline: Deadline) -> None:
    """Have a client prove the token, then prove it to the client; raises ConnectionError if it does not."""
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.send(_GREETING + own, deadline)
    answer = bytes(receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline))
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", own, theirs)):
        raise ConnectionError("the token is wrong: another job or an older start")
    connection.send(_proof(token, b"server", own, theirs), deadline)


def _proof(token: str, role: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return what proves the token; the role keeps one side from sending back what the other one said."""
    return hmac.digest(token.encode(), role + server_nonce + client_nonce, "sha256")
