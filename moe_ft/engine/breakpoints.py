"""Breakpoint of one rank: its whole live state, written when the job is ending.

The memory is reserved and touched before training. The training thread says, under a lock, which iteration
the live state is of, and when it is torn: from the first inner optimizer step until the last copy into the
rank's own slices. Whoever writes waits until it is whole, and then holds it: the next optimizer step does not
begin before the process ends. When to write is moe_ft/loop/leaving.py.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moe_ft.engine.background import describe
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import RecordLog, SnapshotIndexer
from moe_ft.engine.snapshots.job import SnapshotRequest
from moe_ft.format.encoding import encode
from moe_ft.planning.experts import Counts
from moe_ft.state.record import CapturedRecord
from moe_ft.store.extents import Extent, Reason, SizeClass, Store
from moe_ft.strategies.interface import PlanBreakpoint

NOTHING_YET = "no iteration has ended since the start"
TORN = "the optimizer step did not end in time: weights and moments are a mixture of two iterations"
IN_USE = "what was recovered rests on the breakpoint before, until all ranks have a new window"
CLOSED = "checkpointing has ended"
_PATIENCE_S = 5.0  # for an optimizer step
_STATE = Extent(SizeClass.STATE, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """State that is live until the next optimizer step.

    Attributes:
        tokens: returns those of its iteration that the plan lacks; raises SnapshotError if nobody knows them.
        ready: event on the device after which it may be read; None if it may be at once.
    """

    record: CapturedRecord
    plan: PlanBreakpoint
    tokens: Callable[[], Counts | None]
    ready: Any = None

    @property
    def iteration(self) -> int:
        """The iteration of the state."""
        return self.record.facts.iteration


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakpointResult:
    """Outcome of an attempt to write a breakpoint.

    Attributes:
        iteration: of the state; None if there is no breakpoint.
        stepping_to: iteration of the state when the step that is under way ends; None if there is none, or if
            there will be no breakpoint then.
    """

    iteration: int | None = None
    problem: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    stepping_to: int | None = None


class Breakpoints:
    """The breakpoint of one rank.

    The training thread calls all methods; any other thread may call `write` and `wait_for_iteration`.
    """

    def __init__(
        self,
        region: Region,
        layout: FileLayout,
        copier: StateCopier,
        indexer: SnapshotIndexer,
        records: RecordLog,
        kept_iteration: Callable[[], int | None],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Take parts; nothing is reserved yet. `kept_iteration` returns the newest that all ranks have."""
        self._region = region
        self._patience_s = patience_s
        self._layout = layout
        self._copier = copier
        self._indexer = indexer
        self._records = records
        self._kept_iteration = kept_iteration
        self._state = threading.Condition()  # guards everything below
        self._moment: Moment | None = None
        self._problem = NOTHING_YET  # why there is no moment
        self._store = Store({SizeClass.STATE: 1}, lambda home: region.invalidate())
        self._is_updating = self._is_held = self._is_over = False
        self._is_broken = False
        self._hold_at: int | None = None  # an iteration that somebody waits for
        self._writing = threading.Lock()

    def start(self, *, is_in_use: bool) -> None:
        """Allocate what a copy needs; the recovery of this start may rest on the breakpoint before."""
        self._copier.start()
        self._store.commit(_STATE)
        self._store.keep(Reason.BREAKPOINT, [_STATE] if is_in_use else [])

    @property
    def is_in_use(self) -> bool:
        """True if the recovery of this start rests on the breakpoint before."""
        return self._store.is_kept(_STATE)

    def release(self) -> None:
        """Allow the breakpoint before to be overwritten: all ranks have a newer window."""
        with self._state:
            self._store.keep(Reason.BREAKPOINT, [])

    def mark_ready(self) -> Any:
        """Return the event after which the live state may be read, None if it may be at once."""
        return self._copier.mark_ready()

    def begin_update(self) -> None:
        """Note that weights are about to change. Waits while somebody holds them, perhaps for ever."""
        with self._state:
            self._state.wait_for(lambda: not self._is_held)
            self._is_updating = True

    def end_update(self, moment: Moment | None, problem: str = "") -> None:
        """Note that all state is of the next iteration; the moment is None as long as its record is."""
        with self._state:
            self._is_updating = False
            self._set(moment, problem)

    def note(self, moment: Moment | None, problem: str = "") -> None:
        """Replace what is known of the live state; see `end_update`. Waits while somebody holds it."""
        with self._state:
            self._state.wait_for(lambda: not self._is_held)
            self._set(moment, problem)  # perhaps of an iteration whose step was skipped

    def _set(self, moment: Moment | None, problem: str) -> None:
        self._moment = moment
        self._problem = problem
        if self._hold_at is not None:
            self._is_held = self._has_reached(self._hold_at)
        self._state.notify_all()

    def count_tokens(self, plan: PlanBreakpoint) -> None:
        """Replace the plan of the live state by one that knows the tokens of its iteration."""
        with self._state:
            self._state.wait_for(lambda: not self._is_held)
            if self._moment is not None:
                self._moment = replace(self._moment, plan=plan, tokens=lambda: None)

    def refuse(self, problem: str) -> None:
        """Write no breakpoint from now on, because of this problem."""
        with self._state:
            if not self._is_over:
                self._moment = None
                self._problem = problem
                self._is_over = True

    def refuse_later_than(self, iteration: int, problem: str) -> None:
        """Write no breakpoint if the live state is of a later iteration, because of this problem."""
        with self._state:
            if self._moment is not None and self._moment.iteration > iteration:
                self.refuse(problem)

    def break_off(self) -> None:
        """Note that the training thread has failed: an optimizer step that has begun will not end."""
        with self._state:
            self._is_broken = True
            self._state.notify_all()

    def wait_for_iteration(self, iteration: int, timeout_s: float) -> bool:
        """Let training continue until its state is of an iteration, and hold it then. Any thread.

        Returns False if it has not come so far in some seconds; it continues then.
        """
        with self._state:
            self._is_held = self._has_reached(iteration)
            self._hold_at = iteration
            self._state.notify_all()
            has_reached = self._state.wait_for(lambda: self._is_held, timeout_s)
            self._hold_at = None
            return has_reached

    def _has_reached(self, iteration: int) -> bool:
        moment = None if self._is_updating else self._moment
        return moment is not None and moment.iteration >= iteration

    def write(self, *, waits: bool = True) -> BreakpointResult:
        """Write the live state, once it is whole, and hold it. Any thread; others wait for the first.

        If a step is under way that does not end in time, the state is held when it has ended.

        Args:
            waits: whether to wait for a step that is under way, for a while.
        """
        with self._writing:
            with self._state:
                moment, problem = self._hold(self._patience_s if waits else 0.0)
                stepping_to = self._next_iteration if problem == TORN else None
                self._hold_at = stepping_to  # others are told of it: this rank must not pass it
            if moment is None:
                return BreakpointResult(problem=problem, stepping_to=stepping_to)
            try:
                return self._write(moment)
            except Exception as error:  # whatever it is, the rank leaves without a breakpoint
                return BreakpointResult(problem=describe(error))

    @property
    def _next_iteration(self) -> int | None:
        moment = None if self._is_broken or self.is_in_use else self._moment
        return None if moment is None else moment.iteration + 1

    def _hold(self, patience_s: float) -> tuple[Moment | None, str]:
        self._state.wait_for(lambda: not self._is_updating or self._is_broken, patience_s)
        if self._is_updating:
            return None, TORN
        if self.is_in_use:
            return None, IN_USE
        if self._moment is None:
            return None, self._problem
        self._is_held = True
        return self._moment, ""

    def _write(self, moment: Moment) -> BreakpointResult:
        start_s = time.perf_counter()
        iteration, region = moment.iteration, self._region
        request = SnapshotRequest(
            region=region,
            window=lambda: self._layout,
            iteration=iteration,
            keep_iteration=self._kept_iteration(),
            plan=moment.plan(moment.tokens),
        )
        with self._state:
            self._store.give_up(self._store.filling)  # of an attempt that has failed
            self._store.take(SizeClass.STATE)
        region.begin(self._layout.header)
        # Values are moved and added to the record: a second attempt needs it as it was captured.
        values = moment.record.values
        values = {**values, "optimizers": [dict(each) for each in values["optimizers"]]}
        self._records.append(iteration, replace(moment.record, values=values))
        absent = self._copier.copy(
            request, moment.ready, _nothing, lambda: self._records.complete(iteration)
        )
        index = self._indexer.describe(request, absent, None)
        region.commit(encode(index), iteration)
        with self._state:
            self._store.commit(_STATE)
        return BreakpointResult(
            iteration=iteration,
            num_bytes=request.num_bytes,
            seconds=time.perf_counter() - start_s,
        )

    def close(self) -> None:
        """Write nothing from now on; waits for a writer. The region stays."""
        self.refuse(CLOSED)
        with self._writing:
            pass


def _nothing() -> None:  # the simulation puts an event here
    pass
