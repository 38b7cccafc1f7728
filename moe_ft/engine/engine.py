"""The checkpoint engine: at which seam which snapshot starts, completes, goes to storage.

It does not know which strategy it runs. The training thread calls the methods at the seams of the loop;
copying is engine/snapshot.py, sending engine/peers.py, writing engine/persist.py.

Whether a snapshot is taken, is complete or goes to storage is decided by all ranks together
(engine/agreement.py): a region is overwritten only when every rank has a newer snapshot committed, and has
sent it to the peers that take it, so there always is one that all ranks have.
"""

import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import PhaseHook, Report, Reports
from moe_ft.engine.layout import FileLayout, UnitPlace
from moe_ft.engine.memory import RankMemory
from moe_ft.engine.peer_server import PeerServer
from moe_ft.engine.peers import PeerReplicator
from moe_ft.engine.persist import PersistClient, WriterSupervisor, persist_deadline_s
from moe_ft.engine.pool import PoolVersions, RestoredVersion
from moe_ft.engine.profile import IntervalTuner, SnapshotProfile
from moe_ft.engine.regions import Region, Role
from moe_ft.engine.snapshot import SnapshotJob, SnapshotState, SnapshotWriter
from moe_ft.engine.storage_schedule import StorageSchedule
from moe_ft.errors import DegradedError
from moe_ft.formats import Identity, Index, decode
from moe_ft.planning.strategies import SnapshotPlan, Strategy
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.record import CapturedRecord
from moe_ft.topology import RankInfo, Topology
from moe_ft.units import UnitId

FENCE_DEADLINE_S = 120.0
_CLOSE_DEADLINE_S = 5.0
_MOST_FAILURES_AT_END = 3
_POLL_S = 0.01
_PRINT_INTERVAL_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What the flags say.

    Attributes:
        interval: iterations between snapshots, None for automatic.
        persist_interval: complete snapshots between those that go to storage, 0 for never.
        raises: end training when a background part fails.
    """

    interval: int | None
    overhead_limit: float
    persist_interval: int
    raises: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineContext:
    """What the engine is given about its rank and job.

    Attributes:
        memory: this rank's share of the node's, opened or not.
        origins: checksums, by unit name, of the rotating units' weights in the run's first state.
        stage_load: adds up what the ranks of the stage count; None where nothing is counted.
        peers: ranks that keep this rank's replicas.
        server: listens already.
        token: what peers' requests must carry.
        writer_command: starts the node's writer process; None on all but the lowest rank of a node
            and without storage.
    """

    rank: int
    topology: Topology
    identity: Identity
    parameters: Sequence[LocalParameter]
    memory: RankMemory
    origins: Mapping[str, str]
    stage_load: StageSum | None
    peers: tuple[RankInfo, ...]
    server: PeerServer
    token: str
    writer_command: list[str] | None
    phase_hook: PhaseHook


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoredState:
    """What a recovery put back on this rank.

    Attributes:
        indexes: of the regions that it was read from.
        rotating: the versions that rotating units have now, by name.
        persisted_index: this rank's index in the newest complete checkpoint on storage, relative to the
            persist directory; empty if there is none.
    """

    indexes: frozenset[Path]
    rotating: Mapping[str, RestoredVersion]
    persisted_index: str


class Layouts(Protocol):
    """Knows how units lie in files."""

    def lay_out(self, plan: SnapshotPlan) -> FileLayout:
        """Return the layout of a region."""
        ...

    def place(self, unit: UnitId, offset: int) -> UnitPlace:
        """Return how a rotating unit lies in a slot."""
        ...


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
        self._layouts: dict[Hashable, FileLayout] = {}
        self._versions = PoolVersions(context.memory.pool)
        self._reports = Reports()
        self._memory, self._regions = context.memory, context.memory.regions
        self._job: SnapshotJob | None = None
        self._complete: Region | None = None
        self._complete_iteration: int | None = None  # known also where a peer alone has it
        self._has_removed_left_overs = False
        self._retained: list[Region] = []  # what was recovered rests on them
        self._forward_start_s: float | None = None
        self._profile = SnapshotProfile()
        self._start_iteration = self._last_snapshot_iteration = 0
        self._printed_s: dict[str, float] = {}
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
            self._keep(restored)
        self._start_iteration = self._last_snapshot_iteration = iteration
        self._complete_iteration = iteration if restored else None
        for plan in self._strategy.possible_plans():
            self._layout(plan)  # not to be made in an iteration: it takes a while
        for unit in self._strategy.rotating:
            self._make_layouts.place(unit, 0)
        context.server.keep(self._memory.replicas)
        self._writer.start()
        self._storage.start(restored.persisted_index if restored else "")
        if self._supervisor is not None:
            self._supervisor.start()

    def _keep(self, restored: RestoredState) -> None:
        """Keep what was recovered until a newer snapshot is complete."""
        wanted = [region for region in self._regions if region.iteration is not None]
        wanted += [
            region
            for region in self._regions
            if region.index_path in restored.indexes and region not in wanted
        ]
        self._retained = wanted[: len(self._regions) - 1]  # one must be free to be filled
        for region in self._retained:
            region.advance(Role.RECOVERY)
        self._versions.retain(
            decode(region.index_path.read_bytes(), Index, str(region.index_path))
            for region in self._retained
        )
        self._versions.adopt(restored.rotating)

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
        job = self._job
        if job is not None and not job.copied.is_set() and not job.is_abandoned:
            start = time.perf_counter()
            if not job.copied.wait(FENCE_DEADLINE_S):
                job.is_abandoned = True  # it may hold a mixture of two iterations: never committed
            self._stall_s += time.perf_counter() - start
        self._begin_agreement()

    def _begin_agreement(self, *, goes_on: bool = True) -> None:
        state = SnapshotState.NONE if self._job is None else self._job.state
        slots = self._job.slots if self._job is not None else ()
        upcoming = [str(place.unit) for place in slots]
        has_room = self._versions.has_room(self._strategy.most_rotating, upcoming)
        is_ready = has_room and self._free_region() is not None
        values = [
            int(state),
            int(is_ready),
            int(self._storage.is_idle),
            int(not self._storage.has_failed),
            int(self._job is None or self._job.is_protected),
            int(goes_on),
        ]
        values += self._strategy.values(self._profile.budget_bytes)
        if self._tuner is not None:
            values += self._tuner.values()
        self._agreement.begin(values)

    def _free_region(self) -> Region | None:
        """Return a region that the next snapshot may fill, None if all are needed.

        A snapshot that all ranks have completed makes those before it free; until that is known, either it or
        they will be.
        """
        reserved = [*self._retained, self._complete] if self._job is None else [self._job.region]
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
        state, is_ready, are_idle, can_persist, is_protected, _, *measured = (
            self._agreement.result()
        )
        stage_load = self._context.stage_load
        if stage_load is not None and stage_load.is_under_way:
            self._strategy.add_tokens(stage_load.result())
        is_busy = self._job is not None or self._storage.is_busy
        self._settle(SnapshotState(state), is_protected=bool(is_protected))
        self._poll_storage(are_idle=bool(are_idle), can_persist=bool(can_persist))
        self._tune(iteration, iteration_s, measured, is_busy=is_busy)
        if self._storage.is_due and are_idle and self._complete is not None:
            self._storage.submit(self._complete)
        if self._is_due(iteration):
            if state == SnapshotState.RUNNING or not is_ready:
                reason = "the last one is not complete" if is_ready else "all regions are in use"
                self._reports.add("skipped", iteration, part="snapshot", reason=reason)
            else:
                self._take(iteration, capture)
        stall_s, self._stall_s = self._stall_s, 0.0
        self._forward_start_s = time.perf_counter()
        return stall_s

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
        """Act on what all ranks together say of the last snapshot, and whether all peers have it."""
        job = self._job
        if job is None or state is SnapshotState.RUNNING:
            return
        self._job = None
        if state is SnapshotState.FAILED:
            if job.state is not SnapshotState.FAILED:
                self._reports.degraded("snapshot", job.iteration, "another rank has none")
            job.region.advance(Role.FREE)
            return
        before, self._complete = self._complete, job.region
        self._complete_iteration = job.iteration
        job.region.advance(Role.RECOVERY)
        for region in (*self._retained, *([before] if before is not None else [])):
            if region.role is Role.RECOVERY:
                region.advance(Role.FREE)
        self._retained = []
        self._versions.settle(job.region.index_path, job.pooled)
        self._strategy.note_complete(job.iteration)
        self._profile.note_copy(job.num_bytes, job.copy_s)
        if is_protected and not self._has_removed_left_overs:
            self._has_removed_left_overs = True
            self._memory.remove_left_overs()
        self._storage.note_complete()
        if self._tuner is not None and not self._storage.is_due:
            self._tuner.end_checkpoint(job.complete_s)

    def _take(
        self, iteration: int, capture: Callable[[], CapturedRecord], *, is_last: bool = False
    ) -> None:
        region = self._free_region()
        assert region is not None  # is_ready was agreed
        region.advance(Role.SNAPSHOT)
        plan = self._strategy.plan(iteration, is_last=is_last)
        slots = self._versions.find_free(len(plan.rotating))
        self._versions.outdate(region, self._regions, slots)
        names = {str(unit) for unit in plan.rotating}
        self._job = SnapshotJob(
            region=region,
            layout=self._layout(plan),
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
        self._last_snapshot_iteration = iteration
        self._writer.submit(self._job)

    def _layout(self, plan: SnapshotPlan) -> FileLayout:
        if plan.key not in self._layouts:
            self._layouts[plan.key] = self._make_layouts.lay_out(plan)
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
        """Hand over the events since the last call, and print those that say that something failed.

        Args:
            log: called for each event.

        Raises:
            DegradedError: with --moe-ft-on-error=raise, if a part has failed.
        """
        failure = ""
        for report in self._reports.drain():
            log(report)
            if report.event == "degraded":
                failure = f"iteration {report.iteration}: {report.fields['part']}: {report.fields['reason']}"
                self._print(report.fields["part"], failure)
        if failure and self._settings.raises:
            raise DegradedError(f"{failure} (--moe-ft-on-error=raise)")

    def _print(self, part: str, failure: str) -> None:
        """Print a failure, at most one of a part in a while: the event log has all of them."""
        now = time.monotonic()
        if now - self._printed_s.get(part, -_PRINT_INTERVAL_S) >= _PRINT_INTERVAL_S:
            self._printed_s[part] = now
            print(f"moe_ft: rank {self._context.rank}, {failure}", file=sys.stderr, flush=True)

    def finish(self, iteration: int, capture: Callable[[], CapturedRecord]) -> None:
        """Training has ended: bring the last state to storage, if there is one, within a deadline.

        Called by all ranks.
        """
        if not self._settings.persist_interval or iteration == self._start_iteration:
            return
        deadline = time.monotonic() + persist_deadline_s(self._memory.num_own_bytes)
        num_failed = 0
        while True:
            if self._job is not None:
                self._job.copied.wait(FENCE_DEADLINE_S)
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
        has_failed = newest != iteration and self._last_snapshot_iteration == iteration
        if not is_whole and not has_failed and is_ready:
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
