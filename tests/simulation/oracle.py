"""Promises of the product, checked over the starts of a simulated job.

Each violation is a sentence. The promises are those of the documentation: state is exact, nothing damaged or
half-written is used, what was acknowledged survives the failures that it is protected against, the newest
usable state is chosen, refusals are true, and everything comes to an end.
"""

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_ft.engine.background import EngineEvent
from moe_ft.errors import ConfigError, DegradedError, UnrecoverableError
from moe_ft.strategies import registry
from tests.simulation.job import Job, Start
from tests.simulation.left import (
    Left,
    behind_what_is_counted,
    look,
    states_of_several_iterations,
)
from tests.simulation.lossy import Expert, Recount
from tests.simulation.owing import Owing
from tests.simulation.rank import Life
from tests.simulation.shape import Shape
from tests.simulation.whole import Truth

_LATE = "no window was completed in time"  # which may be, and costs logs
_DAMAGE = "does not match its checksum"  # of a window that stays, and need not have been read
# Why a peer may be sent state although it has the iteration before: also after a local recovery.
_NO_STEP = ("the optimizer has not stepped before", "its step was not made in this start")
_REFUSALS = (ConfigError, UnrecoverableError)


def describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-14:]
    places = " ".join(f"{Path(each.filename).name}:{each.lineno}" for each in frames)
    return f"{type(error).__name__}: {error} ({places})"


@dataclass
class Floors:
    """Iterations that must not be lost.

    Attributes:
        memory: as long as no node loses its memory.
        protected: as long as one node loses its memory, and none before.
        storage: whatever happens to the nodes.
        recovered: by the last start, as long as nothing is lost: nobody knows where it is.
        shape: layout of the last start that had state, as long as nothing is lost: another one may lack
            versions of experts, which this one has.
    """

    memory: int = 0
    protected: int = 0
    storage: int = 0
    recovered: int = 0
    shape: Shape | None = None

    def lose_node(self) -> None:
        self.memory, self.protected, self.recovered, self.shape = self.protected, 0, 0, None

    def lose_memory(self) -> None:
        self.memory, self.protected, self.recovered, self.shape = 0, 0, 0, None

    def lose_storage(self) -> None:
        self.storage, self.recovered, self.shape = 0, 0, None

    @property
    def highest(self) -> int:
        """The iteration that the next start must recover at least."""
        return max(self.memory, self.storage, self.recovered)


@dataclass
class Oracle:
    """Judge of one job.

    Attributes:
        is_damaged: whether bits of state have been changed.
        is_garbled: whether the start that runs may have been unable to read what is intact: a connection has
            changed bits, or memory could not be read.
        garbled_until_s: when that ends.
        has_strangers: whether a node has come back with old memory, so that branches exist.
        is_disturbed: whether a fault has happened in the start that runs, or has not ended before it.
        disturbed_until_s: when the last fault ends.
        may_not_refuse: whether nothing but storage that is away disturbs the next start: it must continue
            from the memory that the start before has left.
        is_refused: whether a start has refused, as it may: there is no way on.
        promised: iteration that the ranks of the start that runs will leave, since nothing but one death, or
            SIGTERM, has hit them; 0 for none.
        is_whole: whether all ranks will leave it, so that nothing is run again.
        violations: sentences.
    """

    job: Job
    floors: Floors = field(default_factory=Floors)
    is_damaged: bool = False
    is_garbled: bool = False
    garbled_until_s: float = 0.0
    has_strangers: bool = False
    is_disturbed: bool = False
    disturbed_until_s: float = 0.0
    may_not_refuse: bool = False
    is_refused: bool = False
    promised: int = 0
    is_whole: bool = False
    violations: list[str] = field(default_factory=list)
    left: Left | None = None

    def __post_init__(self) -> None:
        self.recount, self.owing = Recount(), Owing()
        training, later = self.job.training, self.job.setup.later
        self._truth = Truth(training.iterations, training.first, keeps_wholes=bool(later))
        self._floor = 0  # when the start that runs began
        self._was_whole = self._has_read_damage = False
        self._judged: Start | None = None  # its acknowledgements are in the floors

    def note_end(self, start: Start, dead: int | None) -> None:
        """Note that a start ends now because a rank dies, or because all are told to end.

        Args:
            dead: the rank; None if all are told to end.
        """
        setup, lives = self.job.setup, start.lives
        can_leave = all(life.may_break for life in lives)
        if self.is_disturbed or not can_leave or not all(each.is_alive for each in start.processes):
            return
        if dead is None:
            self.promised, self.is_whole = max(max(life.digests) for life in lives), True
            return
        has_window = any(max(life.complete) > 0 for life in lives)
        has_lost = any(map(_has_lost_logs, lives)) or (self.left and self.left.has_damaged_logs)
        if not setup.recovers_locally or not has_window or has_lost:
            return
        shape = start.shape
        self.promised = max(
            min(max(lives[rank].digests) for rank in shape.ranks_of(stage))
            for stage in range(shape.stages)
            if stage != shape.stage_of(dead)
        )

    def note_fault(self) -> None:
        """Note that a fault happens: what was promised of a start that ends no longer holds."""
        self.is_disturbed, self.promised, self.is_whole = True, 0, False

    def lose_node(self) -> None:
        """A node has lost its memory, and is not known to have it back before the next checkpoint."""
        self._cut_off()
        self.floors.lose_node()

    def lose_memory(self) -> None:
        self._cut_off()
        self.floors.lose_memory()

    def lose_storage(self) -> None:
        self._cut_off()
        self.floors.lose_storage()
        self.is_damaged = True

    def _cut_off(self) -> None:
        """Note what the start that runs has acknowledged so far: the rest of it does not count."""
        self.is_whole = self._has_read_damage = False  # state or notes are lost, or a start is over
        if self.job.starts and self.job.starts[-1] is not self._judged:
            self._raise_floors(self.job.starts[-1])
            self._judged = self.job.starts[-1]

    @property
    def is_exact(self) -> bool:
        """True if the strategy promises the digest of no failure."""
        return registry.chosen(self.job.training.config).is_exact

    @property
    def _has_whole_experts(self) -> bool:
        """True if all of an expert is of one iteration: else its bits say nothing about what was lost."""
        return not self.job.setup.options.get("master_always_full", False)

    def _keeps_what_it_has(self, shape: Shape) -> bool:
        """Return whether a state that was acknowledged can be used in a layout."""
        if self.is_damaged or self.has_strangers:
            return False
        return self.floors.shape == shape or (self.is_exact and not self.job.setup.later)

    def _fail(self, start: Start, what: str) -> None:
        self.violations.append(f"start {start.number}: {what}")

    def before_start(self) -> None:
        """Look at what the dead processes have left."""
        self.is_disturbed = self.job.world.kernel.now < self.disturbed_until_s
        self._floor = self.floors.highest
        self._was_whole, self.is_whole = self.is_whole, False
        self.is_garbled = self.job.world.kernel.now < self.garbled_until_s
        self.left = self._look({*self.job.nodes}, self.job.next_shape)

    def _look(self, nodes: set[str], shape: Shape) -> Left:
        return look(self.job.root, shape, nodes, is_local=self.job.setup.recovers_locally)

    def after_start(self, start: Start, *, has_ended: bool) -> None:
        if not has_ended:
            alive = [repr(each) for each in start.processes if each.is_alive]
            self._fail(start, f"hangs: {', '.join(alive)} at {self.job.world.kernel.now:.0f} s")
            return
        assert self.left is not None
        has_read = any(self.left.has_ended(life.error) for life in start.lives)
        if has_read and self._has_read_damage and not self.is_disturbed:
            self._fail(start, "reads damaged logs, and the start before has noted that they are")
        self.is_disturbed |= has_read
        self._check_losses(start)
        self._check_peers(start)
        self._check_states(start)
        for life in start.lives:
            self._check_recovery(start, life)
            self._check_error(start, life)
        self._check_scope(start)
        self._check_logs(start)
        if not self.is_disturbed:
            self._check_is_quiet(start)
        is_whole = self.is_whole
        self._cut_off()
        if any(life.may_lose_memory for life in start.lives):
            self.floors.lose_memory()  # maybe after a fault that has cut off what counts
        self.is_whole, self.may_not_refuse, self._has_read_damage = is_whole, False, has_read
        if self.job.setup.dense_interval and not self.job.setup.persist_interval:
            for what in states_of_several_iterations(self.job.root):
                self._fail(start, f"storage has {what}, and whole states alone should go there")
        if start.has_ended_well:
            self._check_end(start)

    def _check_losses(self, start: Start) -> None:
        """Check what a lossy recovery says that it lost, and what is made up of it."""
        if not self.is_exact and self._has_whole_experts:
            for what in self.recount.check(start.shape, start.lives, self._newest_experts):
                self._fail(start, what)
        if self.job.setup.boost:
            for what in self.owing.check(start.shape, start.lives):
                self._fail(start, what)

    def _check_peers(self, start: Start) -> None:
        """Check that peers have the versions of experts that their ranks count as there, or newer ones."""
        if self.is_damaged or self.has_strangers or self.is_garbled:
            return
        counted = {life.rank: life.counted for life in start.lives}
        for what in behind_what_is_counted(self.job.root, start.number, counted):
            self._fail(start, what)

    @property
    def _newest_experts(self) -> Mapping[Expert, int]:
        """Iterations of the versions that experts must come back with; empty where nobody knows.

        A skipped iteration, or none before a breakpoint, changes no expert: its version cannot be told
        from the one before.
        """
        is_excused = self.is_garbled or self.is_damaged or self.has_strangers
        setup = self.job.setup
        if self.left is None or is_excused or setup.skips or setup.breakpoints:
            return {}
        return self.left.experts

    def _check_states(self, start: Start) -> None:
        """Check that all ranks go on with one training, bit for bit, in whatever layout it began."""
        lives = [life for life in start.lives if life.digests]
        if not self.is_exact or not lives:
            return
        at = min(min(life.digests) for life in lives)
        begun = {life.rank: life.digests[at] for life in lives if at in life.digests}
        truth = self._truth.follow(start.shape, at, begun)
        if truth is None:
            self._fail(start, f"ranks {[*begun]} have a wrong state at iteration {at}")
            return
        for life in lives:
            digests = truth.digests[life.rank]
            wrong = [each for each, digest in life.digests.items() if digest != digests.get(each)]
            if wrong:
                self._fail(start, f"rank {life.rank} has a wrong state at iteration {wrong[0]}")

    def _check_recovery(self, start: Start, life: Life) -> None:
        if life.outcome is None or self.left is None:
            return
        found, newest = life.outcome.iteration, self.left.newest
        where = f"rank {life.rank} recovered iteration {found}"
        if self.is_garbled:
            return
        if found < self._floor:
            self._fail(start, f"{where}, and {self._floor} was acknowledged")
        if self.has_strangers or newest is None:
            return
        # A stage that reads a damaged log in the middle of its replay falls back with all others.
        least = (self.left.newest_global or 0) if self.left.has_damaged_logs else newest
        if found < least or (found > newest and not self.is_damaged):
            self._fail(start, f"{where}, and {newest} is the newest that is left")

    def _check_scope(self, start: Start) -> None:
        """Check that no more iterations were run again than have to be."""
        outcomes = [life.outcome for life in start.lives if life.outcome is not None]
        if not outcomes or self.left is None:
            return
        if outcomes[0].stages and not self.job.setup.recovers_locally:
            self._fail(start, f"stages {outcomes[0].stages} recovered alone")
        is_excused = self.is_garbled or self.has_strangers or self.is_damaged
        if len(outcomes) < len(start.lives) or is_excused or self.left.newest is None:
            return
        done = {start.shape.stage_of(life.rank): life.replayed for life in start.lives}
        if self._was_whole and max(done.values()) > 0:
            self._fail(start, f"replayed {done} iterations by stage, and all ranks had left theirs")
        if sum(done.values()) != self.left.num_replays:
            least = self.left.num_replays
            self._fail(start, f"replayed {done} iterations by stage, and {least} in all are enough")

    def _check_error(self, start: Start, life: Life) -> None:
        error = life.error
        is_of_group = isinstance(error, RuntimeError) and "[gloo/" in str(error)
        is_trained = life.outcome is None or life.is_saved is not None
        is_of_system = isinstance(error, OSError) and is_trained
        is_asked = isinstance(error, DegradedError) and self.job.setup.on_error == "raise"
        is_excused = self.is_disturbed and (is_of_group or is_of_system or is_asked)
        assert self.left is not None
        if error is None or is_excused or self.left.has_ended(error):
            return
        what = f"rank {life.rank} ended with {type(error).__name__}: {error}"
        if not isinstance(error, _REFUSALS):
            self._fail(start, f"rank {life.rank} ended with {describe(error)}")
            return
        if self.is_disturbed and not (self.may_not_refuse and self.floors.memory > 0):
            return  # what disturbs it may be what it refuses
        if self.left.newest is not None and not self.has_strangers:
            self._fail(start, f"{what}; but iteration {self.left.newest} is intact")
        elif not self.left.has_any:
            self._fail(start, f"{what}; but there is nothing to refuse")
        elif self._floor and self._keeps_what_it_has(start.shape) and not self.is_garbled:
            self._fail(start, f"{what}; but iteration {self._floor} was acknowledged")
        else:
            self.is_refused = True

    def _check_is_quiet(self, start: Start) -> None:
        """Nothing may go wrong where nothing disturbs a start."""
        for life in start.lives:
            degraded = [
                each
                for at, each in life.reports
                if each.event == "degraded"
                and not self._is_at_the_end(at, each)
                and not (self.is_damaged and _DAMAGE in str(each.fields["reason"]))
            ]
            if fallback := _wrong_fallback(life):
                self._fail(start, f"rank {life.rank} sends state, undisturbed: {fallback}")
            wrong = [each for each in degraded if _LATE not in str(each.fields["reason"])]
            if wrong:
                self._fail(start, f"rank {life.rank} reports {wrong[0].fields}, undisturbed")
        if not start.has_ended_well and not self.is_refused:
            codes = [each.exit_code for each in start.processes]
            self._fail(start, f"ended with {codes}, undisturbed")

    def _is_at_the_end(self, seen_at: int, report: EngineEvent) -> bool:
        """Return whether a peer has ended, before this rank, a run that needs no copies any more."""
        is_complete = seen_at == self.job.training.iterations and not self.job.setup.persists
        return is_complete and report.fields["part"] == "replicate"

    def _check_logs(self, start: Start) -> None:
        """Check that the logs of as many iterations are kept as the documentation says."""
        setup = self.job.setup
        window = str(setup.options.get("window", "1"))
        least = 2 * (int(window) if window.isdecimal() else 1) + int(
            setup.interval.replace("auto", "1")
        )
        for life in start.lives:
            for _, report in filter(_is_lost_log, life.reports):
                found = re.search(r"log of iteration (\d+) is", str(report.fields["reason"]))
                if found is not None and report.iteration - int(found[1]) < least:
                    self._fail(start, f"rank {life.rank} keeps no {least} logs: {report.fields}")

    def _raise_floors(self, start: Start) -> None:
        floors, lives = self.floors, start.lives
        recovered = {life.outcome.iteration for life in lives if life.outcome is not None}
        complete = set[int]().union(*(life.complete for life in lives))
        floors.recovered = max(recovered, default=0)
        if floors.recovered or max(complete, default=0):
            floors.shape = start.shape
        floors.memory = max(floors.memory, *complete, self.promised)
        self.promised = 0
        # A peer that has the last snapshot of a window has all of it.
        at_peers = set.intersection(*(life.replicated for life in lives)) & complete
        floors.protected = max(floors.protected, *at_peers, 0)
        if any(_has_left_out(life, floors.protected) for life in lives):
            floors.protected = 0  # ranks have room for the newest ones, which some peer has not
        floors.storage = max(floors.storage, *(life.confirmed for life in lives))

    def _check_end(self, start: Start) -> None:
        setup, root = self.job.setup, self.job.root
        if not all(life.is_saved for life in start.lives):
            if not self.is_disturbed:
                self._fail(start, "the last state is not where it should be, undisturbed")
            return
        if setup.persists or start.last_iteration < self.job.training.iterations:
            left = self._look({*start.nodes}, start.shape)
            is_excused = self.is_disturbed or self.is_damaged  # a checkpoint is not written twice
            if left.newest != start.last_iteration and not is_excused:
                self._fail(start, f"the end leaves iteration {left.newest}")
        memory = [
            each
            for node in sorted(set(start.nodes))  # nodes that the job has left keep what they have
            for each in (root / "memory" / "job" / node).glob("rank_*")
            if each.is_dir()
        ]
        may_go = all(life.may_lose_memory for life in start.lives)
        if may_go and memory and not self.has_strangers and not self.is_disturbed:
            self._fail(start, f"{memory[0].name} is still in memory")


def _is_lost_log(seen: tuple[int, EngineEvent]) -> bool:
    return seen[1].event == "degraded" and _LATE in str(seen[1].fields["reason"])


def _wrong_fallback(life: Life) -> str:
    """Return what a rank has sent as state although its peer had the iteration before; empty if nothing."""
    followed: dict[str, int] = {}  # by peer, the last iteration that it was sent
    for _, report in life.reports:
        if report.event != "replicate":
            continue
        for peer in map(str, report.fields["peers"]):
            why = report.fields["fallbacks"].get(peer, "")
            if why and why not in _NO_STEP and followed.get(peer) == report.iteration - 1:
                return f"{report.iteration} to rank {peer}: {why}"
            followed[peer] = report.iteration
    return ""


def _has_no_room(seen: tuple[int, EngineEvent]) -> bool:
    return seen[1].event == "skipped" and seen[1].fields["part"] == "boundary-log"


def _has_lost_logs(life: Life) -> bool:
    return any(_is_lost_log(each) or _has_no_room(each) for each in life.reports)


def _has_left_out(life: Life, iteration: int) -> bool:
    """Return whether a rank has said that a peer was not sent what is newer than an iteration."""
    return any(
        report.event == "skipped"
        and report.fields["part"] == "replicate"
        and report.iteration > iteration
        for _, report in life.reports
    )
