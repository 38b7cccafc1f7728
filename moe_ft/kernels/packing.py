"""Packing of many tensors into one buffer, each in its own format, and unpacking.

This file is the reference, in torch. On a GPU kernels/triton_packing.py computes the same bits in one launch;
`PackTable` in kernels/pack_table.py chooses. The caller decides the places of tensors in a buffer.

An fp32 master weight can be split into the BF16 weight that forward uses and the remaining bits. If the
BF16 weights are kept anyway, a master costs 2 bytes and 1 bit instead of 4 bytes. The 2 bytes are the lower
half of the master's bits, the remainder. The bit, called carry, tells whether the upper half was rounded up.
The remainder alone cannot tell, because the upper half decides how a tie is rounded (an even weight has
65,537 masters). The direction of rounding therefore does not matter. Masters are restored bit for bit, except
a NaN with bits set in its lower half: only the upper half of a NaN is kept. A weight that was not rounded
from its master cannot be split; such weights are counted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch

from moe_ft.kernels.number_formats import (
    BLOCK,
    FORMAT_OF,
    FP32,
    NumberFormat,
    ScaleKind,
    convert,
    num_blocks,
    round_to_blocks,
    widen_blocks,
)

ALIGNMENT = 64
_AT_ONCE = 1 << 18  # numbers, whose dozens of intermediate results must not take much memory


class Way(IntEnum):
    """Ways to pack a tensor; the kernels know the numbers."""

    AS_IT_IS = 0
    CONVERTED = 1
    FP32_SCALES = 2
    POWER_OF_TWO_SCALES = 3
    SPLIT = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """One tensor and its place in a buffer.

    Attributes:
        tensor: ``[n]``, contiguous, on the buffer's device: the source of packing and target of unpacking.
        offset: of its numbers in the buffer, in bytes, a multiple of ALIGNMENT. The numbers, and the bytes
            at side_offset, take whole lines of ALIGNMENT bytes, padded with zeros; the buffer has room for
            the last line.
        to: the format in the buffer; None keeps the bits unchanged, for any dtype.
        scales: kind of the scales that blocks of 128 numbers have in an 8-bit format.
        weights: ``[n]`` BF16 weights of a tensor of fp32 masters; the buffer gets what they leave out.
        side_offset: of the scales (fp32, one per block), or of split masters' carries (one bit each).
    """

    tensor: torch.Tensor
    offset: int = 0
    to: NumberFormat | None = None
    scales: ScaleKind | None = None
    weights: torch.Tensor | None = None
    side_offset: int = 0

    @property
    def way(self) -> Way:
        """The way to pack it."""
        if self.weights is not None:
            return Way.SPLIT
        if self.scales is not None:
            is_fp32 = self.scales is ScaleKind.FP32
            return Way.FP32_SCALES if is_fp32 else Way.POWER_OF_TWO_SCALES
        is_same = self.to is None or self.to.dtype is self.tensor.dtype
        return Way.AS_IT_IS if is_same else Way.CONVERTED

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in the buffer."""
        if self.weights is not None:
            return 2
        return self.tensor.element_size() if self.to is None else self.to.num_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers in the buffer."""
        return self.tensor.numel() * self.number_bytes

    @property
    def side_bytes(self) -> int:
        """Bytes of its scales or carries in the buffer."""
        if self.weights is not None:
            return -(-self.tensor.numel() // 8)
        return 0 if self.scales is None else 4 * num_blocks(self.tensor.numel())

    def check(self) -> None:
        """Raise ValueError if this segment cannot be packed."""
        if not self.tensor.is_contiguous() or self.tensor.dim() != 1:
            raise ValueError("a segment's tensor must be flat and contiguous")
        if self.offset % ALIGNMENT or self.side_offset % ALIGNMENT:
            raise ValueError(f"offsets in a buffer must be multiples of {ALIGNMENT}")
        if self.scales is not None and (self.to is None or self.to.num_bytes != 1):
            raise ValueError("only 8-bit formats have scales")
        if self.to is not None and self.tensor.dtype not in FORMAT_OF:
            raise ValueError(f"{self.tensor.dtype} cannot be converted")
        if self.weights is None:
            return
        pair = self.tensor.dtype, self.weights.dtype
        if pair != (torch.float32, torch.bfloat16) or self.to is not None:
            raise ValueError("only fp32 masters are split, and only from BF16 weights")
        if self.weights.shape != self.tensor.shape or not self.weights.is_contiguous():
            raise ValueError("split masters and their weights must have one shape")


def pack_by_reference(segments: Sequence[Segment], buffer: torch.Tensor) -> torch.Tensor:
    """Pack tensors; see `PackTable.pack` in kernels/pack_table.py."""
    counts = [sum(_pack(part, buffer) for part in _parts(segment)) for segment in segments]
    return torch.tensor(counts, dtype=torch.int64)


def unpack_by_reference(segments: Sequence[Segment], buffer: torch.Tensor) -> None:
    """Unpack tensors; see `PackTable.unpack` in kernels/pack_table.py."""
    for segment in segments:
        for part in _parts(segment):
            part.tensor.copy_(_unpacked(part, buffer))


def _parts(segment: Segment) -> Iterator[Segment]:
    """Yield pieces of a segment that are small enough for intermediate results to take little memory."""
    count = segment.tensor.numel()
    if count <= _AT_ONCE:
        yield segment
        return
    side_of = 8 if segment.weights is not None else BLOCK / 4  # numbers per byte
    for first in range(0, count, _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        yield replace(
            segment,
            tensor=segment.tensor[part],
            weights=None if segment.weights is None else segment.weights[part],
            offset=segment.offset + first * segment.number_bytes,
            side_offset=segment.side_offset + int(first / side_of),
        )


def _pack(segment: Segment, buffer: torch.Tensor) -> int:
    """Pack numbers; return the number of masters that cannot be split."""
    tensor, num_wrong = segment.tensor, 0
    if segment.weights is not None:
        parts = split_masters(tensor, segment.weights)
        numbers, side, num_wrong = parts.remainders, parts.carries, parts.num_wrong
        _put(side, buffer, segment.side_offset)
    elif segment.scales is not None:
        assert segment.to is not None
        numbers, side = round_to_blocks(convert(tensor, FP32), segment.to, segment.scales)
        _put(side, buffer, segment.side_offset)
    else:
        numbers = tensor if segment.to is None else convert(tensor, segment.to)
    _put(numbers, buffer, segment.offset)
    return num_wrong


def _put(numbers: torch.Tensor, buffer: torch.Tensor, offset: int) -> None:
    """Write numbers, and zeros up to the end of their last line."""
    data = numbers.view(torch.uint8)
    end = offset + len(data)
    buffer[offset:end] = data
    buffer[end : end + -len(data) % ALIGNMENT] = 0


def _unpacked(segment: Segment, buffer: torch.Tensor) -> torch.Tensor:
    of = FORMAT_OF.get(segment.tensor.dtype)
    numbers = buffer[segment.offset : segment.offset + segment.num_bytes]
    side = buffer[segment.side_offset : segment.side_offset + segment.side_bytes]
    if segment.weights is not None:
        return join_masters(numbers.view(torch.int16), side, segment.weights)
    if segment.to is None:
        return numbers.view(segment.tensor.dtype)
    assert of is not None
    typed = numbers.view(segment.to.dtype)
    if segment.scales is None:
        return convert(typed, of)
    wide = widen_blocks(typed, side.view(torch.float32))
    return convert(wide, of)


_LOWER, _INFINITY, _QUIET = 0xFFFF, 0x7F80, 0x40
_MAGNITUDE = 0x7FFF


@dataclass(frozen=True, slots=True)
class SplitMasters:
    """Masters without their weights.

    Attributes:
        remainders: ``[n]`` int16, the lower halves of the bits; of a NaN the upper half.
        carries: ``[ceil(n / 8)]`` uint8, one bit per weight, the lowest first: whether it was rounded up.
        num_wrong: number of weights that were not rounded from their masters, which cannot be restored.
    """

    remainders: torch.Tensor
    carries: torch.Tensor
    num_wrong: int


def split_masters(masters: torch.Tensor, weights: torch.Tensor) -> SplitMasters:
    """Return the bits that weights leave out of their masters.

    Args:
        masters: ``[n]`` fp32.
        weights: ``[n]`` BF16, rounded from them in either direction.
    """
    bits = masters.contiguous().view(torch.int32)
    lower, upper = bits & _LOWER, (bits >> 16) & _LOWER
    codes = weights.contiguous().view(torch.int16).to(torch.int32) & _LOWER
    are_both_nan = _is_nan(codes) & torch.isnan(masters)
    carries = (codes != upper) & ~are_both_nan
    is_wrong = carries & ((codes - 1 != upper) | _is_nan(codes))
    # A NaN whose bits are all in the lower half would come back as an infinity.
    of_nan = torch.where(upper & _MAGNITUDE == _INFINITY, upper | _QUIET, upper)
    remainders = torch.where(are_both_nan, of_nan, lower)
    return SplitMasters(
        remainders=remainders.to(torch.int16),
        carries=torch.from_numpy(np.packbits(carries.numpy(), bitorder="little")),
        num_wrong=int(is_wrong.sum()),
    )


def join_masters(
    remainders: torch.Tensor, carries: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the ``[n]`` fp32 masters that `split_masters` was given with these weights."""
    lower = remainders.to(torch.int32) & _LOWER
    codes = weights.contiguous().view(torch.int16).to(torch.int32) & _LOWER
    bits = np.unpackbits(carries.numpy(), count=len(lower), bitorder="little")
    upper = codes - torch.from_numpy(bits).to(torch.int32)
    return torch.where(_is_nan(codes), lower << 16, (upper << 16) | lower).view(torch.float32)


def _is_nan(codes: torch.Tensor) -> torch.Tensor:
    return codes & _MAGNITUDE > _INFINITY
