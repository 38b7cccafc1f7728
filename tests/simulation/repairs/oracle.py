"""Promises of repairs in place, and what ranks and launcher do about them.

A job may start again only for a reason that docs/repair.md names. All else is a broken promise.
"""

import json
import math
from collections.abc import Sequence
from functools import partial

from moe_ft.cluster.membership import MOST_UNFINISHED
from moe_ft.cluster.roster import SAVE
from moe_ft.cluster.rounds import Entry
from tests.simulation.kernel import Process
from tests.simulation.repairs.ends import Group, Operation
from tests.simulation.repairs.job import Job, Start
from tests.simulation.repairs.machine import FORGED, LAYOUT, MEMBER
from tests.simulation.repairs.rank import IS_EXPLAINED, Rank, final_states
from tests.simulation.store import Values

_LOOKS_S = 3.0  # for those who look for hangs
RAISED_S = 100.0  # from an exception to the end of its repair
_LATE_S = 5.0  # until a fault is seen in the store
AFTER_S = 3.0  # from the end of a start to that of all its processes
# A kernel must be silent for 1 s, but for what passes from the last answer to the next message; and until the
# coordinator has looked.
_KERNEL_SILENCE_S, _RECENT_S = 0.8, 1.0
_REPLACED_S = 15.0  # since a node may know that it was silent, until its lost ranks have ended


class Oracle:
    """Judge of a job: its ranks and its launcher say what they do."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self.log: list[str] = []
        self.excuses: list[str] = []  # of the present start, to end without training to its end
        self.num_deaths = self.num_repairs = 0
        self.limit_s = 0.0  # for the end of a repair; 0 if there is none
        self.halted: set[Process] = set()  # that do not run, or whose thread hangs
        self.num_losses = 0  # of nodes
        self.fault_s = 0.0  # of the last one
        self.layout = self._trained_layout = 0  # of an elastic start
        self.silences: list[tuple[list[Process], float]] = []  # of nodes, until when
        self.away_s: dict[str, float] = {}  # by node, until when it may not be there
        self.num_untrained = 0  # losses of nodes since an iteration was finished
        self.num_failures = 0  # of ranks, since then
        self.left_out: set[int] = set()  # iterations, by all starts
        self.unfit_since_s: dict[str, float] = {}  # by node, of the agents' start
        self._begin()

    def _begin(self) -> None:
        self._members: dict[int, str] = {}  # by round
        self._finished: set[int] = set()
        self._trains: dict[int, Process] = {}  # by rank
        self._since: dict[int, int] = {}  # round, by rank
        self._final: dict[int, int] = {}
        self._raised: list[str] = []

    def begin(self) -> None:
        self.excuses.clear()
        self.num_deaths, self.limit_s = 0, 0.0
        self.num_losses = 0
        self.silences.clear()
        self.away_s.clear()
        self.unfit_since_s.clear()
        self.num_untrained = self.num_failures = self.layout = self._trained_layout = 0
        self._begin()

    def begin_layout(self, layout: int) -> None:
        """Begin with the first rank of an elastic start: what earlier ones say counts no more."""
        self.layout, self.num_deaths, self.limit_s = layout, 0, 0.0
        self._begin()

    def violate(self, what: str) -> None:
        self.violations.append(what)

    # What ranks say

    def is_corrupt(self, rank: Rank) -> None:
        """Note that a check has found a rank to compute wrongly: its node is to get no ranks any more."""
        now_s = rank._kernel.now
        self.log.append(f"{now_s:.3f} s: {rank._process} computes wrongly")
        self.unfit_since_s.setdefault(rank._process.node, now_s)

    def connects(self, group: Group, rank: int, process: Process) -> None:
        since_s = self.unfit_since_s.get(process.node, math.inf)
        if process.kernel.now > since_s + _REPLACED_S:
            self.violate(f"rank {rank} runs on {process.node}, which computes wrongly")
        known = group.ends.get(rank, (process, None))[0]
        if known is not process:
            self.violate(f"two processes are rank {rank} in round {group.number}")
        if group.number == 0 and group.layout == self.layout:
            self._trains[rank] = process

    def completes(self, group: Group, operation: Operation) -> None:
        """Check that all ranks do the same together, and that each lives."""
        if len(operation.names) > 1:
            self.violate(f"ranks do {sorted(operation.names)} together")
        what, _, iteration = min(operation.names).partition(":")
        if what == "left out":
            self.left_out.add(int(iteration))
        elif what == "end":
            self.left_out.discard(int(iteration))
        if what == "recover":
            self._check_hosts(group)
        dead = [rank for rank, (process, _) in group.ends.items() if not process.is_alive]
        if dead:
            self.violate(f"{sorted(operation.names)} is done with ranks {dead}, which are dead")
        kernel = next(iter(group.ends.values()))[0].kernel
        nodes = {process.node for process, _ in group.ends.values()}
        # A node that was silent may go on, alone, until it learns that it is lost. moe_ft.lock keeps it from
        # storage, and nothing that it does counts.
        if group.layout < self._trained_layout and not nodes <= self._silent_nodes(kernel.now):
            self.violate(f"start {group.layout} goes on after {self._trained_layout} has begun")
        self._trained_layout = max(self._trained_layout, group.layout)
        for each in kernel.processes if group.layout else ():
            is_earlier = MEMBER in each.local and each.local[LAYOUT] < group.layout
            if each.is_alive and is_earlier and each.node in nodes:
                self.violate(f"{each} of an earlier start lives on a node of start {group.layout}")

    def _check_hosts(self, group: Group) -> None:
        """Check that of the ranks that share a device one is the host, and all others know it."""
        found = {
            rank: (process.node, process.environ["LOCAL_RANK"], process.local[MEMBER].assignment)
            for rank, (process, _) in group.ends.items()
        }
        hosts = {place[:2]: rank for rank, place in found.items() if place[2].host_rank is None}
        for rank, (node, device, own) in found.items():
            if hosts.get((node, device)) != (rank if own.host_rank is None else own.host_rank):
                self.violate(f"rank {rank} shares the device of {hosts}, and knows {own.host_rank}")

    def _silent_nodes(self, now_s: float) -> set[str]:
        """Return the nodes that may not know yet that they are lost, or have just learned it."""
        return {
            each.node
            for silent, end_s in self.silences
            for each in silent
            if now_s < end_s + _REPLACED_S
        }

    def is_replaceable(self, rank: Rank) -> None:
        """Note that an iteration was finished in a start."""
        if rank._start.layout == self.layout:
            self.num_untrained = self.num_failures = 0

    def begins_again(self, values: Values, of_start: Values, why: str, now_s: float) -> None:
        """Check that all ranks may begin again.

        Args:
            values: of the nodes, and of the start before.
        """
        self.log.append(f"{now_s:.3f} s: all ranks begin again: {why}")
        if SAVE in _said(values):
            self.violate("all ranks begin again, and were to save")
        if why == "a node has come":
            self._check_finished(of_start, "has all ranks begin again", now_s)

    def moves(self, of_start: Values, now_s: float) -> None:
        """Check that ranks may move to a node that has come."""
        self._check_finished(of_start, "takes ranks", now_s)

    def _check_finished(self, of_start: Values, what: str, now_s: float) -> None:
        number, said = 0, _said(of_start)
        while f"round_{number + 1}/declared" in said:
            number += 1
        is_finished = not number or f"round_{number}/finished" in said
        if not is_finished and now_s > self.fault_s + _LATE_S:
            self.violate(f"a node {what} in the middle of round {number}")

    def strikes(
        self, node: str, why: str, silence: tuple[float, float] | None, now_s: float
    ) -> None:
        """Check that a node is called lost for its kernel only if that was silent.

        Args:
            silence: from when to when it was, last.
        """
        self.log.append(f"{now_s:.3f} s: {node} is called lost: {why}")
        begin_s, end_s = silence or (now_s, now_s)
        was_silent = min(end_s, now_s) - begin_s > _KERNEL_SILENCE_S and end_s > now_s - _RECENT_S
        if "kernel" in why and not was_silent:
            self.violate(f"{node} is called lost at {now_s:.3f} s, and its kernel answers: {why}")

    def meets(self, rank: Rank, entries: Sequence[Entry]) -> None:
        """Check that a rank sees the same round as the others, and in it who it is."""
        if rank._start.layout < self.layout:
            return
        number = rank.member.round
        seen = json.dumps([[each.rank, each.died_s, each.hung_s, each.facts] for each in entries])
        if self._members.setdefault(number, seen) != seen:
            self.violate(
                f"rank {rank.rank} sees {seen} in round {number}, others {self._members[number]}"
            )
        position = rank.member.position
        facts = {} if position is None else position.facts()
        # Of survivors with the same facts there is one.
        alike = (each for each in entries if each.died_s is None and each.facts == facts)
        own = next((each for each in entries if each.rank == rank.rank), None) or next(alike, None)
        if own is None:
            self.violate(f"rank {rank.rank}, at {position}, is no member of round {number}")
            return
        is_other = self._trains[rank.rank] is not rank._process
        if is_other != (own.died_s is not None):
            self.violate(
                f"rank {rank.rank} is a member of round {number} as {own}, and its process is "
                f"{'another one' if is_other else 'the same'} as before"
            )
        if own.facts and own.facts != facts:
            self.violate(f"rank {rank.rank} is at {position}, and round {number} has {own.facts}")

    def finishes(self, rank: Rank) -> None:
        if rank._start.layout < self.layout:
            return
        kernel = rank._process.kernel
        number = rank.member.round
        if number >= self._since.get(
            rank.rank, 0
        ):  # a node that was silent may finish a round of before
            self._since[rank.rank], self._trains[rank.rank] = number, rank._process
        self._finished.add(number)
        self.check_silenced(rank._job)
        now = [rank._job.process_of(each) for each in range(rank._start.size)]
        self.num_repairs += 1
        self.num_deaths = sum(
            each is None or not each.is_alive or each in self.halted for each in now
        )
        if self.limit_s and kernel.now > self.limit_s and not self.excuses:
            self.violate(f"a repair ends {kernel.now - self.limit_s:.1f} s too late")

    def hangs(self, rank: Rank, *, is_in_iteration: bool) -> None:
        """Note that a thread hangs: nothing but an iteration is watched."""
        if not is_in_iteration or not rank.link.is_armed:
            self.excuses.append("a thread hangs outside of an iteration")
        process, section, limit_s = rank._process, rank.loop.section, rank.limit_s

        def check() -> None:
            if (
                process.is_alive
                and not process.is_suspended
                and not process.local.get(IS_EXPLAINED)
            ):
                self.violate(f"{process} hangs in its {section}, and lives after {limit_s:g} s")

        if limit_s is not None:
            process.kernel.call_later(limit_s + _LOOKS_S, check)

    @property
    def _num_kills(self) -> int:
        return sum(": kill: " in each for each in self.log)

    def raises(self, rank: Rank, what: str, *, is_repaired: bool) -> None:
        """Note that a rank raises an exception of its own."""
        now_s, job = rank._kernel.now, rank._job
        self._raised.append(what)
        # A kill may break the round in which the others would learn of it.
        if self._raised.count(what) > 2 + self._num_kills:
            self.violate(f"rank {rank.rank} is replaced again and again for a {what}")
        self.log.append(f"{now_s:.3f} s: {rank._process} raises, is repaired: {is_repaired}")
        if is_repaired:
            self.num_deaths += 1
            if self.num_deaths >= rank._start.size:
                self.excuses.append("all ranks may have died")
            if self.limit_s:
                self.limit_s = max(self.limit_s, now_s + RAISED_S)
            return
        self.num_failures += 1
        if self.num_failures > job.restarts:
            self.excuses.append("too many ranks have failed")

    def leaves(self, rank: Rank, error: Exception) -> None:
        self.log.append(f"{rank._kernel.now:.3f} s: rank {rank.rank} ends: {error!r}")

    def has_trained(self, rank: Rank) -> None:
        """Note that a rank has trained to the end: what dies now is not replaced."""
        if rank._start.layout == self.layout:
            self._final[rank.rank] = rank.state
        if "a rank has trained to the end" not in self.excuses:
            self.excuses.append("a rank has trained to the end")

    # What the launcher sees

    def after(self, start: Start, job: Job, *, has_ended: bool) -> None:
        self._check_rounds(job, start)
        for process in (each for rank in range(job.size) for each in job.processes_of(rank)):
            if process.local[MEMBER].link.hung_s and process not in self.halted:
                self.violate(f"{process} is killed for a hang, and ran")
        self.check_silenced(job)
        if not has_ended:
            self.violate(f"start {start.number} does not end")
            return
        if start.has_ended_well:
            size = job.newest_start.size
            if not self.left_out <= {job.bad_batch[1]}:
                self.violate(f"iterations {sorted(self.left_out)} are left out")
            # A later start may find a snapshot from before, when the iteration was not left out yet.
            counts = {len(self.left_out), 0 if self._num_kills else len(self.left_out)}
            expected = [
                final_states(size, job.iterations - each, job.fewest > 0) for each in counts
            ]
            if (found := [self._final.get(rank) for rank in range(size)]) not in expected:
                self.violate(f"training ends in {found}, and not in {expected}")
            return
        if not self.excuses:
            self.violate(f"start {start.number} ends without a reason for it")

    def check_silenced(self, job: Job) -> None:
        """Check that no process of a node that was silent lives while another one has its rank."""
        if "the job's store is lost" in self.excuses:
            return
        until_s: dict[Process, float] = {}
        for silent, end_s in self.silences:
            until_s |= {each: max(end_s, until_s.get(each, 0.0)) for each in silent}
        for process, end_s in until_s.items():
            if MEMBER not in process.local or job.world.kernel.now < end_s + _REPLACED_S:
                continue
            rank = int(process.environ["RANK"])
            newest = job.process_of(rank)
            is_earlier = process.local[LAYOUT] < self.layout
            is_replaced = is_earlier or newest not in (None, process)
            if process.is_alive and is_replaced:
                self.violate(
                    f"{process} lives {_REPLACED_S} s after it could know that {newest} has its rank"
                )

    def after_a_while(self, job: Job) -> None:
        """Check that no rank outlives its start, unless what would end it is stopped.

        On a node that stands still it does until that runs again.
        """
        if "a process is stopped" in self.excuses:
            return
        now_s = job.world.kernel.now
        for each in (each for rank in range(job.size) for each in job.processes_of(rank)):
            ends_s = [end_s for silent, end_s in self.silences if each in silent]
            if each.is_suspended and max(ends_s, default=0.0) > now_s:
                job.world.kernel.call_later(
                    max(ends_s) - now_s + AFTER_S, partial(self._check_has_ended, each)
                )
            else:
                self._check_has_ended(each)

    def _check_has_ended(self, process: Process) -> None:
        if process.is_alive:
            self.violate(f"{process} outlives its start")

    def _check_rounds(self, job: Job, start: Start) -> None:
        """Check how many rounds were broken in a row."""
        listener = job.machine.ports.get(start.address)
        if listener is None or not listener.starts:  # nobody has written anything
            return
        *_, values = listener.starts.values()
        said, number, broken = _said(values), 0, 0
        while f"round_{number + 1}/declared" in said:
            number += 1
            broken = 0 if number in self._finished else broken + 1
            if broken > MOST_UNFINISHED:
                self.violate(f"{broken} rounds in a row are broken, up to round {number}")
        if broken >= MOST_UNFINISHED:
            self.excuses.append("too many rounds were broken")


def _said(values: Values) -> set[str]:
    """Return the keys of what no stranger has written."""
    return {key for key, text in values.texts.items() if text != FORGED}
