"""The checkpoint engine: at which seam which snapshot starts, completes, goes to storage.

It does not know which strategy it runs. The training thread calls the methods at the seams of the loop;
copying is engine/snapshot.py, sending engine/peers.py, writing engine/persist.py.

Whether a window of snapshots begins, is complete or goes to storage is decided by all ranks together
(engine/agreement.py): a region is overwritten only when every rank has a newer window committed, and has
sent it to the peers that take it, so there always is one that all ranks have.
"""

import time
from collections.abc import Callable, Hashable
from functools import partial

import torch

from moe_ft.engine.agreement import Agreement
from moe_ft.engine.background import Report
from moe_ft.engine.context import EngineContext, EngineSettings, Layouts, RestoredState
from moe_ft.engine.layout import LazyLayout
from moe_ft.engine.messages import Messages
from moe_ft.engine.open_window import OpenWindow
from moe_ft.engine.peers import PeerReplicator, Replica
from moe_ft.engine.persist import PersistClient, WriterSupervisor, persist_deadline_s
from moe_ft.engine.pool import PoolVersions
from moe_ft.engine.profile import IntervalTuner, SnapshotProfile
from moe_ft.engine.regions import Region, Role
from moe_ft.engine.restored_memory import keep_restored, replica_to_send
from moe_ft.engine.snapshot import SnapshotWriter
from moe_ft.engine.snapshot_job import SnapshotJob, SnapshotState
from moe_ft.engine.storage_schedule import StorageSchedule
from moe_ft.formats import Index, decode
from moe_ft.planning.strategies import Strategy, WindowPlan
from moe_ft.state.record import CapturedRecord

FENCE_DEADLINE_S = 120.0
_CLOSE_DEADLINE_S = 5.0
_MOST_FAILURES_AT_END = 3
_POLL_S = 0.01


class CheckpointEngine:
    """Takes snapshots of one rank. Owned by the training thread."""

    def __init__(
        self,
        settings: EngineSettings,
        context: EngineContext,
        strategy: Strategy,
        agreement: Agreement,
        layouts: Layouts,
        complete_record: Callable[[CapturedRecord], None],
    ) -> None:
        self._settings, self._context, self._strategy = settings, context, strategy
        self._agreement, self._make_layouts = agreement, layouts
        self._layouts: dict[Hashable, LazyLayout] = {}
        self._num_lasting = 0  # layouts that are never forgotten
        self._versions = PoolVersions(context.memory.pool)
        ranks = context.topology.ranks
        same_stage = [each for each in ranks if each.stage == ranks[context.rank].stage]
        self._messages = Messages(
            context.rank,
            is_first_of_stage=same_stage[0].rank == context.rank,
            raises=settings.raises,
        )
        self._reports = self._messages.reports
        self._memory, self._regions = context.memory, context.memory.regions
        self._window: OpenWindow | None = None
        self._complete: Region | None = None
        self._complete_iteration: int | None = None  # known also where a peer alone has it
        self._has_removed_left_overs = False
        self._retained: list[Region] = []  # what was recovered rests on them
        self._restored_replica: Replica | None = None
        self._forward_start_s: float | None = None
        self._profile = SnapshotProfile()
        self._start_iteration = self._last_snapshot_iteration = 0
        self._is_start_safe = True  # fresh, or on storage as a whole
        self._has_tried_last = False
        self._stall_s = 0.0
        self._tuner = IntervalTuner(settings.overhead_limit) if settings.interval is None else None
        self._replicator = (
            PeerReplicator(context.peers, context.token, self._reports, context.phase_hook)
            if context.peers
            else None
        )
        self._writer = SnapshotWriter(
            context.parameters,
            context.identity,
            context.rank,
            context.topology.ranks[context.rank].node,
            self._reports,
            self._replicator,
            context.phase_hook,
            complete_record,
            context.memory.pool,
            context.origins,
            settings.staging_bytes,
        )
        persist_dir = context.memory.node_dir / "persist"
        self._storage = StorageSchedule(
            settings.persist_interval,
            PersistClient(persist_dir, context.rank, self._reports, context.phase_hook),
            self._versions,
            strategy,
            context.identity,
            context.rank,
        )
        self._supervisor = (
            WriterSupervisor(persist_dir, context.writer_command, self._reports)
            if context.writer_command
            else None
        )

    def start(self, iteration: int, restored: RestoredState | None) -> None:
        """Open memory, accept replicas and start the threads and the writer.

        Args:
            iteration: the state's.
            restored: what was recovered, None after a fresh start: every region may then be overwritten.

        Raises:
            OSError: if the memory directory cannot be made or has no room.
        """
        context = self._context
        self._memory.open((context.identity.lineage, iteration) if restored else None)
        if self._is_on_gpu:
            self._memory.pin()
        if restored is not None:
            self._retained = keep_restored(self._memory, restored)
            self._versions.retain(
                decode(region.index_path.read_bytes(), Index, str(region.index_path))
                for region in self._retained
            )
            self._versions.adopt(restored.rotating)
        self._start_iteration = self._last_snapshot_iteration = iteration
        self._is_start_safe = restored is None or restored.is_on_storage
        self._complete_iteration = iteration if restored else None
        for plan in self._strategy.possible_windows():
            self._layout(plan).get()  # not to be made in an iteration: it takes a while
        self._num_lasting = len(self._layouts)
        for unit in self._strategy.rotating:
            self._make_layouts.place(unit, 0)
        context.server.keep(self._memory.replicas)
        self._writer.start()
        if restored is not None and restored.peers_without:
            self._restored_replica = replica_to_send(self._retained, restored)
            if self._restored_replica is None:
                reason = (
                    "what was recovered does not fit this start's regions; peers get the next state"
                )
                self._reports.add("skipped", iteration, part="replicate", reason=reason)
        self._storage.start(restored.persisted_index if restored else "")
        if self._supervisor is not None:
            self._supervisor.start()

    def protect(self) -> None:
        """Bring what was recovered to peers that lack it; all ranks have started, and accept replicas."""
        if self._restored_replica is not None:
            self._writer.send(self._restored_replica)
            self._restored_replica = None

    def before_step(self, tokens_per_expert: torch.Tensor | None = None) -> None:
        """The fence: wait until nothing reads weights and moments any more.

        Called by all ranks before the optimizer step of every iteration.

        Args:
            tokens_per_expert: ``[layer, expert]`` counted on this rank in this iteration.
        """
        if self._forward_start_s is not None:
            self._profile.note_forward_backward(time.perf_counter() - self._forward_start_s)
            self._forward_start_s = None
        stage_load = self._context.stage_load
        if stage_load is not None and tokens_per_expert is not None:
            stage_load.begin(tokens_per_expert)
        job = None if self._window is None else self._window.last
        if job is not None and not job.copied.is_set() and not job.is_abandoned:
            start = time.perf_counter()
            if not job.copied.wait(FENCE_DEADLINE_S):
                job.is_abandoned = True  # it may hold a mixture of two iterations: never committed
            self._stall_s += time.perf_counter() - start
        self._begin_agreement()

    def _begin_agreement(self, *, goes_on: bool = True) -> None:
        window = self._window
        slots = () if window is None else window.last.slots
        upcoming = [str(place.unit) for place in slots]
        has_room = self._versions.has_room(self._strategy.most_rotating, upcoming)
        is_ready = has_room and self._free_region() is not None
        values = [
            int(SnapshotState.NONE if window is None else window.state),
            int(is_ready),
            int(self._storage.is_idle),
            int(not self._storage.has_failed),
            int(window is None or window.is_protected),
            int(goes_on),
            int(window is None or not window.has_failed),
        ]
        values += self._strategy.values(self._profile.copied_bytes, self._profile.flow_bytes)
        if self._tuner is not None:
            values += self._tuner.values()
        self._agreement.begin(values)

    def _free_region(self) -> Region | None:
        """Return a region that the next window may fill, None if all are needed.

        A window that all ranks have completed makes those before it free; until that is known, either it or
        they will be.
        """
        window = self._window
        reserved = [*self._retained, self._complete] if window is None else [window.region]
        free = [
            region
            for region in self._regions
            if region.role is not Role.PERSIST and region not in reserved
        ]
        return free[0] if free else None

    def end_iteration(
        self, iteration: int, iteration_s: float, capture: Callable[[], CapturedRecord]
    ) -> float:
        """The optimizer has stepped: read what was agreed, then start what is due.

        Args:
            iteration: the state's now.
            iteration_s: how long the iteration took.
            capture: takes the record of the state; called at once if a snapshot starts.

        Returns:
            The seconds for which training stood still at the fence in this iteration.

        Raises:
            DegradedError: with --moe-ft-on-error=raise, if a background part has failed.
        """
        if not self._agreement.is_under_way:  # a skipped step has no fence
            self.before_step()
        state, is_ready, are_idle, can_persist, is_protected, _, can_grow, *measured = (
            self._agreement.result()
        )
        stage_load = self._context.stage_load
        if stage_load is not None and stage_load.is_under_way:
            self._strategy.add_tokens(stage_load.result())
        self._profile.note_iteration(iteration_s - self._stall_s)
        is_busy = self._window is not None or self._storage.is_busy
        self._settle(SnapshotState(state), is_protected=bool(is_protected))
        self._poll_storage(are_idle=bool(are_idle), can_persist=bool(can_persist))
        self._tune(iteration, iteration_s, measured, is_busy=is_busy)
        if self._storage.is_due and are_idle and self._complete is not None:
            self._storage.submit(self._complete)
        if self._window is not None and self._window.is_growing:
            self._grow(self._window, iteration, capture, can_grow=bool(can_grow))
        elif self._is_due(iteration):
            if state == SnapshotState.RUNNING or not is_ready:
                reason = "the last one is not complete" if is_ready else "all regions are in use"
                self._reports.add("skipped", iteration, part="snapshot", reason=reason)
            else:
                self._begin_window(iteration)
                self._take(iteration, capture)
        stall_s, self._stall_s = self._stall_s, 0.0
        self._forward_start_s = time.perf_counter()
        return stall_s

    def _grow(
        self,
        window: OpenWindow,
        iteration: int,
        capture: Callable[[], CapturedRecord],
        *,
        can_grow: bool,
    ) -> None:
        """Take the next snapshot of the window, or give it up: a replay needs those of all iterations."""
        if can_grow and iteration == self._last_snapshot_iteration + 1:
            self._take(iteration, capture)
            return
        window.is_given_up = True
        if can_grow:
            reason = f"iteration {iteration} does not follow {self._last_snapshot_iteration}"
            self._reports.degraded("snapshot", iteration, f"{reason}: the window begins again")

    def _tune(
        self, iteration: int, iteration_s: float, measured: list[int], *, is_busy: bool
    ) -> None:
        """Adapt to what the slowest rank measured: the strategy, and the interval if it is automatic."""
        count = len(measured) - (self._tuner.num_values if self._tuner is not None else 0)
        changes = self._strategy.agree(measured[:count])
        if changes:
            self._reports.add("strategy", iteration, **changes)
        if self._tuner is None:
            return
        self._tuner.end_iteration(iteration_s, is_busy=is_busy)
        if (cost := self._tuner.agree(measured[count:])) is not None:
            self._reports.add(
                "interval",
                iteration,
                interval=self._tuner.interval,
                iteration_s=cost.iteration_s,
                overhead_s=cost.overhead_s,
                completion_s=cost.completion_s,
            )

    def _is_due(self, iteration: int) -> bool:
        interval = self._settings.interval if self._tuner is None else self._tuner.interval
        return bool(interval) and iteration - self._last_snapshot_iteration >= (interval or 0)

    def _settle(self, state: SnapshotState, *, is_protected: bool) -> None:
        """Act on what all ranks together say of the window, and whether all peers have it."""
        window = self._window
        if window is None or state is SnapshotState.RUNNING:
            return
        self._window, last = None, window.last
        if state is SnapshotState.FAILED:
            if window.state is not SnapshotState.FAILED:
                self._reports.degraded("snapshot", last.iteration, "another rank has none")
            window.region.advance(Role.FREE)
            return
        before, self._complete = self._complete, window.region
        self._complete_iteration = last.iteration
        window.region.advance(Role.RECOVERY)
        for region in (*self._retained, *([before] if before is not None else [])):
            if region.role is Role.RECOVERY:
                region.advance(Role.FREE)
        self._retained = []
        self._versions.settle(window.region.index_path, last.pooled)
        self._strategy.note_complete(last.iteration)
        for job in window.jobs:
            self._profile.note(job.num_bytes, job.copy_s, job.commit_s, job.replicate_s)
        if facts := window.facts():
            self._messages.tell_window(last.iteration, facts, self._profile)
        if is_protected and not self._has_removed_left_overs:
            self._has_removed_left_overs = True
            self._memory.remove_left_overs()
        self._storage.note_complete()
        if self._tuner is not None and not self._storage.is_due:
            self._tuner.end_checkpoint(last.complete_s)

    def _begin_window(self, iteration: int, *, is_last: bool = False) -> None:
        region = self._free_region()
        assert region is not None  # is_ready was agreed
        region.advance(Role.SNAPSHOT)
        plan = self._strategy.plan_window(iteration, is_last=is_last)
        self._window = OpenWindow(plan=plan, layout=self._layout(plan), region=region)

    def _take(
        self, iteration: int, capture: Callable[[], CapturedRecord], *, is_last: bool = False
    ) -> None:
        """Take the next snapshot of the window."""
        window = self._window
        assert window is not None
        plan = window.plan.snapshots[len(window.jobs)]
        slots = self._versions.find_free(len(plan.rotating))
        if not window.jobs:
            self._versions.outdate(window.region, self._regions, slots)
        names = {str(unit) for unit in plan.rotating}
        job = SnapshotJob(
            region=window.region,
            window=window.layout,
            position=len(window.jobs),
            iteration=iteration,
            record=capture(),
            keep_iteration=self._complete_iteration,
            plan=plan,
            slots=[
                self._make_layouts.place(unit, self._versions.offset_of(slot))
                for unit, slot in zip(plan.rotating, slots, strict=True)
            ],
            carried=self._versions.carried(names),
            is_sent_to_peers=not is_last or self._strategy.saves_all,
        )
        window.jobs.append(job)
        self._last_snapshot_iteration = iteration
        self._writer.submit(job)

    def _layout(self, plan: WindowPlan) -> LazyLayout:
        """Return the layout of a window; the copy thread makes those that are not known yet."""
        if plan.key not in self._layouts:
            others = list(self._layouts)[self._num_lasting :]
            for key in others if self._num_lasting else ():
                del self._layouts[key]  # of an order of units that is no more
            make = partial(self._make_layouts.lay_out, plan)
            self._layouts[plan.key] = LazyLayout(make)
        return self._layouts[plan.key]

    def _poll_storage(self, *, are_idle: bool, can_persist: bool) -> None:
        self._storage.confirm(are_idle=are_idle, can_persist=can_persist)
        is_done = self._storage.poll(self._complete, can_go_on=can_persist)
        if is_done and self._tuner is not None:
            self._tuner.end_checkpoint(self._storage.seconds_per_snapshot)

    @property
    def _is_on_gpu(self) -> bool:
        return any(each.parameter.is_cuda for each in self._context.parameters)

    def drain(self, log: Callable[[Report], None]) -> None:
        """Hand over the events since the last call; see `Messages.drain`."""
        self._messages.drain(log)

    def finish(self, iteration: int, capture: Callable[[], CapturedRecord]) -> None:
        """Training has ended: bring the last state to storage, if there is one, within a deadline.

        Called by all ranks.
        """
        has_nothing_new = iteration == self._start_iteration and self._is_start_safe
        if not self._settings.persist_interval or has_nothing_new:
            return
        deadline = time.monotonic() + persist_deadline_s(self._memory.num_own_bytes)
        num_failed = 0
        while True:
            if self._window is not None:
                self._window.is_given_up |= self._window.is_growing
                self._window.last.copied.wait(FENCE_DEADLINE_S)
            self._begin_agreement(goes_on=time.monotonic() < deadline)
            state, is_ready, are_idle, can_persist, is_protected, goes_on, *_ = (
                self._agreement.result()
            )
            self._settle(SnapshotState(state), is_protected=bool(is_protected))
            self._poll_storage(are_idle=bool(are_idle), can_persist=bool(can_persist))
            num_failed += state == SnapshotState.FAILED
            if not goes_on or num_failed == _MOST_FAILURES_AT_END:
                self._reports.degraded("persist", iteration, "the last state is not on storage")
                return
            if (
                state != SnapshotState.RUNNING
                and are_idle
                and not self._bring_last(iteration, capture, is_ready=bool(is_ready))
            ):
                return
            time.sleep(_POLL_S)

    def _bring_last(
        self, iteration: int, capture: Callable[[], CapturedRecord], *, is_ready: bool
    ) -> bool:
        """Take the next step on the last state's way to storage; return False if there is none."""
        newest = None if self._complete is None else self._complete.iteration
        is_whole = newest == iteration and self._strategy.is_whole(iteration)
        if is_whole and not self._storage.is_at_end(iteration):
            assert self._complete is not None
            self._storage.submit(self._complete, is_last=True)
            return True
        has_failed = newest != iteration and self._has_tried_last
        if not is_whole and not has_failed and is_ready:
            self._has_tried_last = True
            self._begin_window(iteration, is_last=True)
            self._take(iteration, capture, is_last=True)
            return True
        return False

    def close(self) -> None:
        """End threads, connections and the writer process. The memory stays."""
        self._writer.close(_CLOSE_DEADLINE_S)
        if self._replicator is not None:
            self._replicator.close()
        if self._supervisor is not None:
            self._supervisor.close()
        self._context.server.close()
        if self._is_on_gpu:
            self._memory.unpin()
        self._memory.close()

    def remove_memory(self) -> None:
        """Remove this rank's memory; the run has ended cleanly."""
        self._memory.remove()
