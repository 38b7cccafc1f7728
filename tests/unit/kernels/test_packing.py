"""Packed tensors lie where they should, in the right format, and come back."""

import pytest
import torch

from kernels.block_scaling import ScaleKind, round_to_blocks
from kernels.number_formats import (
    E4M3,
    FORMAT_OF,
    FORMATS,
    FP16,
    NumberFormat,
    convert,
    round_to,
    widen,
)
from kernels.pack_table import PackTable
from kernels.packing import Segment
from tests.unit.kernels.packs import any_numbers, empty_buffer, in_a_row, of_all_kinds, same_bits

SIZES = (0, 1, 7, 8, 127, 128, 129, 4095, 8192, 8193, (1 << 18) + 131)  # cut by the reference
CPU_ONLY = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the reference is what is tested here; the GPU has its own"
)


def random(count: int, seed: int = 0) -> torch.Tensor:
    return any_numbers(count, torch.Generator().manual_seed(seed))


@CPU_ONLY
def test_numbers_lie_at_their_offsets_and_nothing_else_is_written() -> None:
    numbers = random(5)
    buffer = empty_buffer(192)
    PackTable([Segment(tensor=numbers, offset=64, to=FP16)]).pack(buffer)
    assert same_bits(buffer[64:74], round_to(numbers, FP16))
    assert buffer[74:128].tolist() == [0] * 54  # the rest of the line
    assert set(buffer[:64].tolist() + buffer[128:].tolist()) == {0xA5}


@CPU_ONLY
@pytest.mark.parametrize("count", SIZES)
def test_all_kinds_come_back_as_their_formats_keep_them(count: int) -> None:
    segments, num_bytes = in_a_row(of_all_kinds(count))
    before = [segment.tensor.clone() for segment in segments]
    buffer = empty_buffer(num_bytes)
    PackTable(segments).pack(buffer)
    for segment in segments:
        segment.tensor.fill_(1)
    for segment, original in zip(segments, before, strict=True):
        PackTable([segment]).unpack(buffer)
        found = segment.tensor
        if segment.weights is not None:
            is_number = ~torch.isnan(original)
            assert torch.equal(torch.isnan(found), ~is_number)
            assert same_bits(found[is_number], original[is_number])
        elif segment.scales is not None:
            continue  # tests/unit/kernels/test_block_scaling.py
        elif segment.to is None:
            assert same_bits(found, original)
        else:
            expected = convert(convert(original, segment.to), FORMAT_OF[original.dtype])
            assert same_bits(found, expected)


@CPU_ONLY
def test_scales_lie_beside_the_numbers_of_their_blocks() -> None:
    numbers = torch.randn(300)
    segment = Segment(tensor=numbers, offset=0, side_offset=320, to=E4M3, scales=ScaleKind.FP32)
    buffer = empty_buffer(384)
    PackTable([segment]).pack(buffer)
    rounded, scales = round_to_blocks(numbers, E4M3, ScaleKind.FP32)
    assert same_bits(buffer[:300], rounded)
    assert same_bits(buffer[320:332], scales)
    assert (segment.num_bytes, segment.side_bytes) == (300, 12)


@CPU_ONLY
def test_masters_without_their_weights_take_2_bytes_and_a_bit() -> None:
    masters = torch.randn(1000)
    segment = Segment(tensor=masters, weights=masters.to(torch.bfloat16))
    assert (segment.num_bytes, segment.side_bytes) == (2000, 125)


@CPU_ONLY
def test_weights_that_are_not_of_their_masters_are_counted() -> None:
    masters = torch.randn(1000)
    weights = masters.to(torch.bfloat16)
    weights[[3, 500, 999]] += 1
    segments, num_bytes = in_a_row(
        [Segment(tensor=torch.ones(4)), Segment(tensor=masters, weights=weights)]
    )
    assert PackTable(segments).pack(empty_buffer(num_bytes)).tolist() == [0, 3]


@pytest.mark.parametrize("of", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_conversion_between_short_formats_is_that_by_fp32(
    of: NumberFormat, to: NumberFormat
) -> None:
    numbers = round_to(random(5000), of)
    expected = numbers if of is to else round_to(widen(numbers), to)
    assert same_bits(convert(numbers, to), expected)
