"""Transport of gloo. `ProcessGroupGloo.abort` frees nobody: the end of its connections does.

gloo forgets a message when its connection ends in the middle of it, or when it is sent between that end and
the moment when gloo's own thread looks: who waits for the message waits on, until its group times out. So a
connection is ended for the readers of this process alone, and once nothing moves on it. What others still
send arrives. They end their side themselves.
"""

import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, override

from torch.distributed import ProcessGroupGloo

from megatron.fault_tolerance.repair.links import BackendPlace, GroupTransport, Maker

_DESCRIPTORS = "/proc/self/fd"
_LOOK_S = 0.01
_QUIET_LOOKS = 5  # without a change, until nothing moves
_STALLED_LOOKS = 100  # the same if bytes wait: the process that should read them may be stopped
_LONGEST_S = 10.0  # for messages that are under way
# Of Linux's struct tcp_info: bytes acknowledged by the other end, and received.
_COUNTS = struct.Struct("QQ")
_COUNTS_OFFSET = 120
_NUMBER = struct.Struct("i")


class Gloo(GroupTransport):
    """Backends of gloo: each operation ends before its call returns, or raises."""

    name = "gloo"

    def __init__(self) -> None:
        self._ended: list[socket.socket] = []  # copies, so that others may still send

    @override
    def maker(self) -> Maker:
        # The backends of a round share their devices, with their threads and descriptors.
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        devices = [
            ProcessGroupGloo.create_device(interface=each) for each in interfaces.split(",") if each
        ] or [ProcessGroupGloo.create_default_device()]

        def make(place: BackendPlace, given: Any, timeout: timedelta) -> Any:
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._devices, options.group_name = timeout, devices, place.name
            backend = ProcessGroupGloo(place.store, place.rank, len(place.ranks), options)
            backend._set_sequence_number_for_group()
            return backend

        return make

    @override
    def mark(self) -> dict[int, str]:
        return open_sockets()

    @override
    def made_since(self, mark: dict[int, str]) -> dict[int, str]:
        return {fd: name for fd, name in open_sockets().items() if mark.get(fd) != name}

    @override
    def end(self, made: Mapping[int, str]) -> int:
        copies = shut(made)
        self._ended += copies
        return len(copies)

    @override
    def begin(self) -> None:
        for each in self._ended:  # nobody sends over them any more
            each.close()
        self._ended = []


def open_sockets() -> dict[int, str]:
    """Return all sockets by descriptor, with the name that the kernel gives each."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def shut(sockets: Mapping[int, str]) -> list[socket.socket]:
    """End the TCP connections among some sockets for those who read here; return copies of them.

    Threads that wait for them are freed. The other ends notice nothing before the copies are closed. A
    descriptor that has become something else since is left alone.
    """
    copies = []
    for descriptor, name in sockets.items():
        with suppress(OSError):  # closed, or never connected
            if (copy := _copy(descriptor, name)) is not None:
                copies.append(copy)
    waiting = [_Connection(copy) for copy in copies]
    end_s = time.monotonic() + _LONGEST_S
    while waiting:
        is_late = time.monotonic() > end_s
        waiting = [each for each in waiting if not each.end_if_quiet(is_late=is_late)]
        if waiting:
            time.sleep(_LOOK_S)
    return copies


def _copy(descriptor: int, name: str) -> socket.socket | None:
    """Return a copy of a connection, None if the descriptor is none, or another one."""
    copy = os.dup(descriptor)
    if os.readlink(f"{_DESCRIPTORS}/{copy}") != name:
        os.close(copy)
        return None
    connection = socket.socket(fileno=copy)
    try:
        connection.getpeername()  # a socket that listens has none, and gloo aborts if it ends
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            return connection
    except OSError:
        pass
    connection.close()
    return None


@dataclass(slots=True)
class _Connection:
    """One that is to end here."""

    copy: socket.socket
    counts: tuple[int, ...] = ()
    num_equal: int = 0  # looks since something has moved

    def end_if_quiet(self, *, is_late: bool) -> bool:
        """Look; end it if nothing has moved for a while, or if it is late. Return whether it has ended."""
        try:
            counts, is_empty = self._look()
            self.num_equal = self.num_equal + 1 if counts == self.counts else 0
            self.counts = counts
            if self.num_equal < (_QUIET_LOOKS if is_empty else _STALLED_LOOKS) and not is_late:
                return False
            self.copy.shutdown(socket.SHUT_RD)
        except OSError:  # the other end has closed it: nobody waits for it
            pass
        return True

    def _look(self) -> tuple[tuple[int, ...], bool]:
        """Return how many bytes have come and gone, and whether none is on its way here."""
        info = self.copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        waits = [
            _NUMBER.unpack(fcntl.ioctl(self.copy, request, bytes(_NUMBER.size)))[0]
            for request in (termios.FIONREAD, termios.TIOCOUTQ)
        ]
        return _COUNTS.unpack_from(info, _COUNTS_OFFSET), not any(waits)
