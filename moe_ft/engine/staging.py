"""The way of packed state from the device to a file in host memory: through two buffers of bounded size.

While one buffer is packed, the other one is copied. A chunk is what is packed at once: the images of some
stretches of the file, so that thousands of small tensors go in one copy. What arrived is compared with the
sums that were made while it was packed.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from kernels.checksum import sum_chunks
from kernels.pack_table import PackTable
from kernels.packing import ALIGNMENT, Segment
from moe_ft.engine.packed import segments_of
from moe_ft.errors import SnapshotError
from moe_ft.format.packings import Packing, Piece, pieces

# A tensor is cut at multiples of so many numbers: then all of its pieces are cut at whole lines.
CUT = 8192


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedPart:
    """One tensor to pack.

    Attributes:
        name: for messages.
        source: ``[n]``, live.
        weights: ``[n]`` BF16, of which it is the masters, where these are split.
        dtype: safetensors' name of its type.
        packing: how it is kept.
        file, offset: where; in bytes, a multiple of the alignment.
    """

    name: str
    source: torch.Tensor
    weights: torch.Tensor | None
    dtype: str
    packing: Packing
    file: mmap.mmap
    offset: int

    def pieces(self, count: int) -> tuple[Piece, ...]:
        """Return the pieces that so many of its numbers would have."""
        return pieces(self.dtype, count, self.packing)

    def buffer_bytes(self, count: int) -> int:
        """Return the bytes that so many of its numbers take in a buffer, in whole lines."""
        return sum(_whole_lines(piece.num_bytes) for piece in self.pieces(count))


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Stretch:
    """Bytes of a file that have an image in a buffer."""

    file: mmap.mmap
    start: int
    end: int
    image: int  # where it begins

    @property
    def target(self) -> torch.Tensor:
        return torch.frombuffer(
            self.file, dtype=torch.uint8, count=self.end - self.start, offset=self.start
        )


@dataclass(slots=True)
class Chunk:
    """Segments that are packed at once.

    Attributes:
        names: ``[segment]`` of the tensors.
        places: ``[segment]`` where its numbers and its side words are in the file, each from, to.
        used: bytes of the buffer.
    """

    segments: list[Segment] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    places: list[tuple[mmap.mmap, tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    stretches: list[_Stretch] = field(default_factory=list)
    used: int = 0
    table: PackTable | None = None
    copies: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    sums: torch.Tensor | None = None

    def add(self, part: PackedPart, first: int, count: int) -> None:
        """Add some numbers of a tensor, whose first is a multiple of CUT."""
        whole, before = part.pieces(len(part.source)), part.pieces(first)
        images, starts = [], []
        for piece, cut, own in zip(whole, before, part.pieces(count), strict=True):
            start = part.offset + piece.offset + cut.num_bytes
            images.append(replace(own, offset=self._image(part.file, start, own.num_bytes)))
            starts.append(start)
        source = part.source[first : first + count]
        weights = None if part.weights is None else part.weights[first : first + count]
        for segment in segments_of(part.packing, tuple(images), source, weights):
            at = [image.offset for image in images]
            start = starts[at.index(segment.offset)]
            side = starts[at.index(segment.side_offset)] if segment.side_words else 0
            self.segments.append(segment)
            self.names.append(part.name)
            self.places.append(
                (
                    part.file,
                    (start, start + segment.num_bytes),
                    (side, side + segment.side_bytes),
                )
            )

    def _image(self, file: mmap.mmap, start: int, num_bytes: int) -> int:
        """Return where in the buffer the image of some bytes of a file is to be."""
        image, end = self.used, start + num_bytes
        self.used += _whole_lines(num_bytes)
        last = self.stretches[-1] if self.stretches else None
        if last is not None and last.file is file and _whole_lines(last.end) == start:
            last.end = end
        else:
            self.stretches.append(_Stretch(file, start, end, image))
        return image

    def finish(self) -> None:
        """Make the tables, for as often as the chunk is packed."""
        self.table = PackTable(self.segments)
        self.copies = [(stretch.image, stretch.target) for stretch in self.stretches]

    def check(self) -> None:
        """Compare what has arrived in the file with what was packed.

        Raises:
            SnapshotError: if it is not the same, or weights were not rounded from their masters.
        """
        assert self.sums is not None
        found = self.sums.view(torch.uint64).tolist()
        for (total, num_wrong), segment, name, place in zip(
            found, self.segments, self.names, self.places, strict=True
        ):
            if num_wrong:
                raise SnapshotError(
                    f"{num_wrong} weights of {name} are not their fp32 masters rounded to BF16, so "
                    "these cannot be split: use master=exact"
                )
            file, (start, end), (side_start, side_end) = place
            with memoryview(file) as content:
                arrived = sum_chunks(
                    content[start:end], content[side_start:side_end], segment.side_words
                )
            if arrived != total:
                raise SnapshotError(f"{name} was changed on its way from the device to the host")


def cut_into_chunks(parts: Iterable[PackedPart], num_bytes: int) -> Iterator[Chunk]:
    """Yield chunks that together pack all parts.

    Args:
        parts: in the order of the file.
        num_bytes: that a chunk may take, enough for CUT numbers of any kind.
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
    """Return how many numbers go into the rest of a chunk; none where that would be a small piece."""
    left = len(part.source) - first
    if part.buffer_bytes(left) <= room:
        return left
    if room < num_bytes // 4:
        return 0
    return min(left, room // part.buffer_bytes(CUT) * CUT)


class Staging:
    """Two buffers on the device. Owned by the copy thread."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate the buffers.

        Args:
            num_bytes: of both together.
            device: of the state.
        """
        self.chunk_bytes = num_bytes // 2 // ALIGNMENT * ALIGNMENT
        self._buffers = [
            torch.zeros(self.chunk_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._is_on_gpu = device.type == "cuda"
        self._num_packed = 0
        self._copy_stream = torch.cuda.Stream() if self._is_on_gpu else None
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def warm_up(self) -> None:
        """Have the kernel compiled: the first snapshot, which training waits for, is no time for that."""
        buffer = self._buffers[0]
        PackTable([Segment(tensor=torch.zeros(1, device=buffer.device))]).pack(buffer)
        if self._is_on_gpu:
            torch.cuda.synchronize()

    def copy(self, chunks: Sequence[Chunk]) -> None:
        """Pack chunks and copy them into their files; on a GPU, that continues after the return.

        Packing is in the current stream, copying in one of its own.
        """
        for chunk in chunks:
            assert chunk.table is not None
            number = self._num_packed % 2
            buffer, copied = self._buffers[number], self._copied[number]
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)
            chunk.sums = chunk.table.pack(buffer)
            if self._copy_stream is not None:
                self._copied[number] = self._copy_behind(chunk, buffer)
            else:
                for image, target in chunk.copies:
                    target.copy_(buffer[image : image + len(target)])
            self._num_packed += 1

    def _copy_behind(self, chunk: Chunk, buffer: torch.Tensor) -> torch.cuda.Event:
        """Copy a chunk when it is packed; return the event after which its buffer is free."""
        assert self._copy_stream is not None
        assert chunk.sums is not None
        self._copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copy_stream):
            for image, target in chunk.copies:
                target.copy_(buffer[image : image + len(target)], non_blocking=True)
            # The sums were allocated in the other stream, and must not be freed before this copy.
            chunk.sums.record_stream(self._copy_stream)
            chunk.sums = chunk.sums.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def wait(self) -> None:
        """Wait until everything has arrived."""
        if self._copy_stream is not None:
            self._copy_stream.synchronize()
