"""The seam between links and the network: connections, the deadlines of their steps, and TCP.

Another network has another `Connection`: peers.py gets one from `connect`, listener.py accepts one. Addresses
are addresses.py.
"""

import socket
import time
from contextlib import suppress
from typing import Protocol, override

from moe_ft.files.progress import SLOWEST_BYTES_PER_S

CHUNK_BYTES = 8 << 20
PROGRESS_TIMEOUT_S = 10.0  # without a single byte sent or received


class Deadline:
    """The end of one message, or of several. Owned by one thread."""

    def __init__(self, total_s: float, silence_s: float | None = None) -> None:
        """Begin now.

        Args:
            total_s: seconds for everything.
            silence_s: seconds for each step, which ends with the next bytes; None for all of them.
        """
        self._total_s = total_s
        self._end_s = time.monotonic() + total_s
        self._silence_s = total_s if silence_s is None else silence_s

    @classmethod
    def for_bytes(cls, num_bytes: int) -> "Deadline":
        """Return the deadline of a message with so many bytes, which may never stop for long.

        All ranks wait for the slowest peer before a window is complete: the rate is that at which the writer
        is given up. Eight ranks of a node need 1.3 Gb/s for it, less than networks for training have.
        """
        return cls(PROGRESS_TIMEOUT_S + num_bytes / SLOWEST_BYTES_PER_S, PROGRESS_TIMEOUT_S)

    @property
    def is_over(self) -> bool:
        """True if no time is left."""
        return time.monotonic() >= self._end_s

    @property
    def rest_s(self) -> float:
        """Seconds that are left; raises TimeoutError if none are."""
        rest_s = self._end_s - time.monotonic()
        if rest_s <= 0:
            raise TimeoutError(f"not done within {self._total_s:.1f} s")
        return rest_s

    @property
    def step_s(self) -> float:
        """Seconds for the next step; raises as `rest_s` does."""
        return min(self._silence_s, self.rest_s)


class Connection(Protocol):
    """Carries bytes between two ranks, in order. Owned by one thread, but for `end`."""

    def send(self, content: bytes | memoryview, deadline: Deadline) -> None:
        """Send everything, in steps that show whether the other side reads; raises OSError if it does not."""

    def receive_into(self, target: memoryview, deadline: Deadline) -> None:
        """Fill a buffer; raises ConnectionError if the other side closes before that."""

    def wait(self) -> bool:
        """Wait, as long as it takes, until the other side sends something; return False if it closes."""

    def end(self) -> None:
        """Have whoever waits in it fail, and later calls. Any thread may call it."""

    def close(self) -> None:
        """Close it, when nobody waits in it."""


class TcpConnection(Connection):
    """A connection over one socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @override
    def send(self, content: bytes | memoryview, deadline: Deadline) -> None:
        rest = memoryview(content)
        while rest:
            self._socket.settimeout(deadline.step_s)
            rest = rest[self._socket.send(rest[:CHUNK_BYTES]) :]

    @override
    def receive_into(self, target: memoryview, deadline: Deadline) -> None:
        while target:
            self._socket.settimeout(deadline.step_s)
            count = self._socket.recv_into(target, min(len(target), CHUNK_BYTES))
            if count == 0:
                raise ConnectionError("the other side closed the connection")
            target = target[count:]

    @override
    def wait(self) -> bool:
        self._socket.settimeout(None)
        return bool(self._socket.recv(1, socket.MSG_PEEK))

    @override
    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @override
    def close(self) -> None:
        self._socket.close()


def connect(address: tuple[str, int], deadline: Deadline) -> Connection:
    """Return a connection to a listener; raises OSError if that fails."""
    connection = socket.create_connection(address, deadline.rest_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return TcpConnection(connection)
