"""The kernels round to the same bits as their reference, whatever bits come in."""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.number_formats import FORMATS, NumberFormat, round_to, widen
from kernels.triton_rounding import round_bits, widen_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EACH = pytest.mark.parametrize("of", FORMATS.values(), ids=FORMATS)


@triton.jit  # type: ignore[untyped-decorator]
def work_all(  # type: ignore[no-untyped-def]  # compiled from a language of its own
    numbers,
    results,
    count,
    exponent_bits,
    mantissa_bits,
    max_code,
    infinity_code,
    nan_code,
    IS_ROUNDING: tl.constexpr,
    TILE: tl.constexpr,
):
    """Round int32 bits of fp32 numbers, or widen int32 codes, a tile in each program."""
    places = tl.program_id(0) * TILE + tl.arange(0, TILE)
    given = tl.load(numbers + places, mask=places < count, other=0)
    if IS_ROUNDING:
        found = round_bits(given, exponent_bits, mantissa_bits, max_code, infinity_code, nan_code)
    else:
        found = widen_codes(given, exponent_bits, mantissa_bits, max_code, infinity_code, nan_code)
    tl.store(results + places, found, mask=places < count)


def by_kernel(given: torch.Tensor, of: NumberFormat, *, is_rounding: bool) -> torch.Tensor:
    """Return int32 codes of a format, or bits of fp32 numbers."""
    given = given.to(DEVICE)
    results, tile = torch.empty_like(given), 4096
    work_all[(triton.cdiv(len(given), tile),)](
        given,
        results,
        len(given),
        of.exponent_bits,
        of.mantissa_bits,
        of.max_code,
        of.infinity_code,
        of.nan_code,
        is_rounding,
        tile,
    )
    return results.cpu()


def rounded_by_kernel(bits: torch.Tensor, of: NumberFormat) -> torch.Tensor:
    """Return int32 codes of a format."""
    return by_kernel(bits, of, is_rounding=True)


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
    # Every upper half, with lower bits around each tie that is among them, also of subnormal results.
    uppers = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    for shift in (0, 12, 13, 14, 15):
        for beside in (-1, 0, 1):
            numbers = uppers + ((1 << shift) + beside)
            assert torch.equal(rounded_by_kernel(numbers, of), rounded_by_reference(numbers, of))


@EACH
def test_all_codes_are_widened_alike(of: NumberFormat) -> None:
    codes = torch.arange(2 ** (8 * of.num_bytes), dtype=torch.int32)
    expected = widen(codes.to(of.code_dtype).view(of.dtype)).view(torch.int32)
    assert torch.equal(by_kernel(codes, of, is_rounding=False), expected)
