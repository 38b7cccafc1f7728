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
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import torch

from moe_ft.engine.background import PhaseHook, Reports
from moe_ft.engine.layout import FileLayout, LazyLayout, UnitPlace
from moe_ft.engine.peers import Replica
from moe_ft.engine.pool import Pool
from moe_ft.engine.regions import MappedFile, Region
from moe_ft.errors import SnapshotError
from moe_ft.faults import Phase
from moe_ft.formats import (
    FORMAT,
    Identity,
    Index,
    ParameterEntry,
    TensorEntry,
    UnitEntry,
    checksum,
    encode,
)
from moe_ft.planning.strategies import SnapshotPlan
from moe_ft.state import record as records
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import DTYPES, own_slice, whole_tensor
from moe_ft.units import Level

_BATCH = 256
_RETRY_S = 10.0  # for what was recovered


class SnapshotState(IntEnum):
    """How far the last snapshot is, ordered so that the least over all ranks is that of the job."""

    RUNNING = 0
    FAILED = 1
    COMPLETE = 2  # of a window all snapshots are committed, and sent to the peers that take them
    NONE = 3


class Replicator(Protocol):
    """Sends committed snapshots to peers."""

    def replicate(self, replica: Replica) -> bool:
        """Send a snapshot; return whether all peers have it. Failures are reported, not raised."""
        ...


@dataclass(kw_only=True, slots=True)
class SnapshotJob:
    """One snapshot to take.

    Attributes:
        window: layout of the region.
        position: of the snapshot in its window.
        slots: places in the pool of the units that only some snapshots hold.
        carried: versions of such units that this snapshot does not hold, by name.
        keep_iteration: the end of the newest complete window, which peers must not overwrite yet.
        ready: on a GPU, the event after which the state may be read.
        is_protected: whether all peers have it, once it is complete.
        is_sent_to_peers: not where they would have to keep several of one iteration, at the end of training.
        pooled: all versions in the pool that the snapshot's index names, once it is committed.
    """

    region: Region
    window: LazyLayout
    iteration: int
    record: records.CapturedRecord
    keep_iteration: int | None
    plan: SnapshotPlan
    position: int = 0
    slots: Sequence[UnitPlace] = ()
    carried: Mapping[str, UnitEntry] = field(default_factory=dict)
    is_sent_to_peers: bool = True
    pooled: dict[str, UnitEntry] = field(default_factory=dict)
    ready: Any = None
    copied: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False
    is_protected: bool = True
    state: SnapshotState = SnapshotState.RUNNING
    copy_s: float = 0.0
    commit_s: float = 0.0
    replicate_s: float = 0.0
    complete_s: float = 0.0

    @property
    def layout(self) -> FileLayout:
        """Of the region. The copy thread's, until the snapshot is complete."""
        return self.window.get()

    @property
    def num_bytes(self) -> int:
        """What is copied."""
        return sum(place.num_bytes for place in self.places)

    @property
    def places(self) -> tuple[UnitPlace, ...]:
        """Of all units that are copied."""
        return (*self.layout.snapshots[self.position], *self.slots)

    @property
    def stretch(self) -> tuple[int, int]:
        """The first and the last byte of the region, the last one not included, that this snapshot adds."""
        ends = self.layout.ends
        return (ends[self.position - 1] if self.position else 0), ends[self.position]


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
    ) -> None:
        self._pool, self._origins = pool, dict(origins or {})
        self._complete_record = complete_record
        self._parameters = {each.name: each for each in parameters}
        self._entries: dict[str, ParameterEntry] = {each.name: each.entry for each in parameters}
        self._identity, self._rank, self._node = identity, rank, node
        self._reports, self._phase_hook = reports, phase_hook
        self._sender = ReplicaSender(replicator, reports) if replicator is not None else None
        self._window: Index | None = None  # of the snapshots before, in the window under way
        self._jobs: queue.SimpleQueue[SnapshotJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._copies: dict[tuple[int, int], tuple[FileLayout, list[_Copy]]] = {}

    def start(self) -> None:
        """Start the thread."""
        if any(each.parameter.is_cuda for each in self._parameters.values()):
            self._stream = torch.cuda.Stream()
        self._thread = threading.Thread(target=self._run, name="moe_ft-snapshot", daemon=True)
        self._thread.start()
        if self._sender is not None:
            self._sender.start()

    def submit(self, job: SnapshotJob) -> None:
        """Begin a snapshot; until `job.copied` is set, nobody may change weights and moments."""
        if self._stream is not None:
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
                self._reports.degraded(
                    "snapshot", job.iteration, f"{type(error).__name__}: {error}"
                )
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

    def _copy(self, job: SnapshotJob) -> set[tuple[str, str]]:
        """Copy all tensors; return (parameter, key) of those that do not exist yet."""
        if job.position == 0:
            job.region.mapping[: len(job.layout.header)] = job.layout.header
        copies = self._copies_into(job)
        half = len(copies) // 2
        stream = self._stream
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
            if stream:
                stream.wait_event(job.ready)
            absent = _copy_all(copies[:half], non_blocking=stream is not None)
            self._phase_hook(Phase.SNAPSHOT, job.iteration)
            absent |= _copy_all(copies[half:], non_blocking=stream is not None)
            self._complete_record(job.record)
            if stream:
                stream.synchronize()
        return absent

    def _copies_into(self, job: SnapshotJob) -> list["_Copy"]:
        """Return what a snapshot copies where.

        What goes into a region is found out once for each layout, for thousands of tensors.
        """
        key = (job.region.number, job.position)
        known = self._copies.get(key)
        if known is None or known[0] is not job.layout:
            places = job.layout.snapshots[job.position]
            known = self._copies[key] = (job.layout, list(self._copies_to(job.region, places)))
        if not job.slots:
            return known[1]
        assert self._pool is not None
        return [*known[1], *self._copies_to(self._pool, job.slots)]

    def _copies_to(self, target: MappedFile, places: Iterable[UnitPlace]) -> Iterator["_Copy"]:
        mapping = target.mapping
        for place in places:
            for tensor in place.tensors:
                local = self._parameters[tensor.parameter]
                if (local.start, local.end) != (tensor.start, tensor.end):
                    local = replace(local, start=tensor.start, end=tensor.end)
                yield _Copy(
                    local=local,
                    key=tensor.key,
                    target=torch.frombuffer(
                        mapping,
                        dtype=DTYPES[tensor.dtype],
                        count=tensor.end - tensor.start,
                        offset=place.offset + tensor.offset,
                    ),
                )

    def _entries_of(
        self,
        job: SnapshotJob,
        file: MappedFile,
        places: Iterable[UnitPlace],
        absent: set[tuple[str, str]],
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
                        incarnation=self._identity.history[-1][0],
                        file=name,
                        routed_tokens=routed_tokens,
                        gaps=gaps,
                    ),
                )

    def _index(self, job: SnapshotJob, absent: set[tuple[str, str]], before: Index | None) -> Index:
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
        )


class ReplicaSender:
    """The thread that sends committed snapshots to peers, while the next one is copied."""

    def __init__(self, replicator: Replicator, reports: Reports) -> None:
        self._replicator, self._reports = replicator, reports
        self._jobs: queue.SimpleQueue[tuple[Replica, SnapshotJob | None] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="moe_ft-replicate", daemon=True)
        self._thread.start()

    def submit(self, replica: Replica, job: SnapshotJob | None = None) -> None:
        """Send a replica after those that were submitted before; its job, if it has one, is complete then."""
        self._jobs.put((replica, job))

    def close(self, timeout_s: float) -> None:
        """End the thread after what is under way, or leave it after some seconds."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        again: Replica | None = None
        while True:
            try:
                next_ = self._jobs.get(timeout=_RETRY_S if again else None)
            except queue.Empty:
                next_ = (again, None) if again else None
            if next_ is None:
                return
            replica, job = next_
            start = time.perf_counter()
            try:
                is_protected = self._replicator.replicate(replica)
            except Exception as error:  # a peer's failure is reported there: this is one of ours
                reason = f"{type(error).__name__}: {error}"
                self._reports.degraded("replicate", replica.index.iteration, reason)
                is_protected = False
            # What was recovered is tried again until there is something newer to send.
            again = replica if job is None and not is_protected else None
            if job is not None:
                job.is_protected = is_protected
                job.replicate_s = time.perf_counter() - start
                job.complete_s += job.replicate_s
                job.state = SnapshotState.COMPLETE


@dataclass(kw_only=True, slots=True, eq=False)
class _Copy:
    """One tensor's way into a region.

    Attributes:
        whole, address: the tensor that `source` was cut from, and where its memory was: optimizers may
            replace either, so both are compared before each copy.
    """

    local: LocalParameter
    key: str
    target: torch.Tensor
    whole: torch.Tensor | None = None
    address: int = 0
    source: torch.Tensor | None = None

    def find_source(self) -> torch.Tensor | None:
        """Return what to copy now, None if it does not exist yet."""
        whole = whole_tensor(self.local, self.key)
        if whole is None:
            return None
        address = whole.data_ptr()
        if whole is not self.whole or address != self.address or self.source is None:
            self.whole, self.address = whole, address
            self.source = own_slice(self.local, self.key, whole)
            if self.source.dtype != self.target.dtype:
                raise SnapshotError(
                    f"{self.local.name}/{self.key} is {self.source.dtype}, expected {self.target.dtype}"
                )
        return self.source


def _copy_all(copies: Sequence[_Copy], *, non_blocking: bool) -> set[tuple[str, str]]:
    """Copy tensors; return (parameter, key) of those that do not exist yet."""
    absent: set[tuple[str, str]] = set()
    for start in range(0, len(copies), _BATCH):
        sources, targets = [], []
        for copy in copies[start : start + _BATCH]:
            source = copy.find_source()
            if source is None:
                absent.add((copy.local.name, copy.key))
            else:
                sources.append(source)
                targets.append(copy.target)
        if sources:
            # One call for many: Python's lock is free meanwhile, and the training thread goes on.
            torch._foreach_copy_(targets, sources, non_blocking)
    return absent


def _mark_absent(
    tensors: tuple[TensorEntry, ...], absent: set[tuple[str, str]]
) -> tuple[TensorEntry, ...]:
    if not absent:
        return tensors
    return tuple(
        msgspec.structs.replace(tensor, is_absent=(tensor.parameter, tensor.key) in absent)
        for tensor in tensors
    )
