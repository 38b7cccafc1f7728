"""Conversation of two nodes of a doctor over the connections that training will use.

The server side is a `PeerListener` with the same address, port and proof of the token as that of training.
"""

import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

from moe_ft.engine.links.messages import (
    CHUNK_BYTES,
    PROGRESS_TIMEOUT_S,
    Deadline,
    pass_over,
    receive,
    send_all,
)
from moe_ft.engine.links.peers import open_connection

_REQUEST, _TIME = struct.Struct(">BI"), struct.Struct(">q")
_NUM_TRIPS = 5  # the quickest one says most about the clock


class _Ask(IntEnum):
    TIME = 1  # answered with the time
    TAKE = 2  # followed by bytes, not answered
    DONE = 3  # answered when everything before it has arrived


def serve(connection: socket.socket) -> None:
    """Answer the requests of a node until it closes the connection."""
    try:
        while True:
            request = receive(connection, _REQUEST.size, Deadline(PROGRESS_TIMEOUT_S))
            ask, num_bytes = _REQUEST.unpack(request)
            if ask == _Ask.TAKE:
                pass_over(connection, num_bytes, Deadline(PROGRESS_TIMEOUT_S))
            else:
                answer = _TIME.pack(time.time_ns())
                send_all(connection, answer, Deadline(PROGRESS_TIMEOUT_S))
    except OSError:  # it has closed the connection, or the other side reports the failure
        return


@dataclass(frozen=True, kw_only=True, slots=True)
class Trip:
    """The quickest of a few round trips.

    Attributes:
        round_trip_s: of it.
        ahead_s: of the other clock to this one, give or take half of that.
    """

    round_trip_s: float
    ahead_s: float


def ping(address: tuple[str, int], token: str) -> Trip:
    """Connect to a node and ask for its time; raises OSError if it does not answer."""
    with open_connection(address, token) as connection:
        return min((_ask_time(connection) for _ in range(_NUM_TRIPS)), key=lambda t: t.round_trip_s)


def _ask_time(connection: socket.socket) -> Trip:
    deadline = Deadline(PROGRESS_TIMEOUT_S)
    wall_ns, start_s = time.time_ns(), time.perf_counter()
    send_all(connection, _REQUEST.pack(_Ask.TIME, 0), deadline)
    (theirs_ns,) = _TIME.unpack(receive(connection, _TIME.size, deadline))
    trip_s = time.perf_counter() - start_s
    return Trip(round_trip_s=trip_s, ahead_s=(theirs_ns - wall_ns) / 1e9 - trip_s / 2)


def transfer(
    address: tuple[str, int], token: str, num_bytes: int, most_s: float
) -> tuple[int, float]:
    """Send bytes to a node; return how many, and the seconds until the last one has arrived.

    Args:
        num_bytes: to send.
        most_s: after which no more are sent.

    Raises:
        OSError: if the node does not take them.
    """
    content = memoryview(bytes(min(CHUNK_BYTES, num_bytes)))
    sent = 0
    with open_connection(address, token) as connection:
        start_s = time.perf_counter()
        while sent < num_bytes and time.perf_counter() - start_s < most_s:
            piece = content[: num_bytes - sent]
            deadline = Deadline(PROGRESS_TIMEOUT_S)
            send_all(connection, _REQUEST.pack(_Ask.TAKE, len(piece)), deadline)
            send_all(connection, piece, deadline)
            sent += len(piece)
        deadline = Deadline(PROGRESS_TIMEOUT_S)
        send_all(connection, _REQUEST.pack(_Ask.DONE, 0), deadline)
        receive(connection, _TIME.size, deadline)
        return sent, time.perf_counter() - start_s
