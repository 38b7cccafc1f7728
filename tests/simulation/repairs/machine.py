"""Processes and local sockets as agents see them on simulated nodes; store.py has the job's store.

A fork makes a simulated process that does what the product's child does. The pair of sockets between an
agent and its fork server carries whole messages.
"""

import os
import signal
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moe_ft.cluster import agent, fork_server, forks, observer
from moe_ft.cluster.coordinator import Coordinator
from moe_ft.cluster.forks import Fork
from moe_ft.cluster.membership import Begin, Declare, Over, Save, Strike
from moe_ft.cluster.options import KeepOptions
from moe_ft.cluster.own_node import RENEWAL_BEATS
from moe_ft.cluster.target import Target
from tests.simulation.active import Patches, World, world
from tests.simulation.kernel import Process, Waiting
from tests.simulation.processes import _HANDLERS, PARENT
from tests.simulation.store import Values

if TYPE_CHECKING:
    from tests.simulation.repairs.job import Job

MACHINE = "machine"  # local state of each process, and of the job
MEMBER = "member"
LAYOUT = "layout"  # of a rank: number of the start of all ranks within that of the agents
FORGED = "0" * 64 + ' {"rank":0}'  # what a stranger writes into the store
_IMPORT_S, _ANSWER_S = 2.0, 0.002
_LONGEST_END_S = 1.0  # from SIGTERM to the end of a rank


class Machine:
    """Things that all nodes of a simulated job share.

    Attributes:
        changes: woken by whatever a process may wait for.
        fork_servers: by node.
        ports: listeners of stores, by address.
        job: that runs on it.
        slowness: seconds that the store needs for each answer, at most.
        has_stranger: whether somebody else writes to the store.
        cut_until_s, powerless: by node, until when its link is cut; those whose kernels answer nothing.
        parted_until_s: by node, until when it reaches the store's node alone.
        doors: agents that others watch, by address.
        unreachable_s: by node, from when to when its kernel has answered nobody, last.
    """

    def __init__(self, current: World, job: "Job") -> None:
        self.world, self.job = current, job
        self.changes = Waiting()
        self.fork_servers: dict[str, Process] = {}
        self.ports: dict[tuple[str, int], Listener] = {}
        self.descriptors: dict[int, Process] = {}
        self.slowness, self.has_stranger = _ANSWER_S, False
        self.cut_until_s: dict[str, float] = {}
        self.parted_until_s: dict[str, float] = {}
        self.powerless: set[str] = set()
        self.doors: dict[tuple[str, int], Process] = {}
        self.unreachable_s: dict[str, tuple[float, float]] = {}

    def make_process(
        self, name: str, node: str, parent: Process, environ: dict[str, str], act: Callable[[], Any]
    ) -> Process:
        """Start a process that ends with exit code 0 after what it does, or with 1 after an exception."""
        kernel = self.world.kernel
        process = kernel.make_process(name, node, environ)
        process.local |= {MACHINE: self, PARENT: parent.pid}
        process.at_death.append(self.changed)

        def run() -> None:
            code = 0
            try:
                act()
            except SystemExit as end:
                code = int(end.code or 0)
            except Exception:
                print(traceback.format_exc(), file=sys.stderr)
                code = 1
            kernel.end(process, code)

        kernel.spawn(process, run)
        return process

    def changed(self) -> None:
        """Have all look again that wait for anything."""
        self.world.kernel.wake(self.changes)

    def wait_for(self, found: Callable[[], Any], timeout_s: float | None) -> Any:
        """Wait until a function returns something true, and return it; or its last value."""
        kernel = self.world.kernel
        until_s = None if timeout_s is None else kernel.now + timeout_s
        while not (result := found()):
            rest_s = None if until_s is None else until_s - kernel.now
            if rest_s is not None and rest_s <= 0:
                break
            kernel.wait(self.changes, rest_s)
        return result

    def is_cut_off(self, node: str, other: str | None = None) -> bool:
        """Return whether a node reaches no other one, or a certain one does not."""
        now_s = self.world.kernel.now
        return node != other and any(
            self.cut_until_s.get(each, 0.0) > now_s for each in (node, other) if each is not None
        )

    def cut(self, node: str, seconds: float) -> None:
        """Cut the link of a node for a while."""
        now_s = self.world.kernel.now
        self.cut_until_s[node] = now_s + seconds
        since_s, end_s = self.unreachable_s.get(node, (now_s, now_s))  # no look in between tells
        self.unreachable_s[node] = since_s if end_s > now_s - 0.2 else now_s, now_s + seconds
        self.world.kernel.call_later(seconds, self.changed)

    def has_agent(self, node: str) -> bool:
        """Return whether an agent runs on a node."""
        return any(
            each.is_alive and not each.is_suspended
            for each in self.world.kernel.processes
            if each.node == node and each.name.startswith("agent")
        )

    def answers(self, node: str, other: str) -> bool:
        """Return whether the kernel of another node answers a node."""
        now_s = self.world.kernel.now
        parted = (self.parted_until_s.get(each, 0.0) > now_s for each in (node, other))
        return other not in self.powerless and not self.is_cut_off(node, other) and not any(parted)

    def is_readable(self, what: Any) -> bool:
        """Return whether something can be read: a socket, or the end of a process."""
        if isinstance(what, int):
            return not self.descriptors[what].is_alive
        return bool(what.is_readable)

    def process_of(self, pid: int) -> Process:
        found = next((each for each in self.world.kernel.processes if each.pid == pid), None)
        if found is None:
            raise ProcessLookupError(3, "No such process")
        return found


class Connection:
    """One end of a pair of sockets, which carries messages."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.content: deque[bytes] = deque()
        self.owner: Process | None = None
        self.has_ended = False
        self.peer: Connection

    def belong_to(self, process: Process) -> None:
        """End with a process."""
        self.owner = process
        process.at_death.append(self._end)

    def _end(self) -> None:
        self.has_ended = True
        self.machine.changed()

    @property
    def is_readable(self) -> bool:
        return bool(self.content) or self.peer.has_ended

    def recv(self, size: int) -> bytes:
        """Wait for a message, and return it; nothing if the other side has ended."""
        self.machine.wait_for(lambda: self.is_readable, None)
        return self.content.popleft() if self.content else b""

    def send(self, content: bytes, flags: int = 0) -> None:
        self.machine.world.kernel.event("keeper: send")
        if self.peer.has_ended:
            raise BrokenPipeError(32, "Broken pipe")
        self.peer.content.append(content)
        self.machine.changed()

    def close(self) -> None:
        """Close this end, unless that of another process is meant."""
        if self.machine.world.process is self.owner:
            self._end()


def _socket_pair() -> tuple[Connection, Connection]:
    machine = machine_here()
    ours, theirs = Connection(machine), Connection(machine)
    ours.peer, theirs.peer = theirs, ours
    ours.belong_to(machine.world.process)
    return ours, theirs


class Listener:
    """A socket that listens, of a store, which is a server then."""

    def __init__(self, machine: Machine, process: Process, address: tuple[str, int]) -> None:
        self.machine, self.process, self._address = machine, process, address
        # By prefix: of the starts that one store serves.
        self.starts = defaultdict[str, Values](lambda: Values(FORGED))
        self.server: Process | None = None
        self.store: Any = None

    def getsockname(self) -> tuple[str, int]:
        return self._address

    def close(self) -> None:
        """Do nothing: who listens is the process."""


class Selector:
    """A `selectors.DefaultSelector`."""

    def __init__(self) -> None:
        self._keys: dict[Any, SimpleNamespace] = {}

    def register(self, what: Any, events: int, data: Any) -> None:
        self._keys[what] = SimpleNamespace(fileobj=what, fd=what, data=data)

    def unregister(self, what: Any) -> None:
        del self._keys[what]

    def get_map(self) -> dict[Any, SimpleNamespace]:
        return self._keys

    def select(self, timeout_s: float | None = None) -> list[tuple[SimpleNamespace, int]]:
        machine = machine_here()
        machine.world.kernel.event("keeper: select")
        found = machine.wait_for(
            lambda: [key for what, key in self._keys.items() if machine.is_readable(what)],
            timeout_s,
        )
        return [(key, 1) for key in found]


def machine_here() -> Machine:
    current = world()
    assert current is not None
    found: Machine = current.process.local[MACHINE]
    return found


class _System:
    """The module `os` of agents and fork servers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fork(self) -> int:
        """Do in a new process what the caller does in its child."""
        machine, seen = machine_here(), sys._getframe(1).f_locals
        parent, act = machine.world.process, seen["act"]
        environ, local = dict(parent.environ), dict[str, Any]()
        name = "fork server" if "theirs" in seen else "store"
        if "request" in seen:
            request: Fork = seen["request"]
            environ |= request.environment
            name = f"rank {request.assignment.rank}"
            layout = request.assignment.start - machine.job.starts[-1].number
            local = {MEMBER: seen["member"], LAYOUT: layout}
        child = machine.make_process(name, parent.node, parent, environ, act)
        child.local |= local
        if "theirs" in seen:
            seen["theirs"].belong_to(child)
            machine.fork_servers[parent.node] = child
        parent.children.append(child)
        return child.pid

    def pidfd_open(self, pid: int) -> int:
        machine = machine_here()
        descriptor = 1000 + len(machine.descriptors)
        machine.descriptors[descriptor] = machine.process_of(pid)
        return descriptor

    def waitpid(self, pid: int, options: int) -> tuple[int, int]:
        code = machine_here().process_of(pid).exit_code
        assert code is not None
        return pid, -code if code < 0 else code << 8

    def kill(self, pid: int, number: int) -> None:
        self.killpg(pid, number)

    def killpg(self, pid: int, number: int) -> None:
        """Send a signal to a process; a rank takes a while to end after SIGTERM."""
        machine = machine_here()
        process, kernel = machine.process_of(pid), machine.world.kernel
        if not process.is_alive:
            raise ProcessLookupError(3, "No such process")
        if number == signal.SIGKILL:
            kernel.kill(process, -number)
        elif (handler := handler_of(process, number)) is not None:
            kernel.spawn(process, lambda: handler(number, None), "signal")
        else:
            delay_s = kernel.random.random() * _LONGEST_END_S
            kernel.call_later(delay_s, lambda: _end_unless_stopped(process, number))

    def close(self, descriptor: int) -> None:
        """Do nothing."""

    def setsid(self) -> None:
        """Do nothing."""


def handler_of(process: Process, number: int) -> Callable[..., Any] | None:
    """Return what a process does at a signal; None if it ends."""
    found: Callable[..., Any] | None = process.local.get(_HANDLERS, {}).get(number)
    return found


def _end_unless_stopped(process: Process, number: int) -> None:
    if not process.is_suspended:
        process.kernel.kill(process, -number)


def _select(readers: Iterable[Any], *_: Any) -> tuple[list[Any], list[Any], list[Any]]:
    machine, timeout_s = machine_here(), _[2] if len(_) > 2 else None
    machine.world.kernel.event("keeper: select")
    found = machine.wait_for(
        lambda: [each for each in readers if machine.is_readable(each)], timeout_s
    )
    return found, [], []


def _import_modules(target: Target) -> str:
    machine_here().world.kernel.sleep(_IMPORT_S)
    return ""


def be_agent(options: KeepOptions) -> None:
    """Be the agent of a node, in its process."""
    server = forks.Forks(partial(fork_server.serve_forks, options.target))
    if options.has_ranks:
        server.start()
    found = agent.join(options, server, lambda _: None)
    if not isinstance(found, int):  # the node of the store alone
        found()
    raise SystemExit(found)


class _NoFacts:
    """Facts of a node about which nothing is known: it has no files, and no datagrams."""

    def __init__(self, *_: object) -> None:
        self._num_beats = 0

    def open(self) -> None:
        pass

    def facts(self, *, has_ranks: bool, server: int = 0) -> dict[str, Any]:
        return {}

    def is_due(self) -> bool:
        self._num_beats += 1
        return self._num_beats % RENEWAL_BEATS == 1

    def learn(self, own: str, addresses: object) -> None:
        pass

    def close(self) -> None:
        pass

    def remove_memory(self) -> None:
        pass


def _let_watch(host: str, run: str, token: str) -> int:
    machine = machine_here()
    process, port = machine.world.process, len(machine.doors)
    machine.doors[process.node, port] = process
    return port


class Probe:
    """A connection to the agent of another node, whose kernel answers as long as it can."""

    def __init__(self, address: tuple[str, int], run: str, token: str) -> None:
        self._machine, self._is_reached = machine_here(), False
        self._node, self._door = self._machine.world.process.node, self._machine.doors[address]

    def look(self) -> bool:
        """Return whether the kernel has answered; an agent that has ended cannot be reached."""
        if not self._machine.answers(self._node, self._door.node):
            return not self._is_reached
        self._is_reached = self._door.is_alive and (self._is_reached or not self._door.is_suspended)
        return True

    def close(self) -> None:
        """Do nothing."""


def install(patches: Patches) -> None:
    """Have the code of agents and fork servers run on simulated nodes."""
    for module in (agent, fork_server, forks):
        patches.set(module, "os", _System())
    for module in (agent, fork_server):
        patches.set(module, "set_process_name", lambda name: None)
    patches.set(agent, "OwnNode", _NoFacts)
    patches.set(observer, "let_watch", _let_watch)
    patches.set(observer, "Probe", Probe)
    patches.set(observer, "own_host", lambda master: machine_here().world.process.node)
    patches.set(Coordinator, "_end", _checked(Coordinator._end))
    patches.set(Coordinator, "_begin", _observed(Coordinator._begin))
    patches.set(Coordinator, "_declare", _watched(Coordinator._declare))
    patches.set(forks, "socket_pair", _socket_pair)
    patches.set(forks, "select", SimpleNamespace(select=_select))
    patches.set(forks, "is_stopped", lambda pid: machine_here().process_of(pid).is_suspended)
    selectors = SimpleNamespace(DefaultSelector=Selector, EVENT_READ=1)
    patches.set(fork_server, "selectors", selectors)
    patches.set(fork_server, "import_modules", _import_modules)
    patches.set(fork_server, "why_not_to_fork", lambda: "")
    patches.set(fork_server, "become", lambda name, environment: None)
    patches.set(fork_server, "run", lambda target: machine_here().job.run_rank())
    patches.set(fork_server, "become_member", lambda member, assignment: None)
    patches.divert(signal, "pthread_sigmask", lambda world, how, mask: set())
    patches.divert(signal, "pause", lambda world: world.kernel.wait(Waiting()))


def _checked(
    original: Callable[[Coordinator, Strike | Save | Over], None],
) -> Callable[[Coordinator, Strike | Save | Over], None]:
    """Have the oracle see who is called lost."""

    def end(self: Coordinator, command: Strike | Save | Over) -> None:
        machine = machine_here()
        for each in command.nodes if isinstance(command, Strike) else ():
            name = self._roster._heard[each].node.name
            now_s, silence = machine.world.kernel.now, machine.unreachable_s.get(name)
            if machine.parted_until_s.get(name, 0.0) > now_s and not machine.has_agent(name):
                silence = 0.0, now_s  # nobody can tell it from one without power
            machine.job.oracle.strikes(name, command.why, silence, now_s)
        original(self, command)

    return end


def _observed(
    original: Callable[[Coordinator, Begin], None],
) -> Callable[[Coordinator, Begin], None]:
    """Have the oracle see when a coordinator has all ranks begin again."""

    def begin(self: Coordinator, command: Begin) -> None:
        machine = machine_here()
        of_nodes, of_start = (each._store._store.values for each in (self, self._rounds))
        machine.job.oracle.begins_again(of_nodes, of_start, command.why, machine.world.kernel.now)
        original(self, command)

    return begin


def _watched(
    original: Callable[[Coordinator, Declare], None],
) -> Callable[[Coordinator, Declare], None]:
    """Have the oracle see when ranks move to a node that has come."""

    def declare(self: Coordinator, command: Declare) -> None:
        machine = machine_here()
        if not command.is_loss:
            machine.job.oracle.moves(self._rounds._store._store.values, machine.world.kernel.now)
        original(self, command)

    return declare
