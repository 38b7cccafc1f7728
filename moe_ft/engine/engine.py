"""The checkpoint engine: at which seam which snapshot starts, completes, goes to storage.

It does not know which strategy it runs. The training thread calls the methods at the seams of the loop;
copying is engine/snapshot.py, sending engine/peers.py, writing engine/persist.py.

Whether a snapshot is taken, is complete or goes to storage is decided by all ranks together
(engine/agreement.py): a region is overwritten only when every rank has a newer snapshot committed, and has
sent it to the peers that take it, so there always is one that all ranks have.
"""

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from moe_ft.engine.agreement import Agreement
from moe_ft.engine.background import PhaseHook, Report, Reports
from moe_ft.engine.layout import FileLayout
from moe_ft.engine.peers import PeerReplicator, PeerServer
from moe_ft.engine.persist import PersistClient, WriterSupervisor, persist_deadline_s
from moe_ft.engine.profile import IntervalTuner
from moe_ft.engine.regions import (
    Region,
    Role,
    own_directory,
    rank_and_holder,
    replica_directory,
)
from moe_ft.engine.snapshot import SnapshotJob, SnapshotState, SnapshotWriter, pin, unpin
from moe_ft.errors import DegradedError
from moe_ft.formats import Identity, IndexHead, decode
from moe_ft.planning.strategies import SnapshotPlan, Strategy
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.record import CapturedRecord
from moe_ft.topology import RankInfo, Topology

FENCE_DEADLINE_S = 120.0
_CLOSE_DEADLINE_S = 5.0
_POLL_S = 0.01
_PRINT_INTERVAL_S = 30.0
NUM_REPLICA_REGIONS = 2


def num_regions(*, persists: bool) -> int:
    """Return how many regions a rank needs: the newest complete one, one to fill, one being written."""
    return 3 if persists else 2


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
        regions: this rank's own, opened or not.
        peers: ranks that keep this rank's replicas; sources: ranks whose replicas this rank keeps.
        server: listens already.
        token: what peers' requests must carry.
        writer_command: starts the node's writer process; None on all but the lowest rank of a node
            and without storage.
    """

    rank: int
    topology: Topology
    node_dir: Path
    identity: Identity
    parameters: Sequence[LocalParameter]
    regions: Sequence[Region]
    peers: tuple[RankInfo, ...]
    sources: tuple[RankInfo, ...]
    server: PeerServer
    token: str
    writer_command: list[str] | None
    phase_hook: PhaseHook


class CheckpointEngine:
    """Takes snapshots of one rank. Owned by the training thread."""

    def __init__(
        self,
        settings: EngineSettings,
        context: EngineContext,
        strategy: Strategy,
        agreement: Agreement,
        make_layout: Callable[[SnapshotPlan], FileLayout],
        complete_record: Callable[[CapturedRecord], None],
    ) -> None:
        self._settings, self._context, self._strategy = settings, context, strategy
        self._agreement, self._make_layout = agreement, make_layout
        self._layouts: dict[int, tuple[SnapshotPlan, FileLayout]] = {}
        self._reports = Reports()
        self._regions = context.regions
        self._replicas: dict[int, list[Region]] = {}
        self._job: SnapshotJob | None = None
        self._complete: Region | None = None
        self._complete_iteration: int | None = None  # known also where a peer alone has it
        self._num_complete = 0
        self._has_removed_left_overs = False
        self._start_iteration = self._last_snapshot_iteration = 0
        self._persisted_iteration: int | None = None
        self._printed_s: dict[str, float] = {}
        self._is_persist_due = False
        self._is_writer_idle = True
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
        )
        persist_dir = context.node_dir / "persist"
        self._persist = PersistClient(persist_dir, context.rank, self._reports, context.phase_hook)
        self._supervisor = (
            WriterSupervisor(persist_dir, context.writer_command, self._reports)
            if context.writer_command
            else None
        )

    def start(self, iteration: int, *, is_restored: bool) -> None:
        """Open regions, accept replicas and start the threads and the writer.

        Args:
            iteration: the state's.
            is_restored: whether it was recovered; regions that hold it are then kept until a newer
                snapshot is complete. After a fresh start every region may be overwritten.

        Raises:
            OSError: if the memory directory cannot be made or has no room.
        """
        context, persists = self._context, self._settings.persist_interval > 0
        for source in context.sources:
            directory = replica_directory(context.node_dir, source.rank, context.rank)
            self._replicas[source.rank] = [
                Region(directory, number, source.region_bytes)
                for number in range(NUM_REPLICA_REGIONS)
            ]
        for region in [*self._regions, *chain.from_iterable(self._replicas.values())]:
            region.open()
            if is_restored and holds(region.index_path, context.identity.lineage, iteration):
                region.iteration = iteration
        for region in self._regions:
            if self._is_on_gpu:
                pin(region)
            if region.iteration is not None and self._complete is None:
                region.advance(Role.RECOVERY)
                self._complete = region
        self._start_iteration = self._last_snapshot_iteration = iteration
        self._complete_iteration = iteration if is_restored else None
        self._layout(iteration)  # thousands of units take a while, not to be spent in an iteration
        context.server.keep(self._replicas)
        self._writer.start()
        if persists:
            self._persist.start()
        if self._supervisor is not None:
            self._supervisor.start()

    def before_step(self) -> None:
        """The fence: wait until nothing reads weights and moments any more.

        Called by all ranks before the optimizer step of every iteration.
        """
        job = self._job
        if job is not None and not job.copied.is_set() and not job.is_abandoned:
            start = time.perf_counter()
            if not job.copied.wait(FENCE_DEADLINE_S):
                job.is_abandoned = True  # it may hold a mixture of two iterations: never committed
            self._stall_s += time.perf_counter() - start
        self._begin_agreement()

    def _begin_agreement(self, *, goes_on: bool = True) -> None:
        state = SnapshotState.NONE if self._job is None else self._job.state
        is_ready = self._free_region() is not None
        values = [
            int(state),
            int(is_ready),
            int(self._is_writer_idle),
            int(not self._persist.has_failed),
            int(self._job is None or self._job.is_protected),
            int(goes_on),
        ]
        if self._tuner is not None:
            values += self._tuner.values()
        self._agreement.begin(values)

    def _free_region(self) -> Region | None:
        """Return a region that the next snapshot may fill, None if all are needed.

        A snapshot that all ranks have completed makes the one before it free; until that is known,
        either it or its predecessor will be.
        """
        reserved = self._job.region if self._job is not None else self._complete
        free = [
            region
            for region in self._regions
            if region.role is not Role.PERSIST and region is not reserved
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
        state, is_ready, is_writer_idle, can_persist, is_protected, _, *costs = (
            self._agreement.result()
        )
        is_busy = self._job is not None or self._persist.region is not None
        self._settle(SnapshotState(state), is_protected=bool(is_protected))
        self._poll_persist(can_go_on=bool(can_persist))
        if self._tuner is not None:
            self._tuner.end_iteration(iteration_s, is_busy=is_busy)
            if (cost := self._tuner.agree(costs)) is not None:
                self._reports.add(
                    "interval",
                    iteration,
                    interval=self._tuner.interval,
                    iteration_s=cost.iteration_s,
                    overhead_s=cost.overhead_s,
                    completion_s=cost.completion_s,
                )
        if self._is_persist_due and is_writer_idle and self._complete is not None:
            self._submit_persist()
        if self._is_due(iteration):
            if state == SnapshotState.RUNNING or not is_ready:
                reason = "the last one is not complete" if is_ready else "all regions are in use"
                self._reports.add("skipped", iteration, part="snapshot", reason=reason)
            else:
                self._take(iteration, capture)
        stall_s, self._stall_s = self._stall_s, 0.0
        return stall_s

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
        if before is not None and before.role is Role.RECOVERY:
            before.advance(Role.FREE)
        if is_protected and not self._has_removed_left_overs:
            self._has_removed_left_overs = True
            self._remove_left_overs()
        self._num_complete += 1
        persist_interval = self._settings.persist_interval
        if persist_interval and self._num_complete % persist_interval == 0:
            self._is_persist_due = True
        if self._tuner is not None and not self._is_persist_due:
            self._tuner.end_checkpoint(job.complete_s)

    def _remove_left_overs(self) -> None:
        """Remove what other placements or earlier starts have left in this rank's share of the node."""
        topology, rank = self._context.topology, self._context.rank
        node, node_dir = topology.ranks[rank].node, self._context.node_dir
        here = {info.rank for info in topology.on_node(node)}
        sources = {source.rank for source in self._context.sources}
        is_lowest = rank == topology.lowest_on_node(node).rank
        for directory in node_dir.iterdir() if node_dir.is_dir() else ():
            owner, holder = rank_and_holder(directory.name)
            is_orphan = holder is not None and holder not in here
            is_dismissed = holder == rank and owner != rank and owner not in sources
            if (is_orphan and is_lowest) or is_dismissed:
                shutil.rmtree(directory, ignore_errors=True)

    def _take(self, iteration: int, capture: Callable[[], CapturedRecord]) -> None:
        region = self._free_region()
        assert region is not None  # is_ready was agreed
        region.advance(Role.SNAPSHOT)
        self._job = SnapshotJob(
            region=region,
            layout=self._layout(iteration),
            iteration=iteration,
            record=capture(),
            keep_iteration=self._complete_iteration,
        )
        self._last_snapshot_iteration = iteration
        self._writer.submit(self._job)

    def _layout(self, iteration: int) -> FileLayout:
        plan = self._strategy.plan(iteration)
        known = self._layouts.get(id(plan))
        if known is None:
            known = self._layouts[id(plan)] = (plan, self._make_layout(plan))
        return known[1]

    def _submit_persist(self) -> None:
        assert self._complete is not None
        self._is_persist_due, self._is_writer_idle = False, False
        self._persisted_iteration = self._complete.iteration
        self._complete.advance(Role.PERSIST)
        self._persist.submit(self._complete)

    def _poll_persist(self, *, can_go_on: bool) -> None:
        region = self._persist.poll()
        if region is None and not can_go_on:
            region = self._persist.cancel()
        if region is not None:
            self._is_writer_idle = True
            region.advance(Role.RECOVERY if region is self._complete else Role.FREE)
            if self._tuner is not None:
                # It may go on while persist_interval snapshots are taken.
                share = self._persist.last_seconds / self._settings.persist_interval
                self._tuner.end_checkpoint(share)

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
        deadline = time.monotonic() + persist_deadline_s(self._regions[0].num_bytes)
        while True:
            if self._job is not None:
                self._job.copied.wait(FENCE_DEADLINE_S)
            self._begin_agreement(goes_on=time.monotonic() < deadline)
            state, is_ready, is_writer_idle, can_persist, is_protected, goes_on, *_ = (
                self._agreement.result()
            )
            self._settle(SnapshotState(state), is_protected=bool(is_protected))
            self._poll_persist(can_go_on=bool(can_persist))
            if not goes_on:
                self._reports.degraded("persist", iteration, "the last state is not on storage")
                return
            if (
                state != SnapshotState.RUNNING
                and is_writer_idle
                and not self._bring_last(iteration, capture, is_ready=bool(is_ready))
            ):
                return
            time.sleep(_POLL_S)

    def _bring_last(
        self, iteration: int, capture: Callable[[], CapturedRecord], *, is_ready: bool
    ) -> bool:
        """Take the next step on the last state's way to storage; return False if there is none."""
        newest = None if self._complete is None else self._complete.iteration
        if newest == iteration and self._persisted_iteration != iteration:
            self._submit_persist()
            return True
        if newest != iteration and self._last_snapshot_iteration != iteration and is_ready:
            self._take(iteration, capture)
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
            for region in self._regions:
                unpin(region)
        for regions in (self._regions, *self._replicas.values()):
            for region in regions:
                region.close()

    def remove_memory(self) -> None:
        """Remove this rank's memory, and the node's with the last rank; the run has ended cleanly."""
        context = self._context
        directories = [own_directory(context.node_dir, context.rank)]
        directories += [
            replica_directory(context.node_dir, source.rank, context.rank)
            for source in context.sources
        ]
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
        node = context.topology.ranks[context.rank].node
        if context.rank == context.topology.lowest_on_node(node).rank:
            shutil.rmtree(context.node_dir, ignore_errors=True)
            with suppress(OSError):
                context.node_dir.parent.rmdir()  # the job's, with its last node


def holds(index_path: Path, lineage: str, iteration: int) -> bool:
    """Return whether a region holds the snapshot of an iteration of a run."""
    try:
        index = decode(index_path.read_bytes(), IndexHead, str(index_path))
    except OSError:
        return False
    return (index.identity.lineage, index.iteration) == (lineage, iteration)
