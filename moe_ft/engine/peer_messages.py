"""What ranks say to each other over a connection: a length, a JSON header and, for some, raw bytes."""

import socket
import struct

import msgspec

CHUNK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


class Put(msgspec.Struct, frozen=True, tag=True):
    """Keep a replica: followed by the index, a stretch of the region, and slots of the pool.

    Attributes:
        iteration: of the newest snapshot in the region.
        keep_iteration: the last iteration of the newest complete window, which must not be overwritten.
        start_byte: of the stretch; 0 for the whole file up to its end, else the peer must hold the window
            without its newest snapshot already.
        data_bytes: of the stretch.
        slots: names of the units that follow, in this order; their places are in the index.
        slot_bytes: of all of them.
    """

    token: str
    source: int
    iteration: int
    keep_iteration: int | None
    index_bytes: int
    start_byte: int
    data_bytes: int
    slots: tuple[str, ...] = ()
    slot_bytes: int = 0


class Get(msgspec.Struct, frozen=True, tag=True):
    """Send a range of a file in the node's memory directory; -1 for all of it."""

    token: str
    path: str
    offset: int
    num_bytes: int


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answers both; an empty error means success. Followed by num_bytes raw bytes."""

    error: str = ""
    num_bytes: int = 0


REQUEST = msgspec.json.Decoder(Put | Get)
REPLY = msgspec.json.Decoder(Reply)


def send(connection: socket.socket, header: Put | Get | Reply) -> None:
    """Send a header."""
    encoded = msgspec.json.encode(header)
    send_all(connection, _LENGTH.pack(len(encoded)) + encoded)


def send_all(connection: socket.socket, content: bytes | memoryview) -> None:
    """Send everything; the socket's timeout applies to each step, where sendall's is for all of it."""
    rest = memoryview(content)
    while rest:
        rest = rest[connection.send(rest[:CHUNK_BYTES]) :]


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill a buffer; raises ConnectionError if the other side closes before that."""
    while target:
        count = connection.recv_into(target, min(len(target), CHUNK_BYTES))
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        target = target[count:]


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """Return so many bytes."""
    content = bytearray(num_bytes)
    receive_into(connection, memoryview(content))
    return content


def pass_over(connection: socket.socket, num_bytes: int) -> None:
    """Receive what nobody wants, so that the next message can follow."""
    while num_bytes > 0:
        num_bytes -= len(receive(connection, min(num_bytes, CHUNK_BYTES)))


def receive_header(connection: socket.socket) -> bytearray:
    """Return the next header; raises ConnectionError if it is none."""
    (num_bytes,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
    if num_bytes > _MAX_HEADER_BYTES:
        raise ConnectionError(f"a header of {num_bytes} bytes is not one of moe_ft")
    return receive(connection, num_bytes)
