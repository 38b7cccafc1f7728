"""Masters come back bit for bit from weights and remainders, whatever bits they have."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.split_master import join_masters, split_masters

ANY_BITS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=64)


def of_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(ANY_BITS)
def test_any_bits_come_back(bits: list[int]) -> None:
    masters = of_bits(bits)
    weights = masters.to(torch.bfloat16)
    assert same_bits(join_masters(split_masters(masters, weights), weights), masters)


@given(ANY_BITS, st.randoms(use_true_random=False))
def test_masters_come_back_from_weights_that_are_not_theirs(bits: list[int], random) -> None:
    masters = of_bits(bits)
    codes = [random.randrange(-(2**15), 2**15) for _ in bits]
    weights = torch.tensor(codes, dtype=torch.int16).view(torch.bfloat16)
    assert same_bits(join_masters(split_masters(masters, weights), weights), masters)


@pytest.mark.parametrize("upper", [0x0000, 0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x7F7F, 0x807F])
def test_all_masters_of_an_upper_half_come_back_and_few_are_listed(upper: int) -> None:
    bits = (upper << 16) + torch.arange(2**16)
    masters = bits.to(torch.int32).view(torch.float32)
    weights = masters.to(torch.bfloat16)
    parts = split_masters(masters, weights)
    assert same_bits(join_masters(parts, weights), masters)
    # To nearest even: one half is rounded up from an odd one only.
    assert parts.places.tolist() == ([0x8000] if upper % 2 else [])


def test_weights_that_are_rounded_half_up_list_each_half() -> None:
    bits = (0x3F80 << 16) + torch.arange(2**17)
    masters = bits.to(torch.int32).view(torch.float32)
    weights = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    parts = split_masters(masters, weights)
    assert same_bits(join_masters(parts, weights), masters)
    assert parts.places.tolist() == [0x8000, 0x18000]


def test_arbitrary_masters_list_about_one_in_131072() -> None:
    masters = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    parts = split_masters(masters, masters.to(torch.bfloat16))
    assert parts.remainders.dtype is torch.int16
    assert 0 < len(parts.places) < 40
