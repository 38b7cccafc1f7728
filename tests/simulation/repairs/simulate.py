"""Runs one schedule of repairs, and inflicts its faults; oracle.py judges what the ranks do."""

import gc
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_ft.cluster.membership import MOST_UNFINISHED
from tests.simulation.active import active
from tests.simulation.job import make_world
from tests.simulation.kernel import HangError, Kernel, Process, Thread
from tests.simulation.processes import lines_of
from tests.simulation.repairs.job import LOST_AFTER_S, Job
from tests.simulation.repairs.machine import MEMBER
from tests.simulation.repairs.oracle import AFTER_S, Oracle
from tests.simulation.repairs.product import FLOOR_S, STUCK_S, WAITS, forget_threads
from tests.simulation.repairs.rank import (
    COMPUTES_S,
    HANGS,
    HEARTBEAT_S,
    IS_CORRUPT,
    IS_EXPLAINED,
    RAISES,
    STORES_S,
    TIMEOUT_S,
    WRITES_S,
)
from tests.simulation.repairs.schedule import MENDED, Fault, RepairSchedule
from tests.simulation.simulate import Verdict

_MORE_STARTS = 4
_HELP_S = 200.0  # until somebody ends what nobody watches
_LONGEST_SILENCE_S = 60.0
_COMES_BACK, _LONGEST_ABSENCE_S = 0.7, 60.0  # of nodes that are lost
_BACK_S = 60.0  # from then until it is there again
_LONGEST_FLAP_S = 3.0
# Of an agent, whose node lives; of a node's links to all but that of the store; and of the latter's.
_LONGEST_SHORT_STOP_S, _LONGEST_PART_S, _LONGEST_CUT_OF_STORE_S = 4.0, 8.0, 8.0
_LONGEST_PAUSE_S, _LONGEST_STOP_S, _FOR_EVER_S = 40.0, 120.0, 1e9
_SLOW_S = 0.2
_REPAIR_S = (
    75.0  # from the last fault to the end of a repair: the build, and connections that time out
)
_DEATHS = ("kill", "stop", "hang")
# Reasons for which a thread may be silent without being ended, by fault; each sets local state of a rank.
_EXPLAINED: Mapping[str, Callable[[float], dict[str, float]]] = {
    "compute-long": lambda amount: {COMPUTES_S: amount * 0.8 * FLOOR_S},
    "slow-storage": lambda amount: {STORES_S: amount * 0.8 * TIMEOUT_S},
    "write-long": lambda amount: {WRITES_S: amount * 0.8 * TIMEOUT_S},
}
_HARMLESS = ("part-node", "cut-store")
_OF_NODES = (
    *("lose-node", "power-node", "silence-node", "cut-node", "flap-node", "pause-node"),
    *("stop-agent", "tell-node", "corrupt-node"),
)


class Injection:
    """Inflicts the faults of a start at their moments."""

    def __init__(self, job: Job, oracle: Oracle) -> None:
        self._job, self._oracle = job, oracle
        self._kernel: Kernel = job.world.kernel
        self._faults: list[Fault] = []
        self._passed = Counter[str]()
        self._num_raised = 0
        self._kernel.watchers.append(self._watch)

    def begin(self, faults: Sequence[Fault]) -> None:
        self._faults, self._passed = list(faults), Counter()
        machine = self._job.machine
        machine.has_stranger, machine.slowness = False, 0.002
        for known in (machine.cut_until_s, machine.parted_until_s, machine.unreachable_s):
            known.clear()
        machine.powerless.clear()

    def _watch(self, what: str, thread: Thread) -> None:
        name = what.partition(":")[0]
        self._passed[name] += 1
        for each in self._faults:
            if each.moment == name and each.time == self._passed[name]:
                self._inflict(each, thread.process)

    def _inflict(self, fault: Fault, there: Process) -> None:
        job, oracle, kernel = self._job, self._oracle, self._kernel
        rank = fault.target if fault.target >= 0 else int(there.environ.get("RANK", 0))
        process = there if fault.target < 0 and MEMBER in there.local else job.process_of(rank)
        oracle.fault_s = kernel.now
        oracle.log.append(f"{kernel.now:.3f} s: {fault.kind}: {process or f'rank {rank}'}")
        oracle.num_deaths += fault.kind in _DEATHS
        self._judge_deaths()
        self._note_reason(fault, rank)
        limit_s = _REPAIR_S + 2 * LOST_AFTER_S * job.is_kept
        limit_s += (TIMEOUT_S + STUCK_S) * (fault.kind == "hang") + HEARTBEAT_S
        if not job.crowds:  # nodes come at whatever time, and take back what others have
            oracle.limit_s = max(oracle.limit_s, kernel.now + limit_s)
        if process is not None and fault.kind in _EXPLAINED:
            process.local |= {IS_EXPLAINED: True, **_EXPLAINED[fault.kind](fault.amount)}
            return
        act = getattr(self, "_" + fault.kind.replace("-", "_"), None)
        if act is not None:
            act(fault, rank)
        elif process is not None:
            # As where gloo has lost a message: its stack does not tell, and others time out.
            is_alone = not any(HANGS in each.local for each in kernel.processes)
            self._hit(
                fault.kind,
                process,
                waits=fault.amount < 0.5 and is_alone and not job.evaluation_steps,
            )

    def _note_reason(self, fault: Fault, rank: int) -> None:
        """Note why a fault may end the start."""
        job, oracle = self._job, self._oracle
        if job.is_kept and fault.kind in _OF_NODES:
            self._judge_loss(job.node_of(rank))
        elif fault.kind in _EXPLAINED:
            if len(self._faults) > 1:
                oracle.excuses.append("a rank is late for two reasons")
        elif fault.kind not in (*MENDED, *_HARMLESS):
            oracle.excuses.append(fault.kind)

    def _hit(self, kind: str, process: Process, *, waits: bool = False) -> None:
        """Hit the process of a rank. Nothing replaces one that is not armed."""
        member = process.local.get(MEMBER)
        link = None if member is None else member.link
        is_replaced = link is not None and link.is_armed
        if not is_replaced and kind != "raise":
            self._oracle.excuses.append("the rank is not armed")
        if kind == "kill":
            self._kernel.kill(process)
            return
        self._oracle.halted.add(process)
        if kind == "stop":
            self._suspend(process, _FOR_EVER_S)
            if link is None or not link.limit_s:
                self._oracle.excuses.append("a process is stopped")
                self._kernel.call_later(_HELP_S, lambda: self._kernel.kill(process))
        else:
            self._num_raised += kind == "raise"
            process.local |= {RAISES: self._num_raised} if kind == "raise" else {HANGS: True}
            process.local[WAITS] = process.local.get(WAITS, 0) + (waits and kind == "hang")

    def _suspend(self, process: Process | None, seconds: float) -> None:
        if process is not None and process.is_alive:
            self._kernel.suspend(process, seconds)
            self._kernel.call_later(seconds, self._job.machine.changed)

    def _judge_loss(self, node: str) -> None:
        """Note why the loss of a node, or a silence that may be taken for one, may end the start."""
        job, oracle = self._job, self._oracle
        oracle.num_losses += 1
        for rank in range(job.size):
            oracle.num_deaths += job.node_of(rank) == node
        self._judge_deaths()
        if job.fewest:
            self._judge_elastic_loss(node)
            return
        if oracle.num_losses > job.num_spares and job.without_spare == "end":
            oracle.excuses.append("there may be no spare")
        if node == f"node{job.keeper}":
            oracle.excuses.append("the job's store is lost")
        for rank in range(job.size):
            process = job.process_of(rank)
            if process is None or not process.local[MEMBER].link.is_armed:
                oracle.excuses.append("a rank is not armed")

    def _judge_deaths(self) -> None:
        """Note that nothing may be left to repair; if nodes alone are lost, an elastic job begins again."""
        is_mended = self._job.fewest and not any(each.kind in _DEATHS for each in self._faults)
        if self._oracle.num_deaths >= self._job.newest_start.size and not is_mended:
            self._oracle.excuses.append("all ranks may have died")

    def _judge_elastic_loss(self, node: str) -> None:
        job, oracle = self._job, self._oracle
        oracle.num_untrained += 1
        if oracle.num_untrained > MOST_UNFINISHED:
            oracle.excuses.append("too many nodes were lost before an iteration was finished")
        if node == f"node{job.keeper}":
            oracle.excuses.append("the job's store is lost")
        away = {each for each, until_s in oracle.away_s.items() if until_s > self._kernel.now}
        if job.num_nodes + job.num_spares - len({*away, node}) < job.fewest:
            oracle.excuses.append("there may be too few nodes")

    def _silence_node(self, fault: Fault, rank: int) -> None:
        """Stop a whole node."""
        seconds = fault.amount * _LONGEST_SILENCE_S
        for each in self._note_silence(rank, seconds):
            self._suspend(each, seconds)

    def _cut_node(self, fault: Fault, rank: int, longest_s: float = _LONGEST_SILENCE_S) -> None:
        """Cut the link of a node, which runs on."""
        seconds = fault.amount * longest_s
        self._note_silence(
            rank, min(seconds, LOST_AFTER_S)
        )  # then it knows that others may call it lost
        self._job.machine.cut(self._job.node_of(rank), seconds)

    def _flap_node(self, fault: Fault, rank: int) -> None:
        """Cut the link of a node for about as long as makes it lost."""
        self._cut_node(fault, rank, _LONGEST_FLAP_S)

    def _part_node(self, fault: Fault, rank: int) -> None:
        """Cut a node off from all others but that of the store: agents notice, and nobody is lost."""
        machine, seconds = self._job.machine, fault.amount * _LONGEST_PART_S
        machine.parted_until_s[self._job.node_of(rank)] = self._kernel.now + seconds

    def _stop_agent(self, fault: Fault, rank: int) -> None:
        """Stop the agent of a node, whose kernel answers; that is too short to be a loss."""
        seconds = fault.amount * _LONGEST_SHORT_STOP_S
        node = self._job.node_of(rank)
        self._note_silence(rank, seconds)
        for each in self._job.starts[-1].agents:
            if each.node == node:
                self._suspend(each, seconds)

    def _cut_store(self, fault: Fault, rank: int) -> None:
        """Cut the link of the node of the store: not for long enough for anybody to be lost."""
        if len(self._faults) > 1:  # with lost connections it may be
            self._oracle.excuses.append("the job's store is cut off")
        self._job.machine.cut(f"node{self._job.keeper}", fault.amount * _LONGEST_CUT_OF_STORE_S)

    def _note_silence(self, rank: int, seconds: float) -> list[Process]:
        """Return the processes of a node that is silent; after some seconds those of lost ranks must end."""
        kernel, node = self._kernel, self._job.node_of(rank)
        silent = [each for each in kernel.processes if each.is_alive and each.node == node]
        self._oracle.away_s[node] = kernel.now + seconds + _BACK_S
        self._oracle.halted.update(silent)
        self._oracle.silences.append((silent, kernel.now + seconds))
        return silent

    def _hang_all(self, fault: Fault, rank: int) -> None:
        """Have the threads of all ranks hang where they come next."""
        self._oracle.excuses.append("all ranks may have died")
        for each in range(self._job.size):
            if (process := self._job.process_of(each)) is not None:
                self._hit("hang", process)

    def _fork_server_of(self, rank: int) -> Process | None:
        return self._job.machine.fork_servers.get(self._job.node_of(rank))

    def _store(self) -> Process | None:
        listeners = list(self._job.machine.ports.values())
        return listeners[-1].server if listeners else None

    def _pause_node(self, fault: Fault, rank: int) -> None:
        if len([each for each in self._faults if each is not fault]):
            self._oracle.excuses += ["a node stands still", "a process is stopped"]
        for each in list(self._kernel.processes):
            if each.is_alive and each.node == self._job.node_of(rank):
                each.local[IS_EXPLAINED] = True
                self._suspend(each, fault.amount * _LONGEST_PAUSE_S)

    def _slow_store(self, fault: Fault, rank: int) -> None:
        self._job.machine.slowness = fault.amount * _SLOW_S

    def _stranger_in_store(self, fault: Fault, rank: int) -> None:
        self._job.machine.has_stranger = True

    def _kill_fork_server(self, fault: Fault, rank: int) -> None:
        if (server := self._fork_server_of(rank)) is not None:
            self._kernel.kill(server)

    def _stop_fork_server(self, fault: Fault, rank: int) -> None:
        self._oracle.excuses.append("a process is stopped")
        is_for_ever = fault.amount > 0.5
        seconds = _FOR_EVER_S if is_for_ever else fault.amount * _LONGEST_STOP_S
        self._suspend(self._fork_server_of(rank), seconds)

    def _kill_store(self, fault: Fault, rank: int) -> None:
        if (store := self._store()) is not None:
            self._kernel.kill(store)

    def _stop_store(self, fault: Fault, rank: int) -> None:
        self._oracle.excuses.append("a process is stopped")
        self._suspend(self._store(), fault.amount * _LONGEST_STOP_S)

    def _power_node(self, fault: Fault, rank: int) -> None:
        self._lose_node(fault, rank, is_power=True)

    def _lose_node(self, fault: Fault, rank: int, *, is_power: bool = False) -> None:
        node, started = self._job.node_of(rank), self._job.starts[-1]
        self._job.lose(node, is_power=is_power)
        self._oracle.away_s[node] = _FOR_EVER_S
        may_come = self._job.fewest or self._job.crowds
        if may_come and fault.amount < _COMES_BACK and node != f"node{self._job.keeper}":
            seconds = fault.amount * _LONGEST_ABSENCE_S
            self._oracle.away_s[node] = self._kernel.now + seconds + _BACK_S
            self._kernel.call_later(seconds, lambda: self._job.come_back(node, started))

    def _tell_node(self, fault: Fault, rank: int) -> None:
        node = self._job.node_of(rank)
        self._oracle.away_s[node] = _FOR_EVER_S
        self._job.tell(node)

    def _corrupt_node(self, fault: Fault, rank: int) -> None:
        """Have a check find that a rank computes wrongly, where it comes next."""
        if (process := self._job.process_of(rank)) is not None:
            process.local[IS_CORRUPT] = True

    def _kill_agent(self, fault: Fault, rank: int) -> None:
        self._kernel.kill(self._job.starts[-1].agents[0])


def simulate(schedule: RepairSchedule, folder: Path) -> Verdict:
    """Run a schedule; everything is installed."""
    oracle = Oracle()
    forget_threads()
    gc.disable()  # destructors at any time would make two runs of a seed different
    try:
        with tempfile.TemporaryDirectory(dir=folder) as root:
            world = make_world(schedule.seed, Path(root), switching=schedule.switching)
            job = Job(world, schedule, oracle)
            with active(world):
                try:
                    _run_starts(schedule, job, oracle)
                except HangError as error:
                    oracle.violate(f"does not end: {error}")
                finally:
                    world.kernel.close()
    finally:
        gc.enable()
    kernel = world.kernel
    oracle.violations += [f"{thread} ended with {error!r}" for thread, error in kernel.errors]
    return Verdict(
        violations=tuple(oracle.violations),
        log=tuple(oracle.log),
        num_events=kernel.num_events,
        num_starts=len(job.starts),
        num_recoveries=oracle.num_repairs,
        trace=kernel.trace,
        lines=tuple(f"{each!r}: {line}" for each in kernel.processes for line in lines_of(each)),
    )


def _run_starts(schedule: RepairSchedule, job: Job, oracle: Oracle) -> None:
    injection = Injection(job, oracle)
    last = max((fault.start for fault in schedule.faults), default=0)
    kernel = job.world.kernel
    for number in range(last + 1 + _MORE_STARTS):
        oracle.begin()
        injection.begin([fault for fault in schedule.faults if fault.start == number])
        start = job.start()
        has_ended = job.run(start)
        codes = [each.exit_code for each in start.agents]
        oracle.log.append(f"{kernel.now:.3f} s: start {number} over: {codes} {oracle.excuses}")
        oracle.after(start, job, has_ended=has_ended)
        if not has_ended or start.has_ended_well:
            return
        kernel.run(lambda: False, kernel.now + AFTER_S)
        oracle.after_a_while(job)
        kernel.run(lambda: False, kernel.now + kernel.random.uniform(0.0, 10.0))
    oracle.violate("training does not end, although nothing disturbs it any more")
