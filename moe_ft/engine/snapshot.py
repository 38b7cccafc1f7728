"""Copies a rank's slices into a region while forward and backward run, then commits it.

One thread, one snapshot at a time. The device copy must be done before the next optimizer step, which waits
for it (the fence, engine/engine.py); checksums, commit and replication, which has a thread of its own, may
take longer. On a GPU the copy goes through a stream of its own into pinned memory.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import torch

from moe_ft.engine.background import PhaseHook, Reports, describe
from moe_ft.engine.copying import Absent, StateCopier
from moe_ft.engine.layout import UnitPlace
from moe_ft.engine.peers import Replica
from moe_ft.engine.pool import Pool
from moe_ft.engine.regions import MappedFile
from moe_ft.engine.replica_sender import ReplicaSender, Replicator
from moe_ft.engine.snapshot_job import SnapshotJob, SnapshotState
from moe_ft.errors import SnapshotError
from moe_ft.faults import Phase
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.entries import ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.state import record as records
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import Level


class SnapshotWriter:
    """The copy thread. `submit` and the job's state belong to the training thread."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        identity: Identity,
        rank: int,
        node: str,
        reports: Reports,
        replicator: Replicator | None,
        phase_hook: PhaseHook,
        complete_record: Callable[[records.CapturedRecord], None],
        pool: Pool | None = None,
        origins: Mapping[str, str] | None = None,
        staging_bytes: int = 0,
    ) -> None:
        self._pool, self._origins = pool, dict(origins or {})
        self._complete_record = complete_record
        self._is_on_gpu = any(each.parameter.is_cuda for each in parameters)
        self._copier = StateCopier(parameters, pool, staging_bytes)
        self._entries: dict[str, ParameterEntry] = {each.name: each.entry for each in parameters}
        self._identity, self._rank, self._node = identity, rank, node
        self._reports, self._phase_hook = reports, phase_hook
        self._sender = ReplicaSender(replicator, reports) if replicator is not None else None
        self._window: Index | None = None  # of the snapshots before, in the window under way
        self._jobs: queue.SimpleQueue[SnapshotJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._copier.start()
        self._thread = threading.Thread(target=self._run, name="moe_ft-snapshot", daemon=True)
        self._thread.start()
        if self._sender is not None:
            self._sender.start()

    def submit(self, job: SnapshotJob) -> None:
        """Begin a snapshot; until `job.copied` is set, nobody may change weights and moments."""
        if self._is_on_gpu:
            job.ready = torch.cuda.Event()
            job.ready.record()
        self._jobs.put(job)

    def send(self, replica: Replica) -> None:
        """Send a window that was recovered, before the snapshots that follow.

        Its region is not overwritten before one of them is complete, so not while it is being sent.
        """
        if self._sender is not None:
            self._sender.submit(replica)

    def close(self, timeout_s: float) -> None:
        """End the threads after what is under way, or leave them after some seconds."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._sender is not None:
            self._sender.close(timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._take(job)
            except Exception as error:  # whatever it is, training goes on and says so
                self._reports.degraded("snapshot", job.iteration, describe(error), error)
                job.state = SnapshotState.FAILED
            finally:
                job.copied.set()

    def _take(self, job: SnapshotJob) -> None:
        start = time.perf_counter()
        if job.position == 0:
            job.region.invalidate()
            self._window = None
        absent = self._copy(job)
        job.copied.set()
        job.copy_s = time.perf_counter() - start
        self._copier.check()
        before, self._window = self._window, None
        index = self._index(job, absent, before)
        if job.is_abandoned:
            raise SnapshotError("the copy took longer than the fence waits")
        job.region.commit(encode(index), job.iteration)
        self._window = index
        job.pooled = {name: entry for name, entry in index.units.items() if entry.file}
        job.commit_s = job.complete_s = time.perf_counter() - start
        self._reports.add(
            "snapshot",
            job.iteration,
            bytes=job.num_bytes,
            seconds=job.commit_s,
            copy_s=job.copy_s,
            num_units=len(job.places),
            level=dict(Counter(place.level.value for place in job.places)),
        )
        if self._sender is not None and job.is_sent_to_peers:
            start_byte, end_byte = job.stretch
            replica = Replica(
                region=job.region,
                pool=self._pool,
                index=index,
                start_byte=start_byte,
                end_byte=end_byte,
                keep_iteration=job.keep_iteration,
            )
            self._sender.submit(replica, job)
        else:
            job.state = SnapshotState.COMPLETE

    def _copy(self, job: SnapshotJob) -> Absent:
        """Copy all tensors; return those that do not exist yet."""
        if job.position == 0:
            job.region.mapping[: len(job.layout.header)] = job.layout.header
        return self._copier.copy(
            job,
            lambda: self._phase_hook(Phase.SNAPSHOT, job.iteration),
            lambda: self._complete_record(job.record),
        )

    def _entries_of(
        self,
        job: SnapshotJob,
        file: MappedFile,
        places: Iterable[UnitPlace],
        absent: Absent,
        name: str = "",
    ) -> Iterator[tuple[str, UnitEntry]]:
        """Yield the entries of units that were copied into a file."""
        with memoryview(file.mapping) as content:
            for place in places:
                routed_tokens, gaps = job.plan.rotating.get(place.unit, (0, ()))
                yield (
                    str(place.unit),
                    UnitEntry(
                        offset=place.offset,
                        num_bytes=place.num_bytes,
                        iteration=job.iteration,
                        level=place.level.value,
                        checksum=checksum(content[place.offset : place.offset + place.num_bytes]),
                        tensors=_mark_absent(place.tensors, absent),
                        incarnation=self._identity.start.number,
                        file=name,
                        routed_tokens=routed_tokens,
                        gaps=gaps,
                    ),
                )

    def _index(self, job: SnapshotJob, absent: Absent, before: Index | None) -> Index:
        """Describe the window up to this snapshot.

        Args:
            job: the snapshot.
            absent: what did not exist yet.
            before: the window up to the snapshot before it.
        """
        if job.position and (before is None or before.num_snapshots != job.position):
            raise SnapshotError("the snapshot before it in its window has failed")
        places = job.layout.snapshots[job.position]
        full = [place for place in places if place.level is Level.FULL]
        compute = [place for place in places if place.level is Level.COMPUTE]
        units = {**job.carried, **(before.units if before else {})}
        units.update(self._entries_of(job, job.region, full, absent))
        if job.slots:
            assert self._pool is not None
            units.update(self._entries_of(job, self._pool, job.slots, absent, self._pool.name))
        window = len(job.layout.snapshots)
        weights = dict(self._entries_of(job, job.region, compute, absent))
        return Index(
            format=FORMAT,
            identity=self._identity,
            rank=self._rank,
            node=self._node,
            iteration=job.iteration,
            file=job.region.data_path.name,
            file_bytes=job.layout.num_bytes,
            header_bytes=len(job.layout.header),
            header_checksum=checksum(job.layout.header),
            units=units,
            parameters=self._entries,
            records=(*(before.records if before else ()), records.encode(job.record)),
            origins=self._origins,
            progress=job.plan.progress() if job.plan.progress else None,
            window=window,
            num_snapshots=job.position + 1,
            compute=(*(before.compute if before else ()), weights) if window > 1 else (),
            complete_iteration=job.keep_iteration,
        )


def _mark_absent(tensors: tuple[TensorEntry, ...], absent: Absent) -> tuple[TensorEntry, ...]:
    if not absent:
        return tensors
    return tuple(
        msgspec.structs.replace(tensor, is_absent=(tensor.parameter, tensor.key) in absent)
        for tensor in tensors
    )
