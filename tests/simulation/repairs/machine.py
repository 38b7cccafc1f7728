"""Processes and local sockets as the keeper sees them on simulated nodes; store.py has the job's store.

A fork makes a simulated process that does what the product's child does, with what its parent has at that
moment. Sockets between a worker and its zygote are pipes without descriptors.
"""

import os
import signal
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from moe_ft.cluster import job_store, node, worker, zygote
from moe_ft.cluster.coordinator import Coordinator
from moe_ft.cluster.membership import Begin
from moe_ft.cluster.protocol import IMPORTING, RankRequest
from moe_ft.cluster.target import Target
from tests.simulation.active import Patches, World, world
from tests.simulation.kernel import Process, Waiting
from tests.simulation.processes import _HANDLERS, PARENT
from tests.simulation.store import Values

if TYPE_CHECKING:
    from tests.simulation.repairs.job import Job

MACHINE = "machine"  # local state of each process, and of the job
MEMBER = "member"
FORGED = "0" * 64 + ' {"rank":0}'  # what a stranger writes into the store
_IMPORT_S = 2.0
_ANSWER_S = 0.002
_LONGEST_END_S = 1.0  # from SIGTERM to the end of a rank
_POLL_S = 0.02


class Machine:
    """Things that all nodes of a simulated job share.

    Attributes:
        changes: woken by whatever a process may wait for.
        zygotes: by node, with the socket where it listens.
        ports: listeners of stores, by address.
        job: that runs on it.
        slowness: seconds that the store needs for each answer, at most.
        has_stranger: whether somebody else writes to the store.
        cut_until_s: by node, until when its link is cut.
    """

    def __init__(self, current: World, job: "Job") -> None:
        self.world, self.job = current, job
        self.changes = Waiting()
        self.zygotes: dict[str, tuple[Process, Listener]] = {}
        self.ports: dict[tuple[str, int], Listener] = {}
        self.descriptors: dict[int, Process] = {}
        self.slowness, self.has_stranger = _ANSWER_S, False
        self.cut_until_s: dict[str, float] = {}

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
    """One end of a Unix socket."""

    def __init__(self, machine: Machine, process: Process) -> None:
        self.machine, self.process = machine, process
        self.content, self.is_closed, self.request = b"", False, None
        self.peer: Connection
        process.at_death.append(self.close)

    @property
    def is_readable(self) -> bool:
        return bool(self.content) or self.peer.is_closed

    def recv(self, size: int) -> bytes:
        """Wait for something to come, and return it."""
        self.machine.wait_for(lambda: bool(self.content) or self.peer.is_closed, None)
        found, self.content = self.content[:size], self.content[size:]
        return found

    def recv_into(self, buffer: memoryview) -> int:
        found = self.recv(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def sendall(self, content: bytes) -> None:
        self.machine.world.kernel.event("keeper: send")
        if self.peer.is_closed:
            raise BrokenPipeError(32, "Broken pipe")
        self.peer.content += content
        self.machine.changed()

    def close(self) -> None:
        self.is_closed = True
        self.machine.changed()

    def setblocking(self, flag: bool) -> None:
        """Do nothing."""

    def fileno(self) -> "Connection":
        return self

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Listener:
    """A socket that listens, of a zygote or of a store, which is a server then."""

    def __init__(
        self, machine: Machine, process: Process, address: tuple[str, int] = ("", 0)
    ) -> None:
        self.machine, self.process, self._address = machine, process, address
        self.pending: deque[Connection] = deque()
        # By prefix: of the starts that one store serves.
        self.starts = defaultdict[str, Values](lambda: Values(FORGED, spared=("run", "seat")))
        self.server: Process | None = None
        self.store: Any = None

    def getsockname(self) -> tuple[str, int]:
        return self._address

    @property
    def is_readable(self) -> bool:
        return bool(self.pending)

    def accept(self) -> tuple[Connection, None]:
        return self.pending.popleft(), None

    def connect(self, process: Process) -> Connection:
        one, other = Connection(self.machine, process), Connection(self.machine, self.process)
        one.peer, other.peer = other, one
        self.pending.append(other)
        self.machine.changed()
        return one

    def close(self) -> None:
        """Do nothing: who listens is the process."""

    def fileno(self) -> "Listener":
        return self


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
    """The module `os` of zygotes and workers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fork(self) -> int:
        """Do in a new process what the caller does in its child."""
        machine, seen = machine_here(), sys._getframe(1).f_locals
        parent = machine.world.process
        if "request" not in seen:  # in a node's process
            given = seen["environment"], seen["words"], seen["listener"]
            store = machine.make_process(
                "store", parent.node, parent, dict(given[0]), lambda: node.serve_store(*given)
            )
            parent.children.append(store)
            return store.pid
        request: RankRequest = seen["request"]
        environ = dict(request.environment)
        act: Callable[[], Any]
        if "listener" in seen:
            act = lambda: job_store.serve(seen["listener"], environ, seen["token"])  # noqa: E731
            name = "store"
        else:
            act = lambda: zygote._be_rank(request, (), seen["member"])  # noqa: E731
            name = f"rank {environ['RANK']}" if "RANK" in environ else "node"
        child = machine.make_process(name, parent.node, parent, environ, act)
        if name != "node":
            child.local[MEMBER] = seen.get("member")
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

    def killpg(self, pid: int, number: int) -> None:
        """Send a signal to a rank, which takes a while to end after SIGTERM, or to a node's process."""
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

    def open(self, path: str, flags: int) -> int:
        return -1

    def close(self, descriptor: int) -> None:
        """Do nothing."""

    def execv(self, path: str, words: Sequence[str]) -> None:
        """Refuse: a worker without a zygote."""
        raise AssertionError("a rank starts without its zygote")


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


def _connect(target: Target, agent_pid: int) -> Connection:
    """Connect to the zygote of the node, which the first worker starts."""
    machine = machine_here()
    own, kernel = machine.world.process, machine.world.kernel
    while True:
        found = machine.zygotes.get(own.node)
        if found is not None and found[0].is_alive:
            return found[1].connect(own)
        if own.environ.get("LOCAL_RANK", "0") == "0":
            _start_zygote(machine, own.node, agent_pid)
        kernel.sleep(_POLL_S)


def _connect_here(path: str) -> Connection:
    """Connect to the zygote of the node, which runs."""
    machine = machine_here()
    zygote_here, listener = machine.zygotes[machine.world.process.node]
    if not zygote_here.is_alive:
        raise ConnectionRefusedError(111, "Connection refused")
    return listener.connect(machine.world.process)


def _start_zygote(machine: Machine, node: str, agent_pid: int) -> None:
    def serve() -> None:
        machine.world.kernel.sleep(_IMPORT_S)
        process.local["imported"] = True
        zygote.Zygote(listener, agent_pid).serve()  # type: ignore[arg-type]

    process = machine.make_process("zygote", node, machine.process_of(agent_pid), {}, serve)
    listener = Listener(machine, process)
    machine.zygotes[node] = process, listener


def _process_name(pid: int) -> str:
    return "" if machine_here().process_of(pid).local.get("imported") else IMPORTING


def _send_request(connection: Any, request: RankRequest, streams: Any) -> None:
    connection.request = request
    connection.sendall(b"\0")


def _receive_request(connection: Any) -> tuple[RankRequest, list[int]]:
    if not connection.recv(1):
        raise ConnectionError("this is no request for a rank")
    return connection.peer.request, []


def _read_target(words: Sequence[str]) -> Target:
    environ = machine_here().world.process.environ
    of_node = environ if "GROUP_RANK" in environ else {}
    return Target(words=tuple(words), preload=(), of_node=dict(of_node))


def _run(target: Target) -> None:
    """Be a rank, or the process of a node."""
    machine = machine_here()
    if "RANK" in machine.world.process.environ:
        machine.job.run_rank()
    else:
        node.main(target.words[2:])


class _NoFacts:
    """Facts of a node about which nothing is known: it has no files, and no datagrams."""

    def __init__(self, *_: object) -> None:
        pass

    def open(self) -> None:
        pass

    def facts(self, *, has_ranks: bool) -> dict[str, Any]:
        return {}

    def is_due(self) -> bool:
        return False

    def remove_memory(self) -> None:
        pass


def install(patches: Patches) -> None:
    """Have the keeper's code run on simulated nodes."""
    for module in (zygote, worker, node):
        patches.set(module, "os", _System())
    for module in (zygote, node):
        patches.set(module, "selectors", SimpleNamespace(DefaultSelector=Selector, EVENT_READ=1))
    patches.set(node, "set_process_name", lambda name: None)
    patches.set(node, "OwnNode", _NoFacts)
    patches.set(Coordinator, "_begin", _observed(Coordinator._begin))
    patches.set(node, "send_request", _send_request)
    patches.set(node, "_connect", _connect_here)
    patches.set(zygote, "why_not_to_fork", lambda: "")
    patches.set(zygote, "receive_request", _receive_request)
    patches.set(zygote, "become", lambda request, streams: None)
    patches.set(zygote, "run", _run)
    patches.set(zygote, "become_member", lambda member: None)
    patches.set(worker, "read_target", _read_target)
    patches.set(worker, "_connect", _connect)
    patches.set(worker, "socket_path", lambda agent_pid: "")
    patches.set(worker, "send_request", _send_request)
    patches.set(worker, "peer_pid", lambda connection: connection.peer.process.pid)
    patches.set(worker, "process_name", _process_name)
    patches.set(worker, "is_stopped", lambda pid: machine_here().process_of(pid).is_suspended)
    patches.set(worker, "select", SimpleNamespace(select=_select))
    patches.divert(signal, "pidfd_send_signal", _send_signal)
    patches.divert(signal, "pause", lambda world: world.kernel.wait(Waiting()))


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


def _send_signal(world: World, descriptor: int, number: int) -> None:
    world.kernel.kill(machine_here().descriptors[descriptor], -number)
