"""The windows of snapshots of one rank: the one being taken, the one that all ranks have, their layouts.

The ranks decide together when a window begins and whether it is complete (engine/engine.py,
engine/decisions.py). Progress of one window on this rank is engine/snapshots/job.py, copying is
engine/snapshots/writer.py. A region is overwritten only when every rank has committed a newer window and has
sent it to the peers that take it, so there always is one that all ranks have.
"""

import sys
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache, partial

from moe_ft.config.fields import flag_of
from moe_ft.engine.background import BackgroundPart, EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.memory.layout import (
    Contents,
    FileLayout,
    LayOut,
    UnitPlace,
    lay_out,
    lay_out_window,
)
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.memory.region_stores import WindowStore
from moe_ft.engine.memory.regions import Region, describe_room
from moe_ft.engine.memory.restored import Handover, keep_restored
from moe_ft.engine.snapshots.index import RecordLog
from moe_ft.engine.snapshots.job import (
    Announce,
    OpenWindow,
    ReplicationResult,
    SnapshotJob,
    SnapshotRequest,
    SnapshotState,
    announce_to_nobody,
)
from moe_ft.engine.snapshots.writer import SnapshotWriter
from moe_ft.files.progress import waiting
from moe_ft.planning.sharding import assign_weighted_slices
from moe_ft.state.catalog import Slices, UnitCatalog
from moe_ft.state.record import CapturedRecord
from moe_ft.strategies.interface import SnapshotPlan, Strategy, WindowPlan
from moe_ft.units import Level, UnitId


class UnitLayouts:
    """Layouts of a rank's units in its regions and slots, for each plan of its strategy."""

    def __init__(self, catalog: UnitCatalog, dp_rank: int) -> None:
        self.catalog = catalog
        self._dp_rank = dp_rank
        self._places: dict[UnitId, UnitPlace] = {}
        self.region_bytes: int | None = None  # size of regions, once known

    def lay_out(self, plan: WindowPlan) -> FileLayout:
        """Return the layout of a region; raises SnapshotError if the plan needs more than its size."""
        return lay_out_window(
            (self._contents(snapshot) for snapshot in plan.snapshots), self.region_bytes
        )

    def _contents(self, plan: SnapshotPlan) -> Contents:
        slices = self._slices(plan)
        return [
            (unit, level, self.catalog.tensors(unit, level, slices))
            for unit, level in plan.levels.items()
            if level is not Level.NONE
        ]

    def _slices(self, plan: SnapshotPlan) -> Slices | None:
        """Return how the plan divides parameters that data-parallel ranks replicate."""
        if plan.shares is None:
            return None
        shared = [
            local
            for local in self.catalog.parameters
            if not local.is_sharded and not local.is_expert
        ]
        assigned = assign_weighted_slices([each.parameter.numel() for each in shared], plan.shares)
        own = assigned[self._dp_rank]
        return {local.name: slice_ for local, slice_ in zip(shared, own, strict=True)}

    def place(self, unit: UnitId, offset: int) -> UnitPlace:
        """Return the place in a slot of a unit that this rank saves at least a part of."""
        if unit not in self._places:
            layout = lay_out([(unit, Level.FULL, self.catalog.tensors(unit, Level.FULL))])
            (self._places[unit],) = layout.units
        return replace(self._places[unit], offset=offset)


FENCE_DEADLINE_S = 120.0


class Windows:
    """Windows of one rank. Owned by the training thread.

    Attributes:
        open: the window that is being taken, None if there is none.
        complete: the region with the newest one that all ranks have, None if none was taken since the start.
        num_failed: windows that some rank does not have, as long as no rank's state is held anywhere.
        complete_iteration: where that one ends, or what a recovery keeps, also where a peer alone has it.
        announce: called when this rank has committed the window whose last snapshot is begun next.
    """

    def __init__(
        self,
        memory: RankMemory,
        strategy: Strategy,
        layouts: UnitLayouts,
        writer: SnapshotWriter,
        records: RecordLog,
        reports: EventQueue,
    ) -> None:
        self._strategy = strategy
        self._make_layouts = layouts
        self._memory = memory
        self._writer = writer
        self._records = records
        self._reports = reports
        self._recorded = (0, -1)  # the first and last iteration of the complete window
        self._layouts: dict[Hashable, LayOut] = {}
        self._num_lasting = 0  # layouts that are never forgotten
        self.store = WindowStore(memory.regions, memory.pool)
        self.open: OpenWindow | None = None
        self.complete: Region | None = None
        self.complete_iteration: int | None = None
        self.announce: Announce = announce_to_nobody
        self.last_iteration = self.num_failed = 0
        self._passed_on: Future[ReplicationResult] | None = None

    def start(self, iteration: int, restored: Handover | None) -> list[Region]:
        """Begin with what was recovered, in memory that is open; lay out the first windows.

        Returns the regions that it rests on, which are kept until a window is complete.
        """
        self.store.find()
        kept: list[Region] = []
        if restored is not None:
            kept = keep_restored(self.store, restored)
            self.complete_iteration = restored.iteration
        self.last_iteration = iteration
        if restored is not None and restored.is_moved:  # no rank has its own state: one is due
            self.last_iteration = -sys.maxsize
        for plan in self._strategy.possible_windows():
            self._layout(plan)()  # now, because it would hold up an iteration
        self._num_lasting = len(self._layouts)
        for unit in self._strategy.rotation.units:
            self._make_layouts.place(unit, 0)
        return kept

    @property
    def state(self) -> SnapshotState:
        """Progress of the window under way on this rank."""
        return SnapshotState.NONE if self.open is None else self.open.state

    @property
    def is_passing_on(self) -> bool:
        """True while the complete window is on its way to the second half of this rank's peers."""
        return self._passed_on is not None and not self._passed_on.done()

    @property
    def last_job(self) -> SnapshotJob | None:
        """The last snapshot of the window under way."""
        return None if self.open is None else self.open.last

    def wait_for_copy(self, clock: Clock) -> None:
        """Wait until nothing reads weights and moments any longer; a copy that takes too long is given up."""
        job = self.last_job
        if job is None or job.copied.is_set() or job.abandoned.is_set():
            return
        with waiting(FENCE_DEADLINE_S):
            if not clock.wait(job.copied, FENCE_DEADLINE_S):
                job.abandoned.set()

    @property
    def has_room(self) -> bool:
        """True if there will be memory for another window."""
        job = self.last_job
        upcoming = [] if job is None else [str(place.unit) for place in job.request.slots]
        retained = {} if job is None else job.request.at_peers or {}
        return self.store.has_room(self._strategy.most_rotating, upcoming, retained)

    def settle(self, state: SnapshotState, *, is_protected: bool) -> OpenWindow | None:
        """Act on the progress of all ranks together; return the window if all of them have it.

        Args:
            is_protected: whether all peers of all ranks have what they were to get of it.
        """
        window = self.open
        if window is None or state is SnapshotState.RUNNING:
            return None
        self.open, last = None, window.last
        if state is SnapshotState.FAILED:
            if last is not None and window.state is not SnapshotState.FAILED:
                part = BackgroundPart.SNAPSHOT
                self._reports.degraded(part, last.iteration, "another rank has none")
            self._records.trim(*self._recorded)
            self.store.give_up(window.region)
            if self.complete_iteration is None and not window.is_cut_off:
                self._note_unprotected()
            return None
        assert last is not None  # no rank calls a window without snapshots complete
        self.complete = window.region
        self.complete_iteration = last.iteration
        result, before = last.result.result(), last.request.at_peers
        if result.pass_on is not None:
            self._passed_on = result.pass_on()
        is_sent = is_protected and last.request.is_sent_to_peers
        at_peers = result.at_peers if is_sent else before
        self.store.complete(window.region, result.pooled, before or {}, at_peers)
        self._recorded = window.jobs[0].iteration, last.iteration
        self._records.trim(*self._recorded)
        return window

    def _note_unprotected(self) -> None:
        """Report on each node that no window of the run was ever complete."""
        self.num_failed += 1
        if self._memory.is_lowest_on_node:
            reason = (
                f"nothing protects this run: {self.num_failed} of {self.num_failed} snapshots have failed. "
                f"{describe_room(self._memory.node_dir)}. With {flag_of('on_error')} raise such a run ends"
            )
            self._reports.degraded(BackgroundPart.PROTECTION, self.last_iteration, reason)

    def begin(
        self,
        iteration: int,
        capture: Callable[[], CapturedRecord],
        *,
        is_whole: bool = False,
        is_last: bool = False,
    ) -> None:
        """Begin a window. Called by all ranks, which have agreed that there is room."""
        region = self.store.take_region()
        plan = self._strategy.plan_window(iteration, is_whole=is_whole or is_last)
        self._strategy.note_begun(plan)
        layout = self._layout(plan)
        self.open = OpenWindow(plan=plan, layout=layout, region=region, is_last=is_last)
        self._take(self.open, iteration, capture)

    def grow(
        self, iteration: int, capture: Callable[[], CapturedRecord], *, can_grow: bool
    ) -> None:
        """Take the next snapshot of the window, or give the window up: a replay needs every iteration.

        Called by all ranks, which know whether a snapshot of the window has failed on any of them.
        """
        window = self.open
        assert window is not None
        if can_grow and iteration == self.last_iteration + 1:
            self._take(window, iteration, capture)
            return
        window.is_given_up = True
        if can_grow:
            reason = f"iteration {iteration} does not follow {self.last_iteration}"
            self._reports.degraded(
                BackgroundPart.SNAPSHOT, iteration, f"{reason}: the window begins again"
            )

    def _take(
        self, window: OpenWindow, iteration: int, capture: Callable[[], CapturedRecord]
    ) -> None:
        self.last_iteration = iteration  # also where it fails: all ranks count the same
        with self._reports.catching(BackgroundPart.SNAPSHOT, iteration, window.break_off):
            request = self._prepare(window, iteration, capture)
            window.jobs.append(self._writer.submit(request))

    def _prepare(
        self, window: OpenWindow, iteration: int, capture: Callable[[], CapturedRecord]
    ) -> SnapshotRequest:
        plan = window.plan.snapshots[len(window.jobs)]
        is_end = plan is window.plan.snapshots[-1] and not window.is_last
        slots = self.store.take_slots(len(plan.rotating))
        names = {str(unit) for unit in plan.rotating}
        self._records.append(iteration, capture())
        return SnapshotRequest(
            region=window.region,
            window=window.layout,
            position=len(window.jobs),
            iteration=iteration,
            keep_iteration=self.complete_iteration,
            plan=plan,
            slots=[
                self._make_layouts.place(unit, offset)
                for unit, offset in zip(plan.rotating, slots, strict=True)
            ],
            carried=self.store.carried(names),
            at_peers=None if plan.remote is None else self.store.at_peers,
            is_sent_to_peers=not window.is_last or self._strategy.rotation.is_empty,
            announce=self.announce if is_end else announce_to_nobody,
        )

    def _layout(self, plan: WindowPlan) -> LayOut:
        """Return the layout of a window; the copy worker makes the ones that are not known yet."""
        if plan.key not in self._layouts:
            others = list(self._layouts)[self._num_lasting :]
            for key in others if self._num_lasting else ():
                del self._layouts[key]  # its order of units is no longer used
            self._layouts[plan.key] = cache(partial(self._make_layouts.lay_out, plan))
        return self._layouts[plan.key]
