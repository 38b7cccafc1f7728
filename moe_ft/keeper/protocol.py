"""Messages between a worker and the zygote of its node, on a Unix socket that only their user can open.

The worker sends one request, with the descriptors of its standard streams, and then a byte for each signal
that the rank is to get. The zygote answers with the number of the rank's process, and at its end with its
status as `wait` gives it. Either may close the connection: it has ended.
"""

import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

NO_RANK = 0  # instead of the number of a process
_NUMBER = struct.Struct("!q")
_MOST_BYTES = 64 << 20
_NUM_STREAMS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRequest:
    """Facts that a new rank gets from the worker in whose place it runs.

    Attributes:
        words: of its command line after `python`.
        cpus: that it may use; a launcher may have bound the worker to some.
    """

    words: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    mask: int
    cpus: tuple[int, ...]


def send_request(connection: socket.socket, request: RankRequest, streams: Sequence[int]) -> None:
    """Send a request with the descriptors of standard input, output and error."""
    body = json.dumps(asdict(request)).encode()
    socket.send_fds(connection, [_NUMBER.pack(len(body))], list(streams))
    connection.sendall(body)


def receive_request(connection: socket.socket) -> tuple[RankRequest, list[int]]:
    """Return a request and descriptors, which the caller closes.

    Raises:
        ConnectionError: if the other end closed the connection, or sent something else.
    """
    head, streams, _, _ = socket.recv_fds(connection, _NUMBER.size, _NUM_STREAMS)
    try:
        head += _receive(connection, _NUMBER.size - len(head))
        (num_bytes,) = _NUMBER.unpack(head)
        if len(streams) != _NUM_STREAMS or not 0 < num_bytes <= _MOST_BYTES:
            raise ConnectionError("this is no request for a rank")
        values = json.loads(_receive(connection, num_bytes))
        values["words"], values["cpus"] = tuple(values["words"]), tuple(values["cpus"])
        return RankRequest(**values), streams
    except BaseException:
        for each in streams:
            os.close(each)
        raise


def send_number(connection: socket.socket, number: int) -> None:
    """Send the number of a process, or its status."""
    connection.sendall(_NUMBER.pack(number))


def receive_number(connection: socket.socket) -> int:
    """Return a number; raise ConnectionError if the other end has closed the connection."""
    return int(_NUMBER.unpack(_receive(connection, _NUMBER.size))[0])


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("the other end has closed the connection")
        found += part
    return bytes(found)
