"""Copies of live state into regions and slots: tensor by tensor, or packed (engine/snapshots/staging.py).

The worker that copies is engine/snapshots/writer.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_ft.engine.memory.layout import FileLayout, UnitPlace
from moe_ft.engine.memory.regions import MappedFile, UnitPool
from moe_ft.engine.snapshots.job import SnapshotRequest
from moe_ft.engine.snapshots.staging import Chunk, PackedPart, Staging, cut_into_chunks
from moe_ft.errors import SnapshotError
from moe_ft.format.entries import TensorEntry, tensor_pieces
from moe_ft.format.packings import Packing
from moe_ft.state import offloaded
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import DTYPES, dtype_name, follows_masters, own_slice, whole_tensor

_BATCH = 256

Absent = set[tuple[str, str]]  # (parameter, key) of tensors that do not exist yet


class StateCopier:
    """Copies the contents of snapshots. Owned by the copy worker; the training thread calls `mark_ready`."""

    def __init__(
        self, parameters: Sequence[LocalParameter], pool: UnitPool | None, staging_bytes: int
    ) -> None:
        """Take a rank's state, and the device memory in which snapshots are packed; 0 if nothing is."""
        self._parameters = {each.name: each for each in parameters}
        self._pool = pool
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._stream: Any = None
        optimizers = {id(each.optimizer): each.optimizer for each in parameters}
        self._offloading = [each for each in optimizers.values() if offloaded.offloader_of(each)]
        self._known: dict[tuple[int, int], tuple[FileLayout, _Copies]] = {}
        self._chunks: list[Chunk] = []

    def start(self) -> None:
        """Allocate the stream and the buffers on the device."""
        devices = {each.parameter.device for each in self._parameters.values()}
        if any(device.type == "cuda" for device in devices):
            self._stream = torch.cuda.Stream()
        if self._staging_bytes and devices:
            self._staging = Staging(self._staging_bytes, devices.pop())
            self._staging.warm_up()
        for optimizer in self._offloading:
            offloaded.watch(optimizer)

    def park(self) -> None:
        """Start what Megatron itself will copy to the host before the next step: it is read there."""
        for optimizer in self._offloading:
            offloaded.park(optimizer)

    def mark_ready(self) -> Any:
        """Return the event after which the state may be read, None if it may be at once."""
        if self._stream is None:
            return None
        ready = torch.cuda.Event()
        ready.record()
        return ready

    def copy(
        self,
        request: SnapshotRequest,
        ready: Any,
        at_half: Callable[[], None],
        at_end: Callable[[], None],
    ) -> Absent:
        """Copy everything that a snapshot holds; return the tensors that do not exist yet.

        Args:
            at_half: called when half of the copies are complete or queued.
            at_end: called when all copies are complete or queued, in the stream that copies.
        """
        copies = self._copies_of(request)
        stream = self._stream
        with torch.no_grad(), torch.cuda.stream(stream) if stream else nullcontext():
            if stream:
                stream.wait_event(ready)
            if self._staging is None:
                absent = self._copy_each(copies, at_half)
            else:
                absent = self._copy_packed(self._staging, copies, at_half)
            at_end()
            if stream:
                stream.synchronize()
            if self._staging is not None:
                self._staging.wait()
        if self._offloading:  # else these would keep memory of the device that Megatron frees
            for copy in (copy for group in copies for copy in group.copies):
                copy.forget_source()
        return absent

    def check(self) -> None:
        """Raise SnapshotError if masters of the last snapshot cannot be restored from what was packed."""
        for chunk in self._chunks:
            chunk.check()

    def _copy_each(self, copies: Sequence["_Copies"], at_half: Callable[[], None]) -> Absent:
        each = [copy for group in copies for copy in group.copies]
        half = len(each) // 2
        absent = self._copy_all(each[:half])
        at_half()
        return absent | self._copy_all(each[half:])

    def _copy_all(self, copies: Sequence["_Copy"]) -> Absent:
        absent: Absent = set()
        for start in range(0, len(copies), _BATCH):
            sources, targets = [], []
            for copy in copies[start : start + _BATCH]:
                source = copy.find_source()
                if source is None:
                    absent.add((copy.local.name, copy.entry.key))
                else:
                    sources.append(source)
                    targets.append(copy.target)
            # Now, because Megatron may have moved some of them since the batch before.
            offloaded.settle(self._offloading, self._stream)
            # Queue copies from the device first: this thread copies what lies on the host while they run.
            for is_on_device in (True, False):
                chosen = [at for at, each in enumerate(sources) if each.is_cuda == is_on_device]
                batch = [targets[at] for at in chosen], [sources[at] for at in chosen]
                if chosen:
                    torch._foreach_copy_(*batch, self._stream is not None)
        return absent

    def _copy_packed(
        self, staging: Staging, copies: Sequence["_Copies"], at_half: Callable[[], None]
    ) -> Absent:
        absent: Absent = set()
        self._chunks = []
        for group in copies:
            chunks, missing = group.chunks(staging.chunk_bytes)
            self._chunks += chunks
            absent |= missing
        half = len(self._chunks) // 2
        staging.copy(self._chunks[:half])
        at_half()
        staging.copy(self._chunks[half:])
        return absent

    def _copies_of(self, request: SnapshotRequest) -> list["_Copies"]:
        """Return the copies into a region, which are prepared once per layout, and those into slots."""
        key = (request.region.number, request.position)
        known = self._known.get(key)
        if known is None or known[0] is not request.layout:
            places = request.layout.snapshots[request.position]
            copies = _Copies(list(self._copies_to(request.region, places)))
            known = self._known[key] = (request.layout, copies)
        if not request.slots:
            return [known[1]]
        assert self._pool is not None
        return [known[1], _Copies(list(self._copies_to(self._pool, request.slots)))]

    def _copies_to(self, file: MappedFile, places: Iterable[UnitPlace]) -> Iterator["_Copy"]:
        for place in places:
            _clear_gaps(file, place)
            for tensor in place.tensors:
                local = self._parameters[tensor.parameter]
                if (local.start, local.end) != (tensor.start, tensor.end):
                    local = replace(local, start=tensor.start, end=tensor.end)
                yield _Copy(
                    local=local, entry=tensor, file=file, offset=place.offset + tensor.offset
                )


def _clear_gaps(file: MappedFile, place: UnitPlace) -> None:
    """Write zeros where nothing is copied, which checksums count: another layout may have left bytes there.

    In a slot, that is one of another unit. A peer that repeats a step has these bytes from the version
    before, so they are the same in all regions and slots.
    """
    end = place.offset
    for tensor in place.tensors:
        for piece in tensor_pieces(tensor):
            start = place.offset + tensor.offset + piece.offset
            file.mapping[end:start] = bytes(start - end)
            end = start + piece.num_bytes


class _Copies:
    """Copies of a snapshot into one file. Its packing tables are valid until a tensor is replaced."""

    def __init__(self, copies: Sequence["_Copy"]) -> None:
        self.copies = copies
        self._chunks: list[Chunk] = []
        self._of: list[tuple[int, int]] = []  # addresses of the tensors in the tables

    def chunks(self, chunk_bytes: int) -> tuple[list[Chunk], Absent]:
        """Return all chunks, and the tensors that do not exist yet."""
        absent: Absent = set()
        parts = []
        for copy in self.copies:
            source, weights = copy.find_source(), copy.find_weights()
            if source is None:
                absent.add((copy.local.name, copy.entry.key))
            else:
                parts.append(copy.part(source, weights))
        addresses = [
            (part.source.data_ptr(), 0 if part.weights is None else part.weights.data_ptr())
            for part in parts
        ]
        if not self._chunks or addresses != self._of:
            self._chunks = list(cut_into_chunks(parts, chunk_bytes))
            self._of = addresses
            for chunk in self._chunks:
                chunk.finish()
        return self._chunks, absent


@dataclass(kw_only=True, slots=True, eq=False)
class _Copy:
    """Copy of one tensor into a region or a slot.

    Attributes:
        whole, address: the tensor that `source` was cut from, and the address of its memory. Optimizers may
            replace either, so both are compared before each copy.
    """

    local: LocalParameter
    entry: TensorEntry
    file: MappedFile
    offset: int
    whole: torch.Tensor | None = None
    address: int = 0
    source: torch.Tensor | None = None
    _target: torch.Tensor | None = None

    @property
    def target(self) -> torch.Tensor:
        """Target of a copy without packing."""
        if self.entry.packing != Packing.EXACT:
            raise SnapshotError(f"{self.local.name}/{self.entry.key} can only be packed")
        if self._target is None:
            self._target = torch.frombuffer(
                self.file.view,
                dtype=DTYPES[self.entry.dtype],
                count=self.entry.end - self.entry.start,
                offset=self.offset,
            )
        return self._target

    def find_source(self) -> torch.Tensor | None:
        """Return the tensor to copy now, None if it does not exist yet."""
        whole = whole_tensor(self.local, self.entry.key)
        if whole is None:
            return None
        address = whole.data_ptr()
        is_known = whole is self.whole and address == self.address and whole.is_contiguous()
        if not is_known or self.source is None:
            self.whole = whole
            self.address = address
            self.source = own_slice(self.local, self.entry.key, whole)
            expected = DTYPES[self.entry.dtype]
            is_rounded = self.entry.key == "weight" and follows_masters(self.local)
            if self.source.dtype != expected and not is_rounded:
                raise SnapshotError(
                    f"{self.local.name}/{self.entry.key} is {self.source.dtype}, expected {expected}"
                )
        return self.source

    def forget_source(self) -> None:
        """Let go of the tensor."""
        self.whole = self.source = None

    def find_weights(self) -> torch.Tensor | None:
        """Return the weights that forward uses, if masters are split into these and remainders."""
        if self.entry.packing != Packing.SPLIT:
            return None
        weights = whole_tensor(self.local, "weight")
        assert weights is not None
        return own_slice(self.local, "weight", weights)

    def part(self, source: torch.Tensor, weights: torch.Tensor | None) -> PackedPart:
        """Return what to pack, with its target."""
        dtype, packing = self.entry.dtype, Packing(self.entry.packing)
        if source.dtype != DTYPES[dtype]:  # masters, of weights that follow them
            packing = {"BF16": Packing.BF16, "F16": Packing.FP16}[dtype]
            dtype = dtype_name(source.dtype)
        return PackedPart(
            name=f"{self.local.name}/{self.entry.key}",
            source=source,
            weights=weights,
            dtype=dtype,
            packing=packing,
            file=self.file.mapping,
            offset=self.offset,
        )
