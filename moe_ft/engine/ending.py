"""The end of training: tries to bring the last state where it is kept, and advice if it is not there.

That place is storage, or memory if there is no storage and training is to continue. All ranks take the same
steps: snapshots, and writing them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from math import inf
from pathlib import Path

from moe_ft.engine.background import BackgroundPart, EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.decisions import Decisions, EndVote, Votes
from moe_ft.engine.memory.regions import describe_room
from moe_ft.engine.persist.schedule import StorageSchedule
from moe_ft.engine.snapshots.job import SnapshotState
from moe_ft.engine.snapshots.windows import Windows
from moe_ft.state.record import CapturedRecord
from moe_ft.strategies.interface import Strategy

_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # before each further try
_POLL_S, _LONGEST_POLL_S = 0.01, 0.16  # the longer nothing happens, the less often all ranks ask


class LastState(Enum):
    """Place of the last state when training has ended."""

    SAVED = auto()  # on storage: all ranks know that the checkpoint is complete
    UNSAVED = auto()  # not on storage, where it should be
    NO_STORAGE = auto()  # nothing was to go to storage
    NOTHING_NEW = auto()  # no iteration was trained since a fresh start


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """End of training, as the engine leaves it.

    Attributes:
        newest_in_memory: the iteration of the newest state that the memory of the nodes is known to hold as a
            whole, None if there is none.
        is_agreed: whether the ranks could decide together until the end.
        num_failed: attempts to hold a state, if none has succeeded.
    """

    iteration: int
    outcome: LastState
    newest_in_memory: int | None
    is_agreed: bool
    num_failed: int = 0

    @property
    def is_saved(self) -> bool:
        """True if the last state is where it should be."""
        return self.outcome is not LastState.UNSAVED

    @property
    def is_kept(self) -> bool:
        """True if the last state is known to be somewhere as a whole: on storage, or in the nodes' memory."""
        is_there = self.outcome in (LastState.SAVED, LastState.NOTHING_NEW)
        return is_there or self.newest_in_memory == self.iteration

    def may_lose_memory(self, *, is_complete: bool) -> bool:
        """Return whether nothing in memory is needed; `is_complete`: no --exit-* flag has ended training."""
        is_finished = self.outcome is LastState.NO_STORAGE and is_complete
        return self.is_agreed and (self.outcome is LastState.SAVED or is_finished)

    def loss_without_storage(self) -> str:
        """Return what to tell the user of iterations that the next start trains again, or nothing.

        Training has ended before its last iteration and without storage, and memory lacks its last state.
        """
        if self.outcome is not LastState.NO_STORAGE or self.newest_in_memory == self.iteration:
            return ""
        held = "no state of this start"
        if self.newest_in_memory is not None:
            held = f"the state of iteration {self.newest_in_memory}"
        return (
            f"training ends at iteration {self.iteration}, the memory of the nodes holds {held}, and there "
            "is no --moe-ft-persist-dir to keep more: the next start trains the iterations since then again."
        )

    def lack_of_protection(self, node_dir: Path) -> str:
        """Return what to tell the user of a run whose state was never held, or nothing."""
        if not self.num_failed or self.is_kept:
            return ""
        return (
            f"nothing has protected this run: all {self.num_failed} snapshots have failed, and no state of "
            f"it was ever held. {describe_room(node_dir)}."
        )

    def advice(self, persist_dir: str, memory_dir: str, job_id: str) -> str:
        """Return what to tell the user of a state that is not saved."""
        what = (
            f"the last state (iteration {self.iteration}) is not on storage "
            f"(--moe-ft-persist-dir={persist_dir})"
        )
        if self.newest_in_memory is None:
            return (
                f"{what}, and the memory of the nodes has no state of this start: the next start recovers "
                "the newest checkpoint on storage."
            )
        start = "Mend the storage and start" if self.is_agreed else "Start"
        held = f"it under {memory_dir}"
        if self.newest_in_memory != self.iteration:
            held = f"the state of iteration {self.newest_in_memory} or of a later one under {memory_dir}"
        return (
            f"{what}. The memory of the nodes still holds {held}. {start} the job again "
            f"on these nodes, before they are rebooted, with --moe-ft-job-id={job_id}: it recovers from "
            "memory and writes to storage what it ends with."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EndProgress:
    """Progress of the last state on its way to where it is kept, as all ranks have agreed."""

    turn: EndVote
    is_saved: bool
    has_failed: bool
    is_idle: bool


class LastSteps:
    """Steps of one rank that bring the last state to where it is kept. Owned by the training thread."""

    def __init__(
        self,
        iteration: int,
        capture: Callable[[], CapturedRecord],
        strategy: Strategy,
        decisions: Decisions,
        windows: Windows,
        storage: StorageSchedule,
        reports: EventQueue,
        votes: Callable[[EndVote], Votes],
        act_on: Callable[[Votes], bool | None],
        *,
        is_for_memory: bool,
    ) -> None:
        """Take the parts of the engine that act.

        Args:
            act_on: settles windows and storage by what all ranks voted; returns whether what was written is
                a checkpoint, None if that is not known yet.
        """
        self._iteration = iteration
        self._capture = capture
        self._is_for_memory = is_for_memory
        self._strategy = strategy
        self._decisions = decisions
        self._windows = windows
        self._storage = storage
        self._reports = reports
        self._votes = votes
        self._act_on = act_on

    def keep(self, tell: Callable[[], None], deadline_s: float, clock: Clock) -> bool:
        """Try as `keep_last_state` says; return whether the last state is where it is kept."""
        is_kept = keep_last_state(self._advance, self._begin_next, tell, deadline_s, clock)
        if not is_kept:
            where = "in memory" if self._is_for_memory else "on storage"
            reason = f"the last state is not {where}"
            if self._storage.is_unread(self._iteration):
                reason = "the last state is written, and was not read back by all ranks in time"
            self._reports.degraded(BackgroundPart.PERSIST, self._iteration, reason)
        return is_kept

    def _advance(self, turn: EndVote) -> EndProgress | None:
        window = self._windows.open
        if window is not None and window.is_growing:
            window.is_given_up = window.is_cut_off = True
        if self._is_for_memory and self._windows.is_passing_on:
            turn = min(turn, EndVote.WAIT)  # the peers of other ranks take it until all have ended
        self._decisions.begin(partial(self._votes, turn), self._iteration)
        decided = self._decisions.read(self._iteration)
        if decided is None:
            return None
        is_try = window is not None and window.is_last  # not one that training's end has cut off
        progress = partial(self._progress, decided[0], is_try=is_try)
        return self._decisions.attempt(self._iteration, progress)

    def _progress(self, votes: Votes, *, is_try: bool) -> EndProgress:
        is_confirmed = self._act_on(votes)
        is_in_memory = self._is_in_memory
        has_window_failed = is_try and votes.state is SnapshotState.FAILED
        is_on_storage = self._storage.is_at_end(self._iteration)
        return EndProgress(
            turn=votes.turn,
            is_saved=is_in_memory and votes.turn is not EndVote.WAIT
            if self._is_for_memory
            else is_on_storage,
            has_failed=is_confirmed is False or has_window_failed,
            is_idle=votes.is_idle
            and votes.state is not SnapshotState.RUNNING
            and (votes.is_ready or is_in_memory),
        )

    @property
    def _is_in_memory(self) -> bool:
        complete = self._windows.complete
        is_newest = complete is not None and complete.iteration == self._iteration
        return is_newest and self._strategy.is_whole(self._iteration)

    def _begin_next(self) -> None:
        if self._is_in_memory:
            assert self._windows.complete is not None
            with self._reports.catching(BackgroundPart.PERSIST, self._iteration):
                self._storage.submit(self._windows.complete, is_whole=True)
        else:
            begin = partial(self._windows.begin, self._iteration, self._capture, is_last=True)
            self._decisions.attempt(self._iteration, begin)


def keep_last_state(
    advance: Callable[[EndVote], EndProgress | None],
    begin_step: Callable[[], None],
    tell: Callable[[], None],
    deadline_s: float,
    clock: Clock,
) -> bool:
    """Try until the last state is kept, some tries have failed, or there is no time left.

    Called by all ranks, which leave it in the same round, with whether the last state is where it is kept.

    Args:
        advance: tells all ranks what this one wants and returns their progress, None if they cannot agree.
        begin_step: begins the next step: a snapshot, or writing it.
        deadline_s: for all tries together.
    """
    pauses_s, end_s = [*_PAUSES_S], clock.monotonic() + deadline_s
    next_s, poll_s = 0.0, _POLL_S
    turn = EndVote.TRY
    while (progress := advance(turn)) is not None:
        tell()
        if progress.is_saved or progress.turn is EndVote.GIVE_UP:
            return progress.is_saved
        if progress.has_failed:
            next_s = clock.monotonic() + pauses_s.pop(0) if pauses_s else inf
        elif progress.turn is EndVote.TRY and progress.is_idle:
            begin_step()
            poll_s = _POLL_S
        clock.sleep(poll_s)
        poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        now_s = clock.monotonic()
        turn = EndVote.WAIT if now_s < next_s else EndVote.TRY
        if now_s > end_s or next_s == inf:
            turn = EndVote.GIVE_UP
    return False
