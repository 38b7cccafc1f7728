"""Sockets of simulated processes.

What becomes of a connection is in connections.py; nodes, names, delays and failures in network.py.
"""

import errno
import itertools
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from tests.simulation.connections import Attempt, End, failure
from tests.simulation.kernel import Process, Waiting

if TYPE_CHECKING:
    from tests.simulation.network import Network

_LONGEST_CONNECT_S = 127.0  # six retries
_NUMBERS = itertools.count(100)


class SimulatedSocket:
    """A TCP socket, and as much of a UDP socket as finding the own address takes."""

    def __init__(
        self,
        network: "Network",
        process: Process,
        family: int = socket.AF_INET,
        type: int = socket.SOCK_STREAM,
        proto: int = 0,
        fileno: int | None = None,
    ) -> None:
        assert fileno is None
        network.check_descriptors(process)
        if family not in (socket.AF_INET, -1):
            raise failure(errno.EAFNOSUPPORT)
        self._network, self._kernel, self._process = network, network.kernel, process
        self._host = network.host_of(process.node)
        self.family, self.type, self.proto = socket.AF_INET, socket.SocketKind(type), proto
        self._timeout_s: float | None = None
        self._options: dict[tuple[int, int], Any] = {}
        self._name = ("0.0.0.0", 0)
        self._end: End | None = None
        self._attempt: Attempt | None = None
        self._backlog: deque[End] | None = None
        self._most_waiting = 0
        self._accepting = Waiting()
        self._num_inside = 0  # threads that wait in it keep it open for the kernel
        self._is_closed = self._is_released = False
        self._number = next(_NUMBERS)
        network.own(process, self)

    # Settings

    def settimeout(self, value: float | None) -> None:
        """Limit every later call."""
        self._timeout_s = value

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def setsockopt(self, level: int, optname: int, value: Any) -> None:
        """Set an option; those of keepalive matter."""
        self._check_open()
        self._options[level, optname] = value
        if self._end is not None:
            self._set_keepalive(self._end)

    def getsockopt(self, level: int, optname: int, buflen: int = 0) -> Any:
        return self._options.get((level, optname), 0)

    def _set_keepalive(self, end: End) -> None:
        get = self._options.get
        before, end.keepalive_s = end.keepalive_s, None
        if get((socket.SOL_SOCKET, socket.SO_KEEPALIVE)):
            idle_s = get((socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 7200)
            probe_s = get((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 75)
            num_probes = get((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 9)
            end.keepalive_s = float(idle_s + probe_s * num_probes)
        if end.keepalive_s != before:
            self._network.watch(end)

    def fileno(self) -> int:
        return -1 if self._is_closed else self._number

    def getsockname(self) -> tuple[str, int]:
        self._check_open()
        return self._name

    def getpeername(self) -> tuple[str, int]:
        """Return address and port of the other side."""
        return self._connected().peer.name

    # Listening

    def bind(self, address: tuple[str, int]) -> None:
        self._check_open()
        self._name = self._network.bind(self._host, address, self)

    def listen(self, backlog: int = 128) -> None:
        self._check_open()
        self._kernel.event("listen")
        self._backlog, self._most_waiting = deque(), backlog

    @property
    def has_room(self) -> bool:
        assert self._backlog is not None
        return len(self._backlog) <= self._most_waiting

    @property
    def is_listening(self) -> bool:
        return self._backlog is not None

    def add(self, end: End) -> None:
        """Add a connection that nobody has accepted yet."""
        assert self._backlog is not None
        self._backlog.append(end)
        self._kernel.wake(self._accepting, 1)

    def accept(self) -> "tuple[SimulatedSocket, tuple[str, int]]":
        self._kernel.event("accept")
        self._check_open()
        until = self._until()
        while True:
            self._network.check_descriptors(self._process)
            if self._backlog is None:
                raise failure(errno.EINVAL)
            if self._backlog:
                break
            self._wait(self._accepting, until)
        end = self._backlog.popleft()
        accepted = SimulatedSocket(self._network, self._process)
        accepted._end, accepted._name = end, end.name
        return accepted, end.peer.name

    def _stop_listening(self) -> None:
        backlog, self._backlog = self._backlog, None
        for end in backlog or ():
            end.abort()
        self._network.unbind(self._host, self._name[1], self)
        self._kernel.wake(self._accepting)

    # Connections

    def connect(self, address: tuple[str, int]) -> None:
        self._check_open()
        self._kernel.event(f"connect to {address[0]}")
        if self.type == socket.SOCK_DGRAM:
            self._name = (self._network.source_address(self._host, address[0]), self._number)
            return
        if self._end is not None:
            raise failure(errno.EISCONN)
        attempt = self._attempt = Attempt()
        self._network.connect(self._host, address, attempt)
        longest_s = _LONGEST_CONNECT_S
        if self._timeout_s is not None:
            longest_s = min(longest_s, self._timeout_s)
        self._num_inside += 1
        self._kernel.wait(attempt.waiting, longest_s)
        self._leave()
        attempt.is_over, self._attempt = True, None
        outcome = attempt.outcome
        if outcome is None and self._timeout_s == longest_s:
            raise TimeoutError("timed out")
        if outcome is None:
            raise failure(errno.ETIMEDOUT)
        if isinstance(outcome, OSError):
            raise outcome
        self._check_open()
        self._end, self._name = outcome, outcome.name
        self._set_keepalive(outcome)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send the beginning of something; return how many bytes."""
        end = self._connected()
        self._kernel.event(end.send_event)
        content = memoryview(data).cast("B")
        if not content:
            return 0
        until = self._until()
        while not (count := end.put(content)):
            self._wait(end.writable, until)
        return count

    def sendall(self, data: Any, flags: int = 0) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self.send(rest) :]

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive into a buffer; return how many bytes, 0 at the end."""
        end = self._connected()
        self._kernel.event(end.recv_event)
        target = memoryview(buffer).cast("B")
        target = target[:nbytes] if nbytes else target
        if not target:
            return 0
        if not end.may_read:
            until = self._until()
            while not end.may_read:
                self._wait(end.readable, until)
        return end.take_into(target, is_peek=bool(flags & socket.MSG_PEEK))

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        content = bytearray(bufsize)
        return bytes(content[: self.recv_into(content, bufsize, flags)])

    def shutdown(self, how: int) -> None:
        """Send nothing more, receive nothing more, or both; a listener stops listening."""
        self._check_open()
        self._kernel.event("shutdown")
        if self._backlog is not None:
            self._stop_listening()
            return
        end = self._connected()
        if how in (socket.SHUT_WR, socket.SHUT_RDWR):
            end.finish()
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            end.stop_reading()

    def close(self) -> None:
        """Close; a thread that waits in it stays there until its time is over."""
        if self._is_closed:
            return
        self._kernel.event("close")
        self._is_closed = True
        if not self._num_inside:
            self.release()

    def release(self) -> None:
        """Do what the kernel does when nobody has the socket any more."""
        if self._is_released:
            return
        self._is_closed = self._is_released = True
        self._network.disown(self._process, self)
        if self._backlog is not None:
            self._stop_listening()
        elif self._end is not None:
            self._end.close()
        else:
            self._network.unbind(self._host, self._name[1], self)
        if self._attempt is not None:
            self._attempt.is_over = True
            if isinstance(self._attempt.outcome, End):
                self._attempt.outcome.close()

    detach = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Waiting

    def _check_open(self) -> None:
        if self._is_closed:
            raise failure(errno.EBADF)

    def _connected(self) -> End:
        if self._is_closed:
            raise failure(errno.EBADF)
        if self._end is None:
            raise failure(errno.ENOTCONN)
        return self._end

    def _until(self) -> float | None:
        return None if self._timeout_s is None else self._kernel.now + self._timeout_s

    def _wait(self, waiting: Waiting, until: float | None) -> None:
        rest_s = None if until is None else until - self._kernel.now
        if self._timeout_s == 0:
            raise failure(errno.EAGAIN)
        if rest_s is not None and rest_s <= 0:
            raise TimeoutError("timed out")
        self._num_inside += 1
        self._kernel.wait(waiting, rest_s)
        self._leave()
        if until is not None:  # else the thread is in the kernel, where its call continues
            self._check_open()

    def _leave(self) -> None:
        self._num_inside -= 1
        if self._is_closed and not self._num_inside:
            self.release()
