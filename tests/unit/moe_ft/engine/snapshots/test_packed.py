"""Packed tensors come back from files as the formats that they are kept in say."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.snapshots.staging import segments_of, unpack_into
from moe_ft.format.entries import TensorEntry, tensor_bytes, tensor_pieces
from moe_ft.format.packings import ALIGNMENT_BYTES, DTYPE_BYTES, Packing, pieces
from moe_ft.kernels.number_formats import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    NumberFormat,
    ScaleKind,
    convert,
    round_to_blocks,
    widen_blocks,
)
from moe_ft.kernels.packing import Segment, join_masters, pack_by_reference, split_masters
from moe_ft.state.slices import DTYPES
from tests.unit.moe_ft.kernels.packs import any_numbers, in_a_row, same_bits

SHORT: dict[Packing, tuple[NumberFormat, ScaleKind | None]] = {
    Packing.BF16: (BF16, None),
    Packing.FP16: (FP16, None),
    Packing.E4M3: (E4M3, None),
    Packing.E5M2: (E5M2, None),
    Packing.E4M3_BLOCKS: (E4M3, ScaleKind.FP32),
    Packing.E5M2_BLOCKS: (E5M2, ScaleKind.FP32),
    Packing.E4M3_POWER_BLOCKS: (E4M3, ScaleKind.POWER_OF_TWO),
    Packing.E5M2_POWER_BLOCKS: (E5M2, ScaleKind.POWER_OF_TWO),
}
COUNTS = st.sampled_from([1, 7, 8, 9, 127, 128, 129, 8191, 8192, 8193]) | st.integers(1, 2000)
SEEDS = st.integers(0, 2**31)


def numbers_of(dtype: str, count: int, seed: int) -> torch.Tensor:
    """Return numbers of any value, of any type, not where a vector could begin."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype == "BOOL" else 256
    data = torch.randint(0, most, ((count + 1) * DTYPE_BYTES[dtype],), generator=generator)
    return data.to(torch.uint8).view(DTYPES[dtype])[1:]


def weights_of(masters: torch.Tensor, packing: Packing) -> torch.Tensor | None:
    """Return the weights that forward uses, where masters are kept as what these leave out."""
    return masters.to(torch.bfloat16) if packing is Packing.SPLIT else None


def image_of(
    packing: Packing, tensor: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the bytes of a whole tensor in a file, packed at once by the reference, to a whole line."""
    if packing is Packing.SPLIT:
        assert weights is not None
        segments = [Segment(tensor=weights), Segment(tensor=tensor, weights=weights)]
    elif packing is Packing.EXACT:
        segments = [Segment(tensor=tensor)]
    else:
        to, scales = SHORT[packing]
        segments = [Segment(tensor=tensor, to=to, scales=scales)]
    placed, num_bytes = in_a_row(segments)
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    pack_by_reference(placed, buffer)
    return buffer


def kept(packing: Packing, tensor: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return what a format leaves of a tensor."""
    if packing is Packing.EXACT:
        return tensor
    if packing is Packing.SPLIT:
        assert weights is not None
        parts = split_masters(tensor, weights)
        return join_masters(parts.remainders, parts.carries, weights)
    to, scales = SHORT[packing]
    if scales is None:
        return convert(convert(tensor, to), FP32)
    return widen_blocks(*round_to_blocks(tensor, to, scales))


def content_with(image: torch.Tensor, entry: TensorEntry, seed: int, behind: int) -> memoryview:
    """Return a unit's bytes: a tensor's pieces, and anything before, between and behind them."""
    end = entry.offset + tensor_bytes(entry)
    content = bytearray(random.Random(seed).randbytes(end + behind))
    for piece in tensor_pieces(entry):
        start = entry.offset + piece.offset
        data = image[piece.offset : piece.offset + piece.num_bytes]
        content[start : start + piece.num_bytes] = data.numpy().tobytes()
    return memoryview(content)


@settings(max_examples=200)
@given(
    packing=st.sampled_from(Packing),
    count=COUNTS,
    seed=SEEDS,
    line=st.integers(0, 40),
    behind=st.sampled_from([0, 1, 64, 1000]),
)
def test_tensor_comes_back_as_its_format_keeps_it_whatever_lies_around_it(
    packing: Packing, count: int, seed: int, line: int, behind: int
) -> None:
    tensor = any_numbers(count, torch.Generator().manual_seed(seed))
    weights = weights_of(tensor, packing)
    offset = line * ALIGNMENT_BYTES
    entry = TensorEntry("w", "param", 5, 5 + count, "F32", offset, packing=packing.value)
    content = content_with(image_of(packing, tensor, weights), entry, seed, behind)
    target = torch.full((count,), 7.0)
    unpack_into(target, entry, content)
    assert same_bits(target, kept(packing, tensor, weights))


@pytest.mark.parametrize("count", [1, 7, 129])
@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_exact_tensor_of_any_type_comes_back_bit_for_bit(dtype: str, count: int) -> None:
    tensor = numbers_of(dtype, count, seed=count)
    entry = TensorEntry("w", "exp_avg", 0, count, dtype, 128)
    content = content_with(image_of(Packing.EXACT, tensor), entry, seed=0, behind=3)
    target = torch.zeros_like(tensor)
    unpack_into(target, entry, content)
    assert same_bits(target, tensor)


@pytest.mark.parametrize("packing", Packing)
def test_tensor_goes_into_a_part_of_a_larger_one_and_nowhere_else(packing: Packing) -> None:
    tensor = torch.randn(129, generator=torch.Generator().manual_seed(0))
    weights = weights_of(tensor, packing)
    entry = TensorEntry("w", "param", 0, 129, "F32", 0, packing=packing.value)
    whole = torch.full((200,), 7.0)
    content = content_with(image_of(packing, tensor, weights), entry, seed=0, behind=0)
    unpack_into(whole[3:132], entry, content)
    assert same_bits(whole[3:132], kept(packing, tensor, weights))
    assert set(whole[:3].tolist() + whole[132:].tolist()) == {7.0}


@given(packing=st.sampled_from(Packing), count=COUNTS, line=st.integers(0, 40))
def test_segments_cover_the_pieces_of_a_tensor_and_nothing_else(
    packing: Packing, count: int, line: int
) -> None:
    tensor, start = torch.zeros(count), line * ALIGNMENT_BYTES
    parts = pieces("F32", count, packing)
    placed = tuple(replace(piece, offset=start + piece.offset) for piece in parts)
    found = []
    for segment in segments_of(packing, placed, tensor, weights_of(tensor, packing)):
        found.append((segment.offset, segment.num_bytes))
        if segment.side_bytes:
            found.append((segment.side_offset, segment.side_bytes))
    assert found == [(start + piece.offset, piece.num_bytes) for piece in parts]
