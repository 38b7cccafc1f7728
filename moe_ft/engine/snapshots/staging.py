"""Transfer of packed state from the device to files in host memory, through two small buffers, and back.

While one buffer is packed, the other is copied. A chunk is packed at once. It holds images of stretches of
the file, so that one copy transfers thousands of small tensors. The places of pieces are in
moe_ft/format/packings.py.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from moe_ft.arithmetic import round_up
from moe_ft.errors import SnapshotError
from moe_ft.format.entries import TensorEntry, tensor_bytes, tensor_pieces
from moe_ft.format.packings import ALIGNMENT_BYTES, PackedPiece, Packing, pieces
from moe_ft.kernels.number_formats import BF16, E4M3, E5M2, FP16, NumberFormat, ScaleKind
from moe_ft.kernels.pack_table import PackTable
from moe_ft.kernels.packing import Segment
from moe_ft.state.slices import DTYPES

_FORMATS: dict[Packing, tuple[NumberFormat, ScaleKind | None]] = {
    Packing.BF16: (BF16, None),
    Packing.FP16: (FP16, None),
    Packing.E4M3: (E4M3, None),
    Packing.E5M2: (E5M2, None),
    Packing.E4M3_BLOCKS: (E4M3, ScaleKind.FP32),
    Packing.E5M2_BLOCKS: (E5M2, ScaleKind.FP32),
    Packing.E4M3_POWER_BLOCKS: (E4M3, ScaleKind.POWER_OF_TWO),
    Packing.E5M2_POWER_BLOCKS: (E5M2, ScaleKind.POWER_OF_TWO),
}


def segments_of(
    packing: Packing,
    parts: tuple[PackedPiece, ...],
    tensor: torch.Tensor,
    weights: torch.Tensor | None,
) -> Iterator[Segment]:
    """Yield the segments of one tensor.

    Args:
        tensor: ``[n]``, live.
        weights: ``[n]`` BF16 weights of the masters in `tensor`, if these are split.
    """
    first, *others = (piece.offset for piece in parts)
    if packing is Packing.EXACT:
        yield Segment(tensor=tensor, offset=first)
    elif packing is Packing.SPLIT:
        assert weights is not None
        remainder, carry = others
        yield Segment(tensor=weights, offset=first)
        yield Segment(tensor=tensor, offset=remainder, side_offset=carry, weights=weights)
    else:
        to, scales = _FORMATS[packing]
        side = others[0] if others else 0
        yield Segment(tensor=tensor, offset=first, to=to, scales=scales, side_offset=side)


def unpack_into(target: torch.Tensor, entry: TensorEntry, content: memoryview) -> None:
    """Unpack a tensor from a file into the live one, ``[n]`` on any device."""
    part = content[entry.offset : entry.offset + tensor_bytes(entry)]
    packing = Packing(entry.packing)
    if packing is Packing.EXACT:
        target.copy_(torch.frombuffer(part, dtype=DTYPES[entry.dtype]))
        return
    parts = tensor_pieces(entry)
    # The kernels read whole lines.
    buffer = torch.zeros(round_up(len(part), ALIGNMENT_BYTES), dtype=torch.uint8)
    buffer[: len(part)] = torch.frombuffer(part, dtype=torch.uint8)
    buffer = buffer.to(target.device)
    weights = None
    if packing is Packing.SPLIT:
        weights = buffer[: parts[0].num_bytes].view(torch.bfloat16)
    # The weights of split masters are only read, from the buffer.
    segments = [
        segment
        for segment in segments_of(packing, parts, target, weights)
        if segment.tensor is target
    ]
    PackTable(segments).unpack(buffer)


# Tensors are cut at multiples of this many numbers, so that all their pieces are cut at whole lines.
CUT = 8192


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedPart:
    """One tensor to pack.

    Attributes:
        source: ``[n]``, live.
        weights: ``[n]`` BF16 weights of the masters in `source`, if these are split.
        file, offset: target; the offset is in bytes, a multiple of the alignment.
    """

    name: str
    source: torch.Tensor
    weights: torch.Tensor | None
    dtype: str
    packing: Packing
    file: mmap.mmap
    offset: int

    def pieces(self, count: int) -> tuple[PackedPiece, ...]:
        """Return the pieces of so many of its numbers."""
        return pieces(self.dtype, count, self.packing)

    def buffer_bytes(self, count: int) -> int:
        """Return the bytes that this many of its numbers take in a buffer, in whole lines."""
        return sum(_whole_lines(piece.num_bytes) for piece in self.pieces(count))


def _whole_lines(num_bytes: int) -> int:
    return round_up(num_bytes, ALIGNMENT_BYTES)


@dataclass(slots=True)
class _Stretch:
    """Bytes of a file that have an image in a buffer."""

    file: mmap.mmap
    start: int
    end: int
    image: int  # its offset in the buffer

    @property
    def target(self) -> torch.Tensor:
        return torch.frombuffer(
            memoryview(self.file), dtype=torch.uint8, count=self.end - self.start, offset=self.start
        )


@dataclass(slots=True)
class Chunk:
    """Segments that are packed at once.

    Attributes:
        num_wrong: ``[segment]`` weights that were not rounded from their masters, after packing.
    """

    segments: list[Segment] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    stretches: list[_Stretch] = field(default_factory=list)
    used: int = 0
    table: PackTable | None = None
    copies: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    num_wrong: torch.Tensor | None = None

    def add(self, part: PackedPart, first: int, count: int) -> None:
        """Add some numbers of a tensor, whose first is a multiple of CUT."""
        whole, before = part.pieces(len(part.source)), part.pieces(first)
        images = []
        for piece, cut, own in zip(whole, before, part.pieces(count), strict=True):
            start = part.offset + piece.offset + cut.num_bytes
            images.append(replace(own, offset=self._image(part.file, start, own.num_bytes)))
        source = part.source[first : first + count]
        weights = None if part.weights is None else part.weights[first : first + count]
        for segment in segments_of(part.packing, tuple(images), source, weights):
            self.segments.append(segment)
            self.names.append(part.name)

    def _image(self, file: mmap.mmap, start: int, num_bytes: int) -> int:
        """Reserve room in the buffer for some bytes of a file; return its offset."""
        image, end = self.used, start + num_bytes
        self.used += _whole_lines(num_bytes)
        last = self.stretches[-1] if self.stretches else None
        if last is not None and last.file is file and _whole_lines(last.end) == start:
            last.end = end
        else:
            self.stretches.append(_Stretch(file, start, end, image))
        return image

    def finish(self) -> None:
        """Make the tables once, however often the chunk is packed."""
        self.table = PackTable(self.segments)
        self.copies = [(stretch.image, stretch.target) for stretch in self.stretches]

    def check(self) -> None:
        """Raise SnapshotError if weights were not rounded from their masters."""
        assert self.num_wrong is not None
        for num_wrong, name in zip(self.num_wrong.tolist(), self.names, strict=True):
            if num_wrong:
                raise SnapshotError(
                    f"{num_wrong} weights of {name} are not their fp32 masters rounded to BF16, so "
                    "these cannot be split: use master=exact"
                )


def cut_into_chunks(parts: Iterable[PackedPart], num_bytes: int) -> Iterator[Chunk]:
    """Yield chunks that together pack all parts.

    Args:
        num_bytes: limit of a chunk, enough for CUT numbers of any kind.
    """
    chunk = Chunk()
    for part in parts:
        first = 0
        while first < len(part.source):
            count = _fitting(part, first, num_bytes - chunk.used, num_bytes)
            if count:
                chunk.add(part, first, count)
                first += count
            else:
                assert chunk.segments, "a chunk must hold CUT numbers"
                yield chunk
                chunk = Chunk()
    if chunk.segments:
        yield chunk


def _fitting(part: PackedPart, first: int, room: int, num_bytes: int) -> int:
    """Return how many numbers go into the rest of a chunk; 0 if that would be a small piece."""
    left = len(part.source) - first
    if part.buffer_bytes(left) <= room:
        return left
    if room < num_bytes // 4:
        return 0
    return min(left, room // part.buffer_bytes(CUT) * CUT)


class Staging:
    """Two buffers on the device. Owned by the copy thread."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the buffers."""
        self.chunk_bytes = num_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._buffers = [
            torch.zeros(self.chunk_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._num_packed = 0
        self._copy_stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def warm_up(self) -> None:
        """Compile the kernel now, because training waits for the first snapshot.

        Nobody waits for it to have run: a snapshot waits for all that training has queued before.
        """
        buffer = self._buffers[0]
        PackTable([Segment(tensor=torch.zeros(1, device=buffer.device))]).pack(buffer)

    def copy(self, chunks: Sequence[Chunk]) -> None:
        """Pack chunks and copy them into their files; on a GPU this continues after the return.

        Packing uses the current stream, copying a stream of its own.
        """
        for chunk in chunks:
            assert chunk.table is not None
            number = self._num_packed % 2
            buffer, copied = self._buffers[number], self._copied[number]
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)
            chunk.num_wrong = chunk.table.pack(buffer)
            if self._copy_stream is not None:
                self._copied[number] = self._copy_after_packing(chunk, buffer)
            else:
                for image, target in chunk.copies:
                    target.copy_(buffer[image : image + len(target)])
            self._num_packed += 1

    def _copy_after_packing(self, chunk: Chunk, buffer: torch.Tensor) -> torch.cuda.Event:
        assert self._copy_stream is not None
        assert chunk.num_wrong is not None
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for image, target in chunk.copies:
                target.copy_(buffer[image : image + len(target)], non_blocking=True)
            # The counts were allocated in the other stream and must not be freed before this copy.
            chunk.num_wrong.record_stream(self._copy_stream)
            chunk.num_wrong = chunk.num_wrong.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def wait(self) -> None:
        """Wait until all copies are complete."""
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
