"""Packed tensors lie where they should, in the right format, and come back; masters bit for bit."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.kernels.number_formats import (
    BF16,
    E4M3,
    FORMAT_OF,
    FP16,
    ScaleKind,
    convert,
    round_to,
    round_to_blocks,
)
from moe_ft.kernels.pack_table import PackTable
from moe_ft.kernels.packing import Segment, SplitMasters, join_masters, split_masters
from tests.unit.moe_ft.kernels.packs import (
    DEVICE,
    any_numbers,
    empty_buffer,
    in_a_row,
    of_all_kinds,
    same_bits,
)

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
            continue  # test_number_formats.py
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
def test_weights_that_are_not_of_their_masters_are_counted() -> None:
    masters = torch.randn(1000)
    weights = masters.to(torch.bfloat16)
    weights[[3, 500, 999]] += 1
    segments, num_bytes = in_a_row(
        [Segment(tensor=torch.ones(4)), Segment(tensor=masters, weights=weights)]
    )
    assert PackTable(segments).pack(empty_buffer(num_bytes)).tolist() == [0, 3]


def test_table_packs_and_unpacks_what_the_tensors_hold_then() -> None:
    tensor = torch.zeros(100, device=DEVICE)
    segments, num_bytes = in_a_row([Segment(tensor=tensor), Segment(tensor=tensor, to=BF16)])
    table, buffer = PackTable(segments), empty_buffer(num_bytes)
    for number in (1.5, -2.0):
        tensor.fill_(number)
        assert table.pack(buffer).tolist() == [0, 0]
        assert same_bits(buffer[:400], tensor)
        tensor.zero_()
        table.unpack(buffer)
        assert set(tensor.tolist()) == {number}


@pytest.mark.parametrize(
    ("segment", "rule"),
    [
        (Segment(tensor=torch.ones(4, 4).T), "flat"),
        (Segment(tensor=torch.ones(8)[::2]), "contiguous"),
        (Segment(tensor=torch.ones(4), offset=4), "multiples of 64"),
        (Segment(tensor=torch.ones(4), to=BF16, scales=ScaleKind.FP32), "8-bit"),
        (Segment(tensor=torch.ones(4, dtype=torch.int64), to=BF16), "int64 cannot be converted"),
        (Segment(tensor=torch.ones(4), weights=torch.ones(4)), "BF16 weights"),
        (Segment(tensor=torch.ones(4), weights=torch.ones(3).bfloat16()), "one shape"),
    ],
)
def test_segment_that_cannot_be_packed_is_refused(segment: Segment, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        PackTable([segment])


def test_nothing_is_packed_without_segments() -> None:
    assert PackTable([]).pack(torch.empty(0, dtype=torch.uint8)).shape == (0,)


ANY_BITS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=64)


def of_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def weights_of(codes: list[int]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def joined(parts: SplitMasters, weights: torch.Tensor) -> torch.Tensor:
    return join_masters(parts.remainders, parts.carries, weights)


@given(ANY_BITS)
def test_any_bits_come_back_but_for_the_lower_half_of_nan(bits: list[int]) -> None:
    masters = of_bits(bits)
    weights = masters.to(torch.bfloat16)
    parts = split_masters(masters, weights)
    found = joined(parts, weights)
    assert parts.num_wrong == 0
    is_nan = torch.isnan(masters)
    assert torch.equal(torch.isnan(found), is_nan)
    assert same_bits(found[~is_nan], masters[~is_nan])


@given(ANY_BITS, st.randoms(use_true_random=False))
def test_weights_may_be_rounded_in_either_direction(bits: list[int], random: Random) -> None:
    masters = of_bits(bits)
    uppers = [(code >> 16) & 0xFFFF for code in masters.view(torch.int32).tolist()]
    weights = weights_of([(upper + random.randrange(2)) & 0xFFFF for upper in uppers])
    is_number = ~(torch.isnan(masters) | torch.isnan(weights))
    masters, weights = masters[is_number], weights[is_number]
    parts = split_masters(masters, weights)
    assert parts.num_wrong == 0
    assert same_bits(joined(parts, weights), masters)


@pytest.mark.parametrize("upper", [0x0000, 0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x7F7F, 0x807F])
def test_all_masters_of_an_upper_half_come_back(upper: int) -> None:
    masters = of_bits(((upper << 16) + torch.arange(2**16)).tolist())
    weights = masters.to(torch.bfloat16)
    parts = split_masters(masters, weights)
    assert parts.num_wrong == 0
    assert same_bits(joined(parts, weights), masters)


@pytest.mark.parametrize("code", [0x7FC00000, 0xFFC00000, 0x7F810000, 0xFFFF0000])
def test_nan_without_bits_in_its_lower_half_comes_back(code: int) -> None:
    masters = of_bits([code])
    weights = masters.to(torch.bfloat16)
    assert same_bits(joined(split_masters(masters, weights), weights), masters)


def test_nan_with_bits_in_its_lower_half_only_stays_nan() -> None:
    masters = of_bits([0x7F800001, 0xFF80FFFF])
    weights = masters.to(torch.bfloat16)
    found = joined(split_masters(masters, weights), weights)
    assert torch.isnan(found).all()
    assert torch.signbit(found).tolist() == [False, True]


@pytest.mark.parametrize(
    ("master", "weight"),
    [
        (0x3F800000, 0x3F82),
        (0x3F80FFFF, 0x3F7F),
        (0x3F800000, 0xBF80),
        (0x3F800000, 0x7FC0),
        (0x7F7F0000, 0x7F81),
        (0x7FC00000, 0x3F80),
    ],
)
def test_weight_that_is_not_of_its_master_is_counted(master: int, weight: int) -> None:
    masters = of_bits([0x3F800000, master])
    assert split_masters(masters, weights_of([0x3F80, weight])).num_wrong == 1


@given(st.lists(st.booleans(), max_size=40))
def test_carries_are_bits_of_bytes_with_the_first_in_the_lowest_place(carries: list[bool]) -> None:
    weights = weights_of([0x3F80 + carry for carry in carries])
    packed = split_masters(of_bits([0x3F80FFFF] * len(carries)), weights).carries
    by_hand = [
        sum(flag << place for place, flag in enumerate(carries[start : start + 8]))
        for start in range(0, len(carries), 8)
    ]
    assert (packed.dtype, packed.tolist()) == (torch.uint8, by_hand)
