"""Inflicts the faults of a schedule on a simulated job, and tells the oracle what they excuse."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from moe_ft.engine.persist.storage_lock import own_origin
from moe_ft.errors import ConfigError
from moe_ft.files.progress import PATIENCE_S
from moe_ft.files.storage import Storage
from moe_ft.launches import launch_of
from moe_ft.recovery.inspect.pruning import Rules, prune
from moe_ft.recovery.persist_directory import take_lock
from tests.simulation.file_faults import Fault as FileFault
from tests.simulation.job import NOTICE_S, START_DEADLINE_S, Job, Start
from tests.simulation.kernel import Process, Thread
from tests.simulation.left import Family, has_any, look
from tests.simulation.oracle import Oracle
from tests.simulation.processes import PARENT
from tests.simulation.schedule import STRANGER, Fault

_MEMORY = "memory"
_STORAGE = "storage"
_SLOW_NOTICE_S = 100.0
HARMLESS = ("second-job", STRANGER)
_AFTERMATH_S = 2.0  # in which connections may still break


class Injection:
    """Inflicts faults. Each method is named like a kind of fault."""

    def __init__(self, job: Job, oracle: Oracle) -> None:
        self._job, self._oracle = job, oracle
        self._kernel, self._files = job.world.kernel, job.world.files
        self._network = job.world.network
        self.log: list[str] = []
        self._glitches: list[FileFault] = []
        self._vanished: list[str] = []

    def arm(self, start: Start, fault: Fault) -> None:
        def act(what: str) -> None:
            if any(process.is_alive for process in start.processes):
                self.inflict(fault, start, what)

        def count_from_here() -> None:
            for life in start.lives:
                life.on_recovery = lambda: None
            self._kernel.call_at_event(self._kernel.num_events + fault.event, act)

        if fault.moment:
            self._watch(fault, act)
        elif fault.is_after_recovery:
            for life in start.lives:
                life.on_recovery = count_from_here
        else:
            self._kernel.call_at_event(start.first_event + fault.event, act)

    def _watch(self, fault: Fault, act: Callable[[str], None]) -> None:
        """Have a fault happen when ranks have passed its moment often enough."""
        num_passed = 0

        def watch(what: str, thread: Thread) -> None:
            nonlocal num_passed
            if what.startswith(fault.moment) or thread.name.startswith(fault.moment):
                num_passed += 1
                if num_passed == fault.event:
                    self._kernel.watchers.remove(watch)
                    act(f"{what} of {thread}")

        self._kernel.watchers.append(watch)

    def inflict(self, fault: Fault, start: Start | None, what: str = "") -> None:
        """Inflict a fault now.

        Args:
            start: that runs; None between two.
            what: the event at which it happens.
        """
        self.log.append(f"{self._kernel.now:.3f} s: {fault} at {what or 'rest'}")
        if fault.kind in HARMLESS:
            pass  # what was promised holds
        elif start is not None:
            self._foresee(fault, start)
        else:
            self._oracle.note_fault()
        act: Callable[[Fault, Start | None], None] = getattr(self, fault.kind.replace("-", "_"))
        act(fault, start)

    def _foresee(self, fault: Fault, start: Start) -> None:
        """Tell the oracle of a fault, and of what the ranks can leave that survive it."""
        dead: int | None = None
        if fault.kind == "kill-rank":
            dead = fault.target % len(start.processes)
        elif fault.kind == "kill-this":
            running = self._kernel.running
            if running is not None and running.process in start.processes:
                dead = start.processes.index(running.process)
        was_disturbed = self._oracle.is_disturbed
        self._oracle.note_fault()
        self._oracle.is_disturbed = was_disturbed
        if dead is not None or fault.kind == "terminate":
            self._oracle.note_end(start, dead)
        self._oracle.is_disturbed = True

    # Choices

    def _node(self, fault: Fault) -> str:
        return f"node-{fault.target % self._job.setup.nodes}"

    def _other(self, fault: Fault) -> str:
        return f"node-{(fault.target + 1) % self._job.setup.nodes}"

    def _seconds(self, fault: Fault) -> float:
        """Return a duration between 10 ms and 100 s; all orders of magnitude are as likely."""
        seconds = float(10 ** (4 * fault.amount - 2))
        until_s = self._kernel.now + seconds + _AFTERMATH_S
        self._oracle.disturbed_until_s = max(self._oracle.disturbed_until_s, until_s)
        return seconds

    def _kill_nodes(self, start: Start | None, nodes: set[str]) -> None:
        for process in start.processes if start is not None else ():
            if process.node in nodes:
                self._kernel.kill(process)

    # Processes

    def kill_rank(self, fault: Fault, start: Start | None) -> None:
        assert start is not None
        self._kernel.kill(start.processes[fault.target % len(start.processes)])

    def kill_this(self, fault: Fault, start: Start | None) -> None:
        running = self._kernel.running
        if running is not None:
            self._kernel.kill(running.process)

    def kill_two(self, fault: Fault, start: Start | None) -> None:
        """Kill two ranks at once, neighbours or others."""
        assert start is not None
        for step in (0, 1 + fault.target // len(start.processes)):
            self._kernel.kill(start.processes[(fault.target + step) % len(start.processes)])

    def terminate(self, fault: Fault, start: Start | None) -> None:
        assert start is not None
        self._job.end(start)

    def kill_node(self, fault: Fault, start: Start | None) -> None:
        """Kill all ranks of a node; its memory stays."""
        self._kill_nodes(start, {self._node(fault)})

    def kill_all(self, fault: Fault, start: Start | None) -> None:
        assert start is not None
        self._job.kill(start)

    def kill_writer(self, fault: Fault, start: Start | None) -> None:
        for process in self._writers(fault, start):
            self._kernel.kill(process)

    def suspend_writer(self, fault: Fault, start: Start | None) -> None:
        for process in self._writers(fault, start):
            self._kernel.suspend(process, self._seconds(fault))

    def _writers(self, fault: Fault, start: Start | None) -> list[Process]:
        assert start is not None
        found = [each for rank in start.processes for each in rank.children if each.is_alive]
        return found[fault.target % len(found) :][:1] if found else []

    def suspend_rank(self, fault: Fault, start: Start | None) -> None:
        assert start is not None
        process = start.processes[fault.target % len(start.processes)]
        self._kernel.suspend(process, self._seconds(fault))

    def wall_clock(self, fault: Fault, start: Start | None) -> None:
        clocks = self._job.world.clocks.get(self._node(fault))
        if clocks is not None:
            clocks.wall_s += (fault.amount - 0.5) * 2 * 86_400

    def stranger_in_store(self, fault: Fault, start: Start | None) -> None:
        """Have somebody else write to the job's store, from now on until the start is over."""
        self._job.world.has_stranger = True

    # Nodes

    def lose_node(self, fault: Fault, start: Start | None) -> None:
        """Lose a node with its memory; another one of its name takes its place."""
        node = self._node(fault)
        self._kill_nodes(start, {node})
        self._files.lose_node(node)
        if self._job.setup.nodes > 1 and self._job.setup.replication != "0":
            self._oracle.lose_node()
        else:
            self._oracle.lose_memory()

    def lose_two(self, fault: Fault, start: Start | None) -> None:
        """Lose two nodes at once, which peers survive unless something is on its way to them."""
        lives = start.lives if start is not None else ()
        is_safe = all(each.is_at_rest() for each in lives)
        nodes = {self._node(fault), self._other(fault)}
        self._kill_nodes(start, nodes)
        for node in sorted(nodes):
            self._files.lose_node(node)
        if is_safe and self._job.setup.nodes > 2 and self._job.setup.replication in ("auto", "2"):
            self._oracle.lose_node()
        else:
            self._oracle.lose_memory()

    def lose_all_memory(self, fault: Fault, start: Start | None) -> None:
        nodes = {f"node-{each}" for each in range(self._job.setup.nodes)}
        self._kill_nodes(start, nodes)
        for node in sorted(nodes):
            self._files.lose_node(node)
        self._oracle.lose_memory()

    def power_loss(self, fault: Fault, start: Start | None) -> None:
        """Lose all nodes and what storage has not on its disks."""
        self.lose_all_memory(fault, start)
        self._files.power_loss()

    def set_aside(self, fault: Fault, start: Start | None) -> None:
        """Replace a node; the old one is kept elsewhere, with its memory."""
        self._files.set_aside(self._node(fault))
        self._oracle.lose_memory()

    def bring_back(self, fault: Fault, start: Start | None) -> None:
        """Bring a node back that was replaced, with the memory of then."""
        self._files.bring_back(self._node(fault))
        self._oracle.has_strangers = True
        self._oracle.lose_memory()

    def move_ranks(self, fault: Fault, start: Start | None) -> None:
        """Have the launcher number the nodes in another order."""
        before = {*self._job.nodes}
        self._job.placement = self._job.placement[1:] + self._job.placement[:1]
        for _ in before - {*self._job.nodes}:  # a node that has no ranks is as good as lost
            self._oracle.lose_node()

    def vanish(self, fault: Fault, start: Start | None) -> None:
        """Lose a node, from which then nothing is heard, not even that its ranks have ended."""
        node = self._node(fault)
        self._network.lose(node)
        self._job.notice_s = _SLOW_NOTICE_S
        self._vanished.append(node)
        self.lose_node(fault, start)

    def hang(self, fault: Fault, start: Start | None) -> None:
        """Kill a rank, which the others do not see: they wait for it in vain."""
        self._job.world.collectives.hang_probability = 1.0
        self._job.notice_s = _SLOW_NOTICE_S
        self.kill_rank(fault, start)

    def reuse_name(self, fault: Fault, start: Start | None) -> None:
        """Start a fresh run of other settings with the name of this job; it must be refused."""
        if not has_any(self._job.root):
            return
        other = Job(self._job.world, self._job.setup, self._job.root)
        other.training = replace(other.training, first="another")
        other.placement = list(self._job.placement)
        started = other.start()
        other.run(started)
        other.kill(started)
        kinds = {type(life.error).__name__ for life in started.lives}
        if any(life.outcome is not None for life in started.lives):
            self._oracle.violations.append(f"a run with other settings was not refused: {kinds}")

    def second_job(self, fault: Fault, start: Start | None) -> None:
        """Have another launcher start a job of the same name elsewhere, as far as it needs storage."""

        def act() -> None:
            with suppress(ConfigError, OSError):
                storage = Storage(str(self._job.root / _STORAGE), PATIENCE_S)
                launch = launch_of(os.environ)
                take_lock("job", storage, own_origin(launch, [launch.agent])).release()

        process = self._run_elsewhere(act)
        process.local[PARENT] = self._kernel.make_process("agent", process.node).pid

    def prune(self, fault: Fault, start: Start | None) -> None:
        """Have somebody prune storage; the best state there that is intact must stay."""

        def act() -> None:
            with suppress(ConfigError, OSError):
                prune(str(self._job.root / _STORAGE), Rules(keep=1), removes=True)

        before = self._best_on_storage()
        process = self._run_elsewhere(act)
        self._kernel.run(lambda: not process.is_alive, self._kernel.now + START_DEADLINE_S)
        if before != self._best_on_storage():
            self._oracle.violations.append(f"pruning has removed the best intact state, {before}")

    def _best_on_storage(self) -> tuple[Family, ...]:
        with self._files.outside():
            return look(self._job.root, self._job.setup.shape, ()).intact[:1]

    def _run_elsewhere(self, act: Callable[[], None]) -> Process:
        """Run something in a process of its own, on a machine without ranks."""
        process = self._kernel.make_process("stranger", "elsewhere", {"TORCHELASTIC_RUN_ID": "job"})

        def run() -> None:
            act()
            self._kernel.end(process, 0)

        self._kernel.spawn(process, run)
        return process

    # Files

    def garble_storage(self, fault: Fault, start: Start | None) -> None:
        """Have storage keep something else than the next data that are written there."""
        self._files.is_garbling = True

    def torn_kill(self, fault: Fault, start: Start | None) -> None:
        """Kill whoever writes next, in the middle of it."""
        self._files.deadly = (_MEMORY, _STORAGE)[fault.target % 2]

    def memory_glitch(self, fault: Fault, start: Start | None) -> None:
        """Have one operation on files in the memory of a node fail."""
        self._oracle.is_garbled = True
        self._glitch(fault, self._memory_of(fault))

    def storage_denial(self, fault: Fault, start: Start | None) -> None:
        """Have one operation on storage fail, for lack of room or permission."""
        self._glitch(fault, _STORAGE)

    def _glitch(self, fault: Fault, where: str) -> None:
        number = (errno.ENOSPC, errno.EACCES, errno.EIO)[fault.target % 3]
        kind = ("", "write", "read", "create", "rename", "remove", "fsync")[fault.target % 7]
        self._glitches.append(self._files.fail(kind, number, where, at=1 + int(20 * fault.amount)))

    def flip_memory(self, fault: Fault, start: Start | None) -> None:
        self._files.flip(self._kernel.random, _MEMORY)
        self._oracle.lose_memory()
        self._oracle.is_damaged = True

    def flip_storage(self, fault: Fault, start: Start | None) -> None:
        self._files.flip(self._kernel.random, _STORAGE)
        self._oracle.lose_storage()

    def cut_memory(self, fault: Fault, start: Start | None) -> None:
        self._files.truncate(self._kernel.random, _MEMORY)
        self._oracle.lose_memory()
        self._oracle.is_damaged = True

    def cut_storage(self, fault: Fault, start: Start | None) -> None:
        self._files.truncate(self._kernel.random, _STORAGE)
        self._oracle.lose_storage()

    def storage_error(self, fault: Fault, start: Start | None) -> None:
        number = (errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOSPC)[fault.target % 4]
        kind = ("", "", "write", "read", "create", "rename", "fsync")[fault.target % 7]
        self._files.fail(kind, number, _STORAGE, for_s=self._seconds(fault))

    def storage_glitch(self, fault: Fault, start: Start | None) -> None:
        kind = ("", "write", "read", "create", "rename", "remove", "fsync")[fault.target % 7]
        glitch = self._files.fail(kind, errno.EIO, _STORAGE, at=1 + int(20 * fault.amount))
        self._glitches.append(glitch)

    def mend(self) -> None:
        """End the faults that wait for an operation that has not come: the start is over."""
        self._kernel.watchers.clear()
        self._network.end_corruption()
        while self._glitches:
            self._files.mend(self._glitches.pop())
        while self._vanished:
            self._network.restore(self._vanished.pop())
        self._files.deadly = ""
        self._files.is_garbling = False
        self._job.world.has_stranger = False
        self._job.notice_s = NOTICE_S
        self._job.world.collectives.hang_probability = 0.0

    def storage_full(self, fault: Fault, start: Start | None) -> None:
        self._files.full(_STORAGE, self._seconds(fault))

    def storage_away(self, fault: Fault, start: Start | None) -> None:
        """Have storage fail all through the next start, which continues from memory that has the state."""
        self._oracle.may_not_refuse = True
        seconds = self._seconds(fault)
        if fault.target % 3 == 0:
            self._files.full(_STORAGE, seconds)
        elif fault.target % 3 == 1:
            self._files.stuck(_STORAGE, seconds)
        else:
            self._files.fail("", errno.EIO, _STORAGE, for_s=seconds)

    def storage_slow(self, fault: Fault, start: Start | None) -> None:
        self._files.slow(_STORAGE, 0.5 * fault.amount**3, self._seconds(fault))

    def storage_stuck(self, fault: Fault, start: Start | None) -> None:
        self._files.stuck(_STORAGE, self._seconds(fault))

    def memory_full(self, fault: Fault, start: Start | None) -> None:
        self._files.full(self._memory_of(fault), self._seconds(fault))

    def memory_error(self, fault: Fault, start: Start | None) -> None:
        """Have operations on the files in the memory of a node fail for a while."""
        seconds = self._seconds(fault)
        self._files.fail("", errno.EACCES, self._memory_of(fault), for_s=seconds)
        self._oracle.is_garbled = True
        self._oracle.garbled_until_s = self._kernel.now + seconds

    def _memory_of(self, fault: Fault) -> str:
        return f"{_MEMORY}/job/{self._node(fault)}"

    # Network

    def partition(self, fault: Fault, start: Start | None) -> None:
        """Cut a node off from the others for a while."""
        node = self._node(fault)
        others = [f"node-{each}" for each in range(self._job.setup.nodes)]
        others.remove(node)
        self._network.partition([node], others, self._seconds(fault))

    def network_stuck(self, fault: Fault, start: Start | None) -> None:
        """Have nothing arrive between two nodes for a while."""
        self._network.stuck(self._node(fault), self._other(fault), self._seconds(fault))

    def network_slow(self, fault: Fault, start: Start | None) -> None:
        self._network.slow(self._node(fault), 1 + 1000 * fault.amount, self._seconds(fault))

    def reset(self, fault: Fault, start: Start | None) -> None:
        self._network.reset(self._node(fault))

    def refuse(self, fault: Fault, start: Start | None) -> None:
        """Have a rank neither accept nor make connections for a while."""
        assert start is not None
        process = start.processes[fault.target % len(start.processes)]
        self._network.lack_descriptors(process, self._seconds(fault))

    def corrupt(self, fault: Fault, start: Start | None) -> None:
        """Flip a bit in what one node sends to another."""
        self._network.corrupt_next(self._node(fault), self._other(fault))
        self._oracle.is_garbled = True
