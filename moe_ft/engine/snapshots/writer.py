"""Copies a rank's slices into a region while forward and backward run, then commits it.

One snapshot at a time, on a worker. The device copy must be done before the next optimizer step, which waits
for it (the fence, engine/engine.py); checksums and commit may take longer.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from moe_ft.engine.background import BackgroundPart, EventQueue, PhaseHook, ThreadWorker, describe
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import OutgoingReplica
from moe_ft.engine.links.sender import ReplicaSender
from moe_ft.engine.memory.layout import UnitPlace
from moe_ft.engine.memory.regions import UnitPool
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import RecordLog, SnapshotIndexer
from moe_ft.engine.snapshots.job import (
    ReplicationResult,
    SnapshotJob,
    SnapshotRequest,
    SnapshotResult,
)
from moe_ft.engine.updates.capture import GradientCapture
from moe_ft.engine.updates.following import LentUpdate
from moe_ft.errors import SnapshotError
from moe_ft.faults import Phase
from moe_ft.format.encoding import encode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.units import Level, UnitKind


class SnapshotWriter:
    """Takes the snapshots of one rank. The training thread calls the public methods, the worker the rest.

    Attributes:
        gradients: of the last steps, for peers; None where these get state.
    """

    def __init__(
        self,
        copier: StateCopier,
        indexer: SnapshotIndexer,
        records: RecordLog,
        pool: UnitPool | None,
        sender: ReplicaSender | None,
        reports: EventQueue,
        phase_hook: PhaseHook,
        worker: ThreadWorker,
        clock: Clock,
        gradients: GradientCapture | None = None,
    ) -> None:
        self._copier = copier
        self._indexer = indexer
        self._records = records
        self._pool = pool
        self._sender = sender
        self.gradients = gradients
        self._reports = reports
        self._phase_hook = phase_hook
        self._worker = worker
        self._clock = clock
        self._window: Index | None = None  # the snapshots before, in the window under way

    def start(self) -> None:
        """Allocate what the copy needs, and start the workers."""
        self._copier.start()
        self._worker.start()
        if self._sender is not None:
            self._sender.start()
        if self.gradients is not None:
            self.gradients.start()

    def submit(self, request: SnapshotRequest) -> SnapshotJob:
        """Begin a snapshot; until its `copied` is set, nobody may change weights and moments."""
        copied, abandoned = threading.Event(), threading.Event()
        lent = None
        if self.gradients is not None and request.is_sent_to_peers:
            lent = self.gradients.lend(request.iteration)
        self._copier.park()
        ready = self._copier.mark_ready()
        commit = partial(self._commit, request, ready, copied, abandoned, lent)
        result = self._worker.submit(partial(self._report_failure, request.iteration, commit))
        if lent is not None:
            result.add_done_callback(partial(_release_unless_sent, lent))
        # Also after a failure; the result is there first, so that the fence already sees it.
        result.add_done_callback(lambda _: copied.set())
        return SnapshotJob(request=request, copied=copied, abandoned=abandoned, result=result)

    def send(self, replica: OutgoingReplica) -> None:
        """Send a window that was recovered, before the snapshots that follow.

        Its region is not overwritten before one of them is complete, so not while it is being sent.
        """
        if self._sender is not None:
            self._sender.submit_recovered(replica)

    @property
    def may_go_on(self) -> bool:
        """False while the window before the recovered one must stay where it is."""
        return self._sender is None or self._sender.may_go_on

    def close(self, timeout_s: float) -> None:
        """End the workers after what is under way, or leave them after some seconds."""
        self._worker.close(timeout_s)
        if self._sender is not None:
            self._sender.close(timeout_s)

    def _report_failure(
        self, iteration: int, commit: Callable[[], SnapshotResult]
    ) -> SnapshotResult:
        try:
            return commit()
        except Exception as error:  # whatever it is, training continues and says so
            self._reports.degraded(BackgroundPart.SNAPSHOT, iteration, describe(error), error)
            raise

    def _commit(
        self,
        request: SnapshotRequest,
        ready: Any,
        copied: threading.Event,
        abandoned: threading.Event,
        lent: LentUpdate | None,
    ) -> SnapshotResult:
        start = self._clock.perf_counter()
        if request.position == 0:
            request.region.begin(request.layout.header)
            self._window = None
        absent = self._copier.copy(
            request,
            ready,
            lambda: self._phase_hook(Phase.SNAPSHOT, request.iteration),
            lambda: self._records.complete(request.iteration),
        )
        copied.set()
        copy_s = self._clock.perf_counter() - start
        self._copier.check()
        before, self._window = self._window, None
        index = self._indexer.describe(request, absent, before)
        if abandoned.is_set():
            raise SnapshotError("the copy took longer than the fence waits")
        request.region.commit(encode(index), request.iteration)
        self._window = index
        request.announce(request.region, request.iteration)
        commit_s = self._clock.perf_counter() - start
        self._reports.add(
            "snapshot",
            request.iteration,
            bytes=request.num_bytes,
            seconds=commit_s,
            copy_s=copy_s,
            num_units=len(request.places),
            level=dict(Counter(place.level.value for place in request.places)),
            experts=_full_experts(request.places),
        )
        theirs, at_peers = _for_peers(request, index)
        replication, pass_on = self._send(request, theirs, lent)
        return SnapshotResult(
            copy_s=copy_s,
            commit_s=commit_s,
            pooled={name: entry for name, entry in index.units.items() if entry.file},
            at_peers=at_peers,
            replication=replication,
            pass_on=pass_on,
        )

    def _send(
        self, request: SnapshotRequest, index: Index, lent: LentUpdate | None
    ) -> tuple[Future[ReplicationResult] | None, Callable[[], Future[ReplicationResult]] | None]:
        """Begin to send a snapshot to peers; return what that comes to, and what passes its window on."""
        if self._sender is None or not request.is_sent_to_peers:
            return None, None
        start_byte, end_byte = request.stretch
        replica = OutgoingReplica(
            region=request.region,
            pool=self._pool,
            index=index,
            start_byte=start_byte,
            end_byte=end_byte,
            keep_iteration=request.keep_iteration,
            lent=lent,
        )
        return self._sender.submit(replica), self._sender.rest_of(replica)


def _full_experts(places: Iterable[UnitPlace]) -> dict[str, list[int]]:
    """Return by MoE layer the experts, of which a part at least is in a snapshot with its whole state."""
    experts: defaultdict[str, set[int]] = defaultdict(set)
    for place in places:
        if place.level is Level.FULL and place.unit.kind is UnitKind.EXPERT:
            experts[place.unit.layer_name].add(place.unit.expert)
    return {layer: sorted(found) for layer, found in experts.items()}


def _release_unless_sent(lent: LentUpdate, result: Future[SnapshotResult]) -> None:
    """Release gradients of a snapshot that has failed; else the sending worker does."""
    if result.cancelled() or result.exception() is not None:
        lent.release()


def _for_peers(
    request: SnapshotRequest, index: Index
) -> tuple[Index, Mapping[str, UnitEntry] | None]:
    """Return the index that peers get, and the versions of rotating units in it if they are chosen."""
    if request.plan.remote is None or request.at_peers is None:
        return index, None
    sent = {str(unit) for unit in request.plan.remote}
    pooled = {name: entry for name, entry in index.units.items() if entry.file}
    kept = {name: request.at_peers.get(name, pooled[name]) for name in pooled.keys() - sent}
    units = {**index.units, **kept}
    theirs = msgspec.structs.replace(index, units=units, retained=msgspec.UNSET)
    return theirs, {name: units[name] for name in pooled}
