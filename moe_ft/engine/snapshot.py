"""Copies a rank's slices into a region while forward and backward run, then commits it.

One thread, one snapshot at a time. The device copy must be done before the next optimizer step, which waits
for it (the fence, engine/engine.py); checksums, commit and replication may take longer. On a GPU the copy
goes through a stream of its own into pinned memory.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import torch

from moe_ft.engine.background import PhaseHook, Reports
from moe_ft.engine.layout import FileLayout
from moe_ft.engine.regions import Region
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
from moe_ft.state import record as records
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import DTYPES, own_slice, whole_tensor

_BATCH = 256


class SnapshotState(IntEnum):
    """How far the last snapshot is, ordered so that the least over all ranks is that of the job."""

    RUNNING = 0
    FAILED = 1
    COMPLETE = 2  # committed, and sent to the peers that take it
    NONE = 3


class Replicator(Protocol):
    """Sends committed regions to peers."""

    def replicate(self, region: Region, index: Index, keep_iteration: int | None) -> bool:
        """Send a region; return whether all peers have it. Failures are reported, not raised."""
        ...


@dataclass(kw_only=True, slots=True)
class SnapshotJob:
    """One snapshot to take.

    Attributes:
        keep_iteration: the newest complete snapshot, which peers must not overwrite yet.
        ready: on a GPU, the event after which the state may be read.
        is_protected: whether all peers have it, once it is complete.
    """

    region: Region
    layout: FileLayout
    iteration: int
    record: records.CapturedRecord
    keep_iteration: int | None
    ready: Any = None
    copied: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False
    is_protected: bool = True
    state: SnapshotState = SnapshotState.RUNNING
    copy_s: float = 0.0
    complete_s: float = 0.0


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
    ) -> None:
        self._complete_record = complete_record
        self._parameters = {each.name: each for each in parameters}
        self._entries: dict[str, ParameterEntry] = {each.name: each.entry for each in parameters}
        self._identity, self._rank, self._node = identity, rank, node
        self._reports, self._replicator, self._phase_hook = reports, replicator, phase_hook
        self._jobs: queue.SimpleQueue[SnapshotJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: Any = None
        self._copies: dict[tuple[int, int], list[_Copy]] = {}

    def start(self) -> None:
        """Start the thread."""
        if any(each.parameter.is_cuda for each in self._parameters.values()):
            self._stream = torch.cuda.Stream()
        self._thread = threading.Thread(target=self._run, name="moe_ft-snapshot", daemon=True)
        self._thread.start()

    def submit(self, job: SnapshotJob) -> None:
        """Begin a snapshot; until `job.copied` is set, nobody may change weights and moments."""
        if self._stream is not None:
            job.ready = torch.cuda.Event()
            job.ready.record()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """End the thread after what is under way, or leave it after some seconds."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

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
        job.region.invalidate()
        absent = self._copy(job)
        job.copied.set()
        job.copy_s = time.perf_counter() - start
        index = self._index(job, absent)
        if job.is_abandoned:
            raise SnapshotError("the copy took longer than the fence waits")
        job.region.commit(encode(index), job.iteration)
        committed_s = time.perf_counter() - start
        self._reports.add(
            "snapshot",
            job.iteration,
            bytes=job.layout.num_bytes,
            seconds=committed_s,
            copy_s=job.copy_s,
            num_units=len(job.layout.units),
            level=dict(Counter(place.level.value for place in job.layout.units)),
        )
        if self._replicator is not None:
            job.is_protected = self._replicator.replicate(job.region, index, job.keep_iteration)
        job.complete_s = time.perf_counter() - start
        job.state = SnapshotState.COMPLETE

    def _copy(self, job: SnapshotJob) -> set[tuple[str, str]]:
        """Copy all tensors; return (parameter, key) of those that do not exist yet."""
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
        """Return what a layout copies into a region; found out once, for thousands of tensors."""
        key = (id(job.region), id(job.layout))
        if key not in self._copies:
            mapping = job.region.mapping
            self._copies[key] = [
                _Copy(
                    local=self._parameters[tensor.parameter],
                    key=tensor.key,
                    target=torch.frombuffer(
                        mapping,
                        dtype=DTYPES[tensor.dtype],
                        count=tensor.end - tensor.start,
                        offset=place.offset + tensor.offset,
                    ),
                )
                for place in job.layout.units
                for tensor in place.tensors
            ]
        return self._copies[key]

    def _index(self, job: SnapshotJob, absent: set[tuple[str, str]]) -> Index:
        with memoryview(job.region.mapping) as content:
            units = {
                str(place.unit): UnitEntry(
                    offset=place.offset,
                    num_bytes=place.num_bytes,
                    iteration=job.iteration,
                    level=place.level.value,
                    checksum=checksum(content[place.offset : place.offset + place.num_bytes]),
                    tensors=_mark_absent(place.tensors, absent),
                )
                for place in job.layout.units
            }
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
            records=(records.encode(job.record),),
        )


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


def unpin(region: Region) -> None:
    """Undo `pin`, before the memory is unmapped."""
    view = torch.frombuffer(region.mapping, dtype=torch.uint8)
    torch.cuda.cudart().cudaHostUnregister(view.data_ptr())


def pin(region: Region) -> None:
    """Let the GPU copy into a region's memory directly.

    Raises:
        SnapshotError: if the driver refuses, for example because too much memory is locked.
    """
    view = torch.frombuffer(region.mapping, dtype=torch.uint8)
    error = torch.cuda.cudart().cudaHostRegister(view.data_ptr(), view.numel(), 0)
    if int(error) != 0:
        raise SnapshotError(f"cudaHostRegister of {view.numel()} bytes failed with {error}")
