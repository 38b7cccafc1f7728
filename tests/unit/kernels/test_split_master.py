"""Masters come back bit for bit from weights, remainders and carries, whatever bits they have."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.packing import SplitMasters, join_masters, split_masters

ANY_BITS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=64)


def of_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def weights_of(codes: list[int]) -> torch.Tensor:
    return torch.tensor(codes, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def joined(parts: SplitMasters, weights: torch.Tensor) -> torch.Tensor:
    return join_masters(parts.remainders, parts.carries, weights)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


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
def test_weights_may_be_rounded_in_either_direction(bits: list[int], random) -> None:
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
