"""Pieces of packed tensors, as segments that kernels pack and unpack.

The places of pieces are in moe_ft/format/packings.py; the transfer to a region is
engine/snapshots/staging.py.
"""

from collections.abc import Iterator

import torch

from kernels.block_scaling import ScaleKind
from kernels.number_formats import BF16, E4M3, E5M2, FP16, NumberFormat
from kernels.pack_table import PackTable
from kernels.packing import Segment
from moe_ft.arithmetic import round_up
from moe_ft.format.entries import TensorEntry, tensor_bytes, tensor_pieces
from moe_ft.format.packings import ALIGNMENT_BYTES, Packing, Piece
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
    parts: tuple[Piece, ...],
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
