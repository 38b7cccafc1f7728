"""The kernels round to the same bits as their reference, whatever bits come in."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.number_formats import FORMATS, NumberFormat
from kernels.rounding import round_to
from kernels.triton_rounding import round_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EACH = pytest.mark.parametrize("of", FORMATS.values(), ids=FORMATS)


@triton.jit
def round_all(
    numbers,
    codes,
    count,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round int32 bits of fp32 numbers, a tile in each program."""
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    bits = tl.load(numbers + places, mask=places < count, other=0)
    rounded = round_bits(bits, EXPONENT_BITS, MANTISSA_BITS, MAX_CODE, INFINITY_CODE, NAN_CODE)
    tl.store(codes + places, rounded, mask=places < count)


def rounded_by_kernel(bits: torch.Tensor, of: NumberFormat) -> torch.Tensor:
    """Return int32 codes of a format."""
    bits = bits.to(DEVICE)
    codes, tile = torch.empty_like(bits), 4096
    round_all[(triton.cdiv(len(bits), tile),)](
        bits,
        codes,
        len(bits),
        of.exponent_bits,
        of.mantissa_bits,
        of.max_code,
        of.infinity_code,
        of.nan_code,
        tile,
    )
    return codes.cpu()


def rounded_by_reference(bits: torch.Tensor, of: NumberFormat) -> torch.Tensor:
    codes = round_to(bits.view(torch.float32), of).view(of.code_dtype).to(torch.int32)
    return codes & ((1 << (8 * of.num_bytes)) - 1)


@EACH
@settings(max_examples=30, deadline=None)
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_any_bits_are_rounded_alike(of: NumberFormat, bits: list[int]) -> None:
    numbers = torch.tensor(bits, dtype=torch.int32)
    assert torch.equal(rounded_by_kernel(numbers, of), rounded_by_reference(numbers, of))


@EACH
def test_many_random_bits_are_rounded_alike(of: NumberFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**31), 2**31, (200_003,), generator=generator).to(torch.int32)
    assert torch.equal(rounded_by_kernel(numbers, of), rounded_by_reference(numbers, of))


@EACH
def test_neighbours_of_all_ties_are_rounded_alike(of: NumberFormat) -> None:
    # Every upper half with the lower bits around what is cut off, and all subnormal results.
    uppers = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for shift in range(16):
        for beside in (-1, 0, 1):
            numbers = uppers + ((1 << shift) + beside)
            assert torch.equal(rounded_by_kernel(numbers, of), rounded_by_reference(numbers, of))
