"""A simulated rank that trains and repairs in place, with the membership, rounds and watcher of the product.

It stands for Megatron's loop, for megatron/fault_tolerance/repair/seam.py and for the phases of a round, in
their order. Its state is a chain of hashes, so that a value of a wrong iteration, rank or start shows.
"""

import os
import zlib
from pathlib import Path
from typing import Any

from moe_ft.cluster import job_store
from moe_ft.cluster.link import Heart
from moe_ft.cluster.member import Member
from moe_ft.cluster.rounds import Rounds
from moe_ft.config.config import RecoveryConfig
from moe_ft.errors import CorruptionError, RepairError
from moe_ft.events import EventLog
from moe_ft.faults import Phase, Section
from moe_ft.files.progress import note_progress, waiting
from moe_ft.loop.hangs import Hangs
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.verdicts import Failure, FailureKind
from tests.simulation.active import World
from tests.simulation.kernel import Waiting
from tests.simulation.repairs import product
from tests.simulation.repairs.ends import Ends
from tests.simulation.repairs.machine import MACHINE, MEMBER

TIMEOUT_S = 60.0  # of groups in training, and twice that in a repair
HEARTBEAT_S = 5.0
CONNECT_S = 30.0
REPAIR_S = 600.0
LONGEST_BUILD_S = 15.0
ITERATION_S = 1.0
KEPT = 3  # iterations whose state is in memory
# Local state of a process: what is to befall it, and whether something explains that it is late.
HANGS, RAISES, COMPUTES_S, STORES_S, WRITES_S = "hangs", "raises", "computes", "stores", "writes"
IS_EXPLAINED, IS_CORRUPT = "is explained", "is corrupt"
EVALUATION_INTERVAL, SAVE_INTERVAL = 2, 3


class Rank:
    """One process of a rank: as the first of its start, or in the place of one that has died."""

    def __init__(self, world: World) -> None:
        process = world.process
        self._kernel, self._process = world.kernel, process
        self._job = process.local[MACHINE].job
        self.member: Member = process.local[MEMBER]
        self.link = self.member.link
        self.rank, self._start = int(process.environ["RANK"]), self._job.start_of(process)
        self._memory = self._job.memory_on(self.rank, process.node)
        self.is_alone = self.member.is_replacement
        self.state = 0
        self._timeout_s, self._leaves_out_log = 2 * TIMEOUT_S, False

    def run(self) -> None:
        """Train to the end, with all repairs; raises as a rank would."""
        member, link = self.member, self.link
        self._ends = Ends(self._job, self._start, self.rank)
        store, watched = (job_store.connect(os.environ, member.token, TIMEOUT_S) for _ in range(2))
        member.connect(store, self._start.size)
        of_watcher = Rounds(member.sign(watched), self.rank, self._start.size)
        self.loop, config = LoopState(), RecoveryConfig(hang_limit=self._job.hang_limit)
        log = EventLog(Path(os.devnull), self.rank)
        self._listeners = Listeners(self.loop, [Hangs(config, self.loop, log, 2 * TIMEOUT_S)])
        self.links = product.links_of(member, self._ends)
        self._watcher = product.Watcher(of_watcher, self.links, member)
        self._heart = Heart(link, HEARTBEAT_S)
        if self._job.repairs and config.hang_limit_s is not None:
            self._heart.start(config.hang_limit_s)
        own = product.OwnErrors(
            member, self.links, self.loop, lambda failure, error: None, lambda iteration: True
        )
        self._deaths = product.Deaths(member, self._watcher, self.links, own)
        if not self._job.repairs:
            link.retire()
        with self._listeners:
            self._run()

    def _run(self) -> None:
        link = self.link
        if not self.is_alone:
            self._connect(0, self._timeout_s)
            self._ends.gather("start", None, self._timeout_s)
        if self._job.repairs:
            self._watcher.start()
        try:
            self._train(self._build() if self.is_alone else self._recover(self._job.iterations))
            self._listeners.end_training()
            self._pass("exit")
            self._job.oracle.has_trained(self)
            if self._job.repairs:
                with self._ends.waiting():
                    self.member.end()
            self._ends.gather("done", None, self._timeout_s)
        except Exception as error:
            self._job.oracle.leaves(self, error)
            link.retire()
            raise
        finally:
            link.disarm()
            self._heart.close()
            if self._job.repairs:
                self._watcher.close()

    def _connect(self, number: int, timeout_s: float) -> None:
        with self.links.recording():
            self._ends.connect(number, timeout_s)

    def _pass(self, name: str) -> None:
        """Pass a moment at which this rank may hang, or raise an exception of its own."""
        self._kernel.event(name)
        self._kernel.sleep(self._process.local.pop(COMPUTES_S, 0.0))
        if self._process.local.get(HANGS):
            self._job.oracle.hangs(self, is_in_iteration=self._watcher._inside_since_s is not None)
            self._kernel.wait(Waiting())
        if self._process.local.pop(IS_CORRUPT, False):
            self._be_corrupt()
        if mistake := self._process.local.pop(RAISES, 0):
            self._raise(f"mistake {mistake} of the rank itself", is_caught=name != "between")

    def _be_corrupt(self) -> None:
        """Be found to compute wrongly, as a check does."""
        self._job.oracle.is_corrupt(self)
        iteration, kind = self.loop.iteration, FailureKind.CORRUPTION
        with self._ends.waiting():
            self.member.report_failure(
                Failure(rank=self.rank, kind=kind, what="sums", iteration=iteration)
            )
        raise CorruptionError("sums")

    def _raise(self, what: str, *, is_caught: bool = True) -> None:
        is_repaired = is_caught and self.loop.section in product.REPAIRED_IN
        self._job.oracle.raises(self, what, is_repaired=is_repaired and self.link.is_armed)
        raise ValueError(what)

    def _build(self) -> int:
        """Become a rank, alone; return the iteration in which the others are."""
        for _ in range(3):
            self._pass("build")
            self._kernel.sleep(self._kernel.random.random() * LONGEST_BUILD_S / 3)
        with self._ends.waiting():
            position = self.member.wait_for_survivors()
        self._leaves_out_log = position.done >= product.Done.LOG
        return position.iteration

    def _train(self, iteration: int) -> None:
        while iteration < self._job.iterations:
            self._train_step(iteration)
            self._pass("between")
            self._log(iteration)
            iteration += 1
            if self._job.evaluation_steps and iteration % EVALUATION_INTERVAL == 0:
                self._evaluate(iteration - 1)
            if self._job.evaluation_steps and iteration % SAVE_INTERVAL == 0:
                self._save()

    def _log(self, iteration: int) -> None:
        """Log an iteration, and leave that when all have; begin again if a rank dies in it."""
        leaves_out, self._leaves_out_log = self._leaves_out_log, False
        if leaves_out:
            return
        while True:
            self.member.note(product.Done.STEP)
            try:
                with self._watcher.inside():
                    self._pass("log")
                    self._ends.gather(f"log:{iteration}", None, self._timeout_s)
                    self._pass("logged")
                    self._kernel.sleep(ITERATION_S * self._kernel.random.random())
                    self.links.check()  # stands for a collective of some of the ranks
                    self.member.note(product.Done.LOG)
                    self._ends.gather(f"end of log:{iteration}", None, self._timeout_s)
                return
            except BaseException as error:
                self._notice_or_raise(error)
            self._repair_until_finished(iteration)
            if self.member.all_had_logged:
                return

    def _evaluate(self, iteration: int) -> None:
        """Evaluate the state after an iteration; begin again if a rank dies in it."""
        while True:
            try:
                with self._watcher.inside(), self._listeners.in_section(Section.EVALUATION):
                    for _ in range(self._job.evaluation_steps):
                        note_progress()
                        self._pass("evaluate")
                        self._kernel.sleep(ITERATION_S * self._kernel.random.random())
                    self._ends.gather("evaluated:", None, self._timeout_s)
                return
            except BaseException as error:
                self._notice_or_raise(error)
            self.member.note(product.Done.EVALUATING)
            self._repair_until_finished(iteration)

    def _save(self) -> None:
        """Write a checkpoint, on storage that may be slow."""
        local = self._process.local
        with self._listeners.in_section(Section.CHECKPOINT):
            self._pass("save")
            with waiting(TIMEOUT_S):
                self._kernel.sleep(local.pop(STORES_S, 0.0))
            end_s = self._kernel.now + local.pop(WRITES_S, 0.0)
            while self._kernel.now < end_s:
                local[product.WRITTEN] = local.get(product.WRITTEN, 0) + 1
                self._kernel.sleep(ITERATION_S / 2)
            try:
                self._ends.gather("saved:", None, self._timeout_s)
            except RuntimeError:  # docs/repair.md: a death in a save restarts
                self._job.oracle.excuses.append("a rank has died while others save")
                raise

    def _train_step(self, iteration: int) -> None:
        if self.is_alone:
            self._become_replaceable()
        else:
            self.member.position = product.position_at(iteration)
            if not self._job.repairs:
                self._iterate(iteration)
                return
            try:
                with self._watcher.inside():
                    self._iterate(iteration)
                self._become_replaceable()
                return
            except BaseException as error:
                self._notice_or_raise(error)
            self._become_replaceable()
        self._repair_until_finished(iteration)

    def _repair_until_finished(self, iteration: int) -> None:
        while True:
            try:
                self._repair(iteration)
                return
            except BaseException as error:
                self._notice_or_raise(error, waits=True)

    def _notice_or_raise(self, error: BaseException, *, waits: bool = False) -> None:
        if not self._job.repairs:
            raise error
        with self._ends.waiting():
            self._deaths.notice_or_raise(error, waits=waits)

    def _become_replaceable(self) -> None:
        with self._ends.waiting():
            self.member.become_replaceable()
        self._job.oracle.is_replaceable(self)
        self._heart.start()

    def _iterate(self, iteration: int) -> None:
        """Run an iteration, and leave it when all have finished it."""
        self._listeners.begin_iteration(iteration)
        # One that cannot be replaced would raise in all further starts, too.
        if self.link.is_armed and self._job.bad_batch == (self.rank, iteration):
            self._raise(f"bad batch of iteration {iteration}")
        self._pass("forward")
        self._kernel.sleep(ITERATION_S * self._kernel.random.random())
        told = self._ends.gather(f"backward:{iteration}", [self.rank, self.state], self._timeout_s)
        if self._job.fewest:  # the state of another number of ranks is the same
            told = sorted({state for _, state in told})
        self._listeners.enter(Phase.BEFORE_STEP)
        self._pass("in step")
        self._memory[iteration + 1] = self.state = next_state(self.state, told)
        self._memory.pop(iteration + 1 - KEPT, None)
        self.links.check()
        self._ends.gather(f"end:{iteration}", None, self._timeout_s)
        self._listeners.end_iteration({}, is_skipped=False, num_samples=1)

    def _repair(self, iteration: int) -> None:
        """Run one round, in the order of round.py."""
        with product.ending_after(REPAIR_S, self.link):
            self.links.leave()
            self._listeners.suspend(iteration)
            self._pass("leave")
            with self._ends.waiting():
                met = self.member.meet()
            entries = met.entries
            self.is_alone = False
            self._job.oracle.meets(self, entries)
            self._pass("meet")
            with self._ends.waiting():
                self.member.wait_until_ready()
            number = self.member.round
            self.links.begin()
            self._timeout_s = 2 * TIMEOUT_S
            self._connect(number, CONNECT_S)
            most = min(each.facts["iteration"] for each in entries if each.facts)
            first = self._recover(most)
        for each in range(first, iteration + 1):
            with self._watcher.inside():
                if each in self.member.left_out:
                    self._listeners.leave_out(each)
                    self._ends.gather(f"left out:{each}", None, self._timeout_s)
                else:
                    self._iterate(each)
        self._timeout_s = TIMEOUT_S
        self._pass("finish")
        with self._ends.waiting():
            self.member.finish()
        self._job.oracle.finishes(self)

    @property
    def limit_s(self) -> float | None:
        """Seconds in which a hang must be found where this rank is; None if it may take longer."""
        local, passes, section = self._process.local, self.loop.num_passes, self.loop.section
        if local.get(IS_EXPLAINED) or local.get(product.WAITS):
            return None
        if self._job.hang_limit != "auto":
            return float(self._job.hang_limit)
        is_learned = passes[Section.ITERATION] >= product.NUM_LEARNED and passes[section]
        is_learned = is_learned and not self.loop.is_first
        if section in (Section.SETUP, Section.EXIT):
            return 20 * TIMEOUT_S
        return product.FLOOR_S if is_learned else 2 * TIMEOUT_S

    def _recover(self, most: int) -> int:
        """Restore the newest state that all ranks have, of this iteration at most; return its iteration."""
        self._pass("recover")
        told = self._ends.gather("recover:", sorted(self._memory), self._timeout_s)
        common = set.intersection(*map(set, told))
        found = max((each for each in common if each <= most), default=None)
        if found is None:
            if self.member.round:
                raise RepairError("a repair found no state to continue from")
            found, self._memory[0] = 0, 0
        self._kernel.sleep(self._kernel.random.random())
        self._pass("restore")
        self.state = self._memory[found]
        return found


def next_state(state: int, told: list[Any]) -> int:
    return zlib.crc32(repr((state, told)).encode())


def final_states(size: int, num_iterations: int, is_elastic: bool) -> list[int]:
    """Return the states of all ranks after a training that nothing disturbs."""
    states = [0] * size
    for _ in range(num_iterations):
        told: list[Any] = [[rank, state] for rank, state in enumerate(states)]
        told = sorted(set(states)) if is_elastic else told
        states = [next_state(state, told) for state in states]
    return states
