"""Connections between simulated sockets, as the kernels of their nodes keep them.

Sockets are in sockets.py; nodes, names, delays and failures of the network in network.py.
"""

import errno
import os
from collections import deque
from typing import TYPE_CHECKING

from tests.simulation.kernel import Waiting

if TYPE_CHECKING:
    from tests.simulation.network import Host, Network

WHOLE_BYTES = 16 << 10  # so few are sent at once or not at all


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class End:
    """One end of a connection. What it has sent stays in its queue until it arrives at its peer.

    Attributes:
        host: the node.
        name: address and port.
        peer: the other end.
        num_outstanding: bytes that were sent and that the peer has not read.
        keepalive_s: silence after which the connection is given up; None without keepalive.
        blocked_s: time at which the network between the two nodes last failed.
        is_closed: whether the process has closed it, or ended.
    """

    __slots__ = (
        "_buffer",
        "_error",
        "_has_sent_end",
        "_is_at_end",
        "_network",
        "_num_held",
        "_queue",
        "_window",
        "blocked_s",
        "host",
        "is_closed",
        "keepalive_s",
        "name",
        "num_outstanding",
        "peer",
        "readable",
        "recv_event",
        "send_event",
        "writable",
    )

    peer: "End"

    def __init__(self, network: "Network", host: "Host", name: tuple[str, int]) -> None:
        self._network, self.host, self.name = network, host, name
        self._buffer = deque[memoryview]()
        self._queue = deque[bytes | None]()  # None for the end
        self._window = network.draw_window()
        self._error: OSError | None = None
        self._is_at_end = self._has_sent_end = self.is_closed = False
        self._num_held = self.num_outstanding = 0
        self.keepalive_s: float | None = None
        self.blocked_s = -1.0
        self.send_event = self.recv_event = ""
        self.readable, self.writable = Waiting(), Waiting()

    def join(self, peer: "End") -> None:
        for one, other in ((self, peer), (peer, self)):
            one.peer = other
            one.send_event = f"send {one.host.node} to {other.host.node}"
            one.recv_event = f"recv {one.host.node} from {other.host.node}"

    # What the process does

    @property
    def may_read(self) -> bool:
        return bool(self._buffer) or self._is_at_end or self._error is not None

    @property
    def num_free(self) -> int:
        """Return how many bytes may be sent."""
        return self._window - self.num_outstanding

    def raise_error(self) -> None:
        """Raise what has happened to the connection, once."""
        if self._error is not None:
            error, self._error = self._error, None
            self._is_at_end = self._has_sent_end = True
            raise error

    def put(self, content: memoryview) -> int:
        """Send as many bytes as fit; return how many, 0 if nothing fits."""
        if self._error is not None:
            self.raise_error()
        if self._has_sent_end:
            raise failure(errno.EPIPE)
        count = min(len(content), self.num_free)
        if count <= 0 or (count < len(content) <= WHOLE_BYTES):
            return 0
        network = self._network
        data = bytes(content[:count])
        if network.has_corruption:
            data = network.corrupted(data, self.host.node, self.peer.host.node)
        self.num_outstanding += count
        if count > 1 and network.random() < 0.2:
            cut = 1 + int(network.random() * (count - 1))
            self._transmit(data[:cut], cut)
            data = data[cut:]
        self._transmit(data, len(data))
        return count

    def take_into(self, target: memoryview, *, is_peek: bool = False) -> int:
        """Move bytes that have arrived into a buffer; return how many."""
        if not self._buffer:
            if self._error is not None:
                self.raise_error()
            return 0
        if is_peek:
            count = min(len(target), len(self._buffer[0]))
            target[:count] = self._buffer[0][:count]
            return count
        count, room = 0, len(target)
        if self._network.random() < 0.1:
            room = 1 + int(self._network.random() * room)
        while self._buffer and count < room:
            first = self._buffer[0]
            part = first[: room - count]
            target[count : count + len(part)] = part
            count += len(part)
            if len(part) == len(first):
                self._buffer.popleft()
            else:
                self._buffer[0] = first[len(part) :]
        peer = self.peer
        peer.num_outstanding -= count
        if peer.writable.threads:
            self._network.kernel.wake(peer.writable)
        return count

    def finish(self) -> None:
        if not self._has_sent_end:
            self._has_sent_end = True
            self._network.kernel.wake(self.writable)
            self._transmit(None, 0)

    def stop_reading(self) -> None:
        self._is_at_end = True
        self._network.kernel.wake(self.readable)

    def close(self) -> None:
        """Close as a kernel does: with a reset if something was not read."""
        if self.is_closed:
            return
        self.is_closed = True
        self._network.forget(self)
        if self._network.is_lost(self.host.node):
            return
        if self._buffer:
            self.abort()
        elif self._error is None:
            self.finish()

    def abort(self) -> None:
        """Drop what was not sent, and reset the other end."""
        self.is_closed = self._has_sent_end = True
        self._network.forget(self)
        self._queue.clear()
        self._num_held = 0
        self._network.send(self.host, self.peer.host, self.peer.reset)

    # What the network does

    def _transmit(self, data: bytes | None, num_bytes: int) -> None:
        # Whatever arrives first, the oldest is delivered.
        self._queue.append(data)
        delay_s = self._network.draw_delay(self.host, self.peer.host, num_bytes)
        self._network.kernel.call_later(delay_s, self._arrive)

    def _arrive(self) -> None:
        self._num_held += 1
        if self._num_held == 1:
            self.release()

    def release(self) -> None:
        """Deliver what has been held back, if the network allows it now, or try when it does."""
        if not self._num_held:
            return
        network = self._network
        if network.has_outage:
            blocked_s = network.blocked_s(self.host.node, self.peer.host.node)
            if blocked_s == float("inf"):
                return
            if blocked_s > 0:
                network.kernel.call_later(blocked_s + network.random(), self.release)
                return
        count, self._num_held = self._num_held, 0
        for _ in range(min(count, len(self._queue))):
            self._deliver(self._queue.popleft())

    def _deliver(self, data: bytes | None) -> None:
        peer = self.peer
        if peer.is_closed:
            if data is not None:
                self._network.send(peer.host, self.host, self.reset)
            return
        if data is None:
            peer._is_at_end = True
        elif peer._error is None and not peer._is_at_end:
            peer._buffer.append(memoryview(data))
        self._network.kernel.wake(peer.readable)

    def reset(self) -> None:
        """Notice that the other end knows nothing of this connection."""
        self.fail(errno.EPIPE if self._is_at_end else errno.ECONNRESET)

    def fail(self, number: int) -> None:
        """Break this end: its process gets an error as soon as it has read what has arrived."""
        if self.is_closed or self._error is not None:
            return
        if self._is_at_end and self._has_sent_end:
            return
        self._error = failure(number)
        self._queue.clear()
        self._num_held = 0
        kernel = self._network.kernel
        kernel.wake(self.readable)
        kernel.wake(self.writable)


class Attempt:
    """An attempt to connect.

    Attributes:
        outcome: the end of the connection, or what went wrong; None as long as it is open.
        is_over: whether nobody waits for it any more.
    """

    __slots__ = ("is_over", "outcome", "waiting")

    def __init__(self) -> None:
        self.outcome: End | OSError | None = None
        self.is_over = False
        self.waiting = Waiting()
