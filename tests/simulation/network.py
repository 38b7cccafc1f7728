"""The network between simulated nodes: names, delays, and what a schedule lets fail.

Sockets are in sockets.py, connections in connections.py. `socket.create_connection` and the like are Python's
own: they are built on sockets and names.
"""

import errno
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.active import Patches, World, world
from tests.simulation.connections import Attempt, End, failure
from tests.simulation.kernel import Kernel, Process
from tests.simulation.sockets import SimulatedSocket

_FOREVER = float("inf")
_LOOPBACK, _EVERYWHERE = "127.0.0.1", "0.0.0.0"
_ANY = ("", _EVERYWHERE)
_DELAY_S, _JITTER_S, _LOCAL_S = 30e-6, 100e-6, 10e-6
_BYTES_PER_S = 1e9
_REAP_S = 0.02  # at most, until the sockets of a process that was killed are closed
_RETRANSMISSION_S = 924.0  # until unanswered bytes end a connection
_NO_ROUTE_S = 3.0
_FIRST_PORT, _NUM_PORTS = 32768, 28232


@dataclass(eq=False)
class Host:
    """A node as the network knows it.

    Attributes:
        node: its name, which is also its host name.
        ports: by port the addresses and sockets that have it.
    """

    node: str
    address: str
    ports: dict[int, list[tuple[str, SimulatedSocket]]] = field(default_factory=dict)

    def has_address(self, address: str) -> bool:
        return address in (self.address, _LOOPBACK, *_ANY)


class Network:
    """All nodes and connections.

    Attributes:
        on_cut: called with two lists of nodes between which all connections are reset.
        has_outage: whether something may be unreachable.
        has_slowness: whether some nodes may be slow.
        has_corruption: whether bits are to be flipped.
        resets_some: whether half of the connections between two nodes survive a reset.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.random = kernel.random.random
        self.on_cut: list[Callable[[list[str], list[str]], None]] = []
        self.has_outage = self.has_slowness = self.has_corruption = False
        self.resets_some = False
        self._hosts: dict[str, Host] = {}  # by node
        self._ends: dict[End, None] = {}
        self._lost: dict[str, None] = {}
        self._blocked: dict[tuple[str, str], float] = {}  # until when, by sender and receiver
        self._slow: dict[str, tuple[float, float]] = {}  # factor, and until when, by node
        self._corrupting: dict[tuple[str, str], int] = {}  # how many times, by sender and receiver
        self._lacking: dict[Process, float] = {}  # until when
        self._owned: dict[Process, dict[SimulatedSocket, None]] = {}

    # Nodes

    def add_node(self, node: str) -> Host:
        """Add a node; others are added when their processes first use the network."""
        assert node not in self._hosts
        number = len(self._hosts) + 1
        address = f"10.0.{number // 250}.{number % 250 + 1}"
        self._hosts[node] = Host(node, address)
        return self._hosts[node]

    def host_of(self, node: str) -> Host:
        return self._hosts.get(node) or self.add_node(node)

    def resolve(self, name: str) -> str | None:
        """Return the address of a name or an address; None if it is unknown."""
        if name in ("localhost", "localhost.localdomain"):
            return _LOOPBACK
        if name in self._hosts:
            return self._hosts[name].address
        try:
            socket.inet_aton(name)
        except OSError:
            return None
        return name

    def source_address(self, own: Host, target: str) -> str:
        found = self.resolve(target)
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return _LOOPBACK if found.startswith("127.") else own.address

    # Ports

    def bind(self, host: Host, address: tuple[str, int], owner: SimulatedSocket) -> tuple[str, int]:
        """Give a port to a socket; return address and port."""
        found = _EVERYWHERE if address[0] in _ANY else self.resolve(address[0])
        if found is None or not host.has_address(found):
            raise failure(errno.EADDRNOTAVAIL)
        port = address[1] or self._free_port(host)
        taken = host.ports.setdefault(port, [])
        if any(found == other or _EVERYWHERE in (found, other) for other, _ in taken):
            raise failure(errno.EADDRINUSE)
        taken.append((found, owner))
        return found, port

    def _free_port(self, host: Host) -> int:
        while (port := _FIRST_PORT + int(self.random() * _NUM_PORTS)) in host.ports:
            pass
        return port

    def unbind(self, host: Host, port: int, owner: SimulatedSocket) -> None:
        left = [each for each in host.ports.get(port, ()) if each[1] is not owner]
        if left:
            host.ports[port] = left
        else:
            host.ports.pop(port, None)

    # Processes

    def own(self, process: Process, owned: SimulatedSocket) -> None:
        if process not in self._owned:
            self._owned[process] = {}
            process.at_death.append(lambda: self._reap_later(process))
        self._owned[process][owned] = None

    def disown(self, process: Process, owned: SimulatedSocket) -> None:
        self._owned.get(process, {}).pop(owned, None)

    def _reap_later(self, process: Process) -> None:
        def reap() -> None:
            for owned in list(self._owned.pop(process, {})):
                owned.release()

        self.kernel.call_later(self.random() * _REAP_S, reap)

    def check_descriptors(self, process: Process) -> None:
        """Raise an OSError if a process has no descriptor left."""
        if self._lacking and self._lacking.get(process, 0.0) > self.kernel.now:
            raise failure(errno.EMFILE)

    # Packets

    def draw_window(self) -> int:
        """Return how many bytes a connection holds."""
        return 1 << (16 + int(self.random() * 4))

    def draw_delay(self, source: Host, target: Host, num_bytes: int) -> float:
        """Return the seconds that something takes."""
        if source is target:
            return _LOCAL_S * (1 + self.random())
        seconds = _DELAY_S + _JITTER_S * self.random() + num_bytes / _BYTES_PER_S
        if self.random() < 0.01:
            seconds += 0.2 * self.random()  # lost and sent again
        return seconds * self.slowness(source.node, target.node) if self.has_slowness else seconds

    def slowness(self, *nodes: str) -> float:
        """Return by which factor everything between nodes takes longer than usual."""
        now = self.kernel.now
        found = [self._slow[node] for node in nodes if node in self._slow]
        return max((factor for factor, until in found if until > now), default=1.0)

    def send(self, source: Host, target: Host, act: Callable[[], None]) -> None:
        """Have a single packet do something when it arrives."""
        blocked_s = self.blocked_s(source.node, target.node) if self.has_outage else 0.0
        if blocked_s < _FOREVER:
            self.kernel.call_later(blocked_s + self.draw_delay(source, target, 0), act)

    def blocked_s(self, source: str, target: str) -> float:
        """Return the seconds for which nothing gets from a node to another one; 0 if it does."""
        if source == target or not self.has_outage:
            return 0.0
        if source in self._lost or target in self._lost:
            return _FOREVER
        return max(0.0, self._blocked.get((source, target), 0.0) - self.kernel.now)

    def severed_s(self, one: str, other: str) -> float:
        """Return the seconds for which two nodes cannot talk; 0 if they can."""
        if not self.has_outage:
            return 0.0
        return max(self.blocked_s(one, other), self.blocked_s(other, one))

    def corrupted(self, data: bytes, source: str, target: str) -> bytes:
        """Return data with a flipped bit if a schedule wants one there, and the receiver can notice."""
        count = self._corrupting.get((source, target), 0)
        # Nothing but TCP protects the header of a message.
        if not count or data[4:12] == b'{"type":':
            return data
        self._corrupting[source, target] = count - 1
        self.has_corruption = any(self._corrupting.values())
        flipped = bytearray(data)
        flipped[int(self.random() * len(data))] ^= 1 << int(self.random() * 8)
        return bytes(flipped)

    # Connecting

    def connect(self, host: Host, address: tuple[str, int], attempt: Attempt) -> None:
        """Try to connect; wake who waits for the attempt when it has come to an end."""
        name = self.resolve(address[0])
        if name is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        found: Host | None = host
        if not host.has_address(name):
            found = next((each for each in self._hosts.values() if each.address == name), None)
        is_gone = found is None or found.node in self._lost
        if is_gone and self.random() < 0.5:
            self._conclude(attempt, failure(errno.EHOSTUNREACH), _NO_ROUTE_S)
        elif found is not None:
            target = (_LOOPBACK if name.startswith("127.") else found.address, address[1])
            self._knock(attempt, host, found, target, 1.0)

    def _conclude(self, attempt: Attempt, outcome: End | OSError, delay_s: float) -> None:
        def conclude() -> None:
            if attempt.is_over:
                if isinstance(outcome, End):
                    outcome.abort()
            elif attempt.outcome is None:
                attempt.outcome = outcome
                self.kernel.wake(attempt.waiting)

        self.kernel.call_later(delay_s, conclude)

    def _knock(
        self, attempt: Attempt, host: Host, found: Host, target: tuple[str, int], pause_s: float
    ) -> None:
        """Send the first packet, and again as long as nobody answers."""

        def arrive() -> None:
            if attempt.is_over:
                return
            taken = found.ports.get(target[1], ())
            listeners = [own for address, own in taken if address in (target[0], _EVERYWHERE)]
            is_silent = self.severed_s(host.node, found.node) > 0
            if is_silent or (listeners and listeners[0].is_listening and not listeners[0].has_room):
                self.kernel.call_later(
                    pause_s, lambda: self._knock(attempt, host, found, target, 2 * pause_s)
                )
                return
            back_s = self.draw_delay(found, host, 0)
            if not listeners or not listeners[0].is_listening:
                self._conclude(attempt, failure(errno.ECONNREFUSED), back_s)
                return
            ends = self._join(host, found, target)
            listeners[0].add(ends[1])
            self._conclude(attempt, ends[0], back_s)

        if not attempt.is_over:
            self.kernel.call_later(self.draw_delay(host, found, 0), arrive)

    def _join(self, host: Host, found: Host, target: tuple[str, int]) -> tuple[End, End]:
        address = _LOOPBACK if target[0] == _LOOPBACK else host.address
        ends = End(self, host, (address, self._free_port(host))), End(self, found, target)
        ends[0].join(ends[1])
        self._ends[ends[0]] = self._ends[ends[1]] = None
        return ends

    def forget(self, end: End) -> None:
        self._ends.pop(end, None)

    # Failures that a schedule chooses

    def partition(
        self,
        nodes_a: Iterable[str],
        nodes_b: Iterable[str],
        seconds: float,
        *,
        drop_probability: float = 0.3,
    ) -> None:
        """Let nothing through between two sets of nodes; some connections do not survive that."""
        a, b = list(nodes_a), list(nodes_b)
        self._block([(x, y) for x in a for y in b] + [(y, x) for x in a for y in b], seconds)
        if self.random() < drop_probability:
            self.kernel.call_later(seconds + self.random(), lambda: self._cut(a, b))

    def stuck(self, source: str, target: str, seconds: float) -> None:
        """Hold back what one node sends to another."""
        self._block([(source, target)], seconds)

    def _block(self, pairs: Iterable[tuple[str, str]], seconds: float) -> None:
        self.has_outage = True
        until = self.kernel.now + seconds
        before = {pair: self.severed_s(*pair) for pair in pairs}
        for pair in before:
            self._blocked[pair] = max(until, self._blocked.get(pair, 0.0))
        for end in list(self._ends):
            pair = end.host.node, end.peer.host.node
            if before.get(pair, before.get(pair[::-1])) == 0.0:
                end.blocked_s = self.kernel.now
                self.watch(end)

    def watch(self, end: End) -> None:
        """Give up an end whose network has failed, after a while."""
        own, other = end.host.node, end.peer.host.node
        if not self.has_outage or self.severed_s(own, other) == 0.0:
            return
        patience_s = _RETRANSMISSION_S if end.num_outstanding else end.keepalive_s
        since = end.blocked_s

        def give_up() -> None:
            if end.blocked_s == since and self.severed_s(own, other) > 0:
                end.fail(errno.ETIMEDOUT)

        if patience_s is not None:
            self.kernel.call_later(patience_s, give_up)

    def slow(self, node: str, factor: float, seconds: float) -> None:
        self.has_slowness = True
        self._slow[node] = (factor, self.kernel.now + seconds)

    def reset(self, node: str) -> None:
        self._cut([node], [each for each in self._hosts if each != node])

    def _cut(self, a: list[str], b: list[str]) -> None:
        spared: dict[End, bool] = {}
        for end in list(self._ends):
            own, other = end.host.node, end.peer.host.node
            if (own in a and other in b) or (own in b and other in a):
                if end.peer in spared:
                    spared[end] = spared[end.peer]
                else:
                    spared[end] = self.resets_some and self.random() < 0.5
                if not spared[end]:
                    end.reset()
        for act in self.on_cut:
            act(a, b)

    def lose(self, node: str) -> None:
        """Let a node say nothing any more. Its processes are not ended by this."""
        self.has_outage = True
        ends = [e for e in self._ends if node in (e.host.node, e.peer.host.node)]
        before = [end for end in ends if self.severed_s(end.host.node, end.peer.host.node) == 0.0]
        self._lost[node] = None
        for end in before:
            end.blocked_s = self.kernel.now
            self.watch(end)

    def is_lost(self, node: str) -> bool:
        return node in self._lost

    def restore(self, node: str) -> None:
        """Let a lost node take part again, which knows nothing of its connections."""
        self._lost.pop(node, None)
        for end in list(self._ends):
            if end.host.node == node:
                end.is_closed = True
                self.forget(end)
            elif end.peer.host.node == node:
                probe_s = 3.0 if end.num_outstanding else end.keepalive_s
                if probe_s is not None:
                    self.kernel.call_later(probe_s * self.random(), end.reset)

    def lack_descriptors(self, process: Process, seconds: float) -> None:
        """Let a process neither accept nor make connections for a while."""
        self._lacking[process] = self.kernel.now + seconds

    def corrupt_next(self, source: str, target: str, count: int = 1) -> None:
        """Flip a bit in the next pieces of data from a node to another, behind the back of TCP."""
        self._corrupting[source, target] = count
        self.has_corruption = True

    def end_corruption(self) -> None:
        self._corrupting.clear()
        self.has_corruption = False


# What takes the places of Python's functions.


def _getaddrinfo(
    world: World,
    host: str | None,
    port: int | None,
    family: int = 0,
    type: int = 0,
    proto: int = 0,
    flags: int = 0,
) -> list[Any]:
    world.kernel.event("getaddrinfo")
    network = world.network
    address = _LOOPBACK if host is None else network.resolve(host)
    if address is None or family == socket.AF_INET6:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    kind = socket.SocketKind(type or socket.SOCK_STREAM)
    protocol = socket.IPPROTO_TCP if kind is socket.SOCK_STREAM else socket.IPPROTO_UDP
    return [(socket.AF_INET, kind, protocol, "", (address, port or 0))]


class _Socket(socket.socket):
    """Makes a simulated socket in a simulated thread, else a real one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        current = world()
        if current is not None:
            return SimulatedSocket(current.network, current.process, *args, **kwargs)
        return super().__new__(cls, *args, **kwargs)


def install(patches: Patches) -> None:
    """Put simulated sockets and names in the places of real ones."""
    patches.set(socket, "socket", _Socket)
    patches.divert(socket, "getaddrinfo", _getaddrinfo)
    patches.divert(
        socket, "gethostname", lambda world: world.network.host_of(world.process.node).node
    )
