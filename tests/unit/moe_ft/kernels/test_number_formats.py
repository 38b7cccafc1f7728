"""Formats describe torch's types, and blocks are scaled to their range, whatever the numbers' size."""

import math

import pytest
import torch

from moe_ft.kernels.number_formats import (
    BLOCK,
    E4M3,
    E5M2,
    FORMAT_OF,
    NumberFormat,
    ScaleKind,
    num_blocks,
    round_to_blocks,
    widen,
    widen_blocks,
)

EACH = pytest.mark.parametrize("of", FORMAT_OF.values(), ids=lambda of: of.name)


def value(code: int, of: NumberFormat) -> float:
    return float(torch.tensor([code], dtype=of.code_dtype).view(of.dtype).float())


@EACH
def test_sizes_and_codes_are_those_of_the_type(of: NumberFormat) -> None:
    assert of.num_bytes == of.dtype.itemsize == of.code_dtype.itemsize
    assert value(of.max_code, of) == of.largest == torch.finfo(of.dtype).max
    assert value(((1 << (of.exponent_bits - 1)) - 1) << of.mantissa_bits, of) == 1.0
    assert value(1 << of.mantissa_bits, of) == torch.finfo(of.dtype).smallest_normal
    assert math.isnan(value(of.nan_code, of))


@EACH
def test_infinity_follows_the_largest_number_where_a_format_has_one(of: NumberFormat) -> None:
    assert of.infinity_code == of.max_code + 1
    found = value(of.infinity_code, of)
    assert math.isnan(found) if of is E4M3 else found == math.inf


SCALED = pytest.mark.parametrize("of", [E4M3, E5M2], ids=lambda of: of.name)
KINDS = pytest.mark.parametrize("kind", list(ScaleKind))


def numbers(count: int, size: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * size


@SCALED
@KINDS
@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e20])
def test_error_is_at_most_half_a_step_of_the_format_in_its_block(
    of: NumberFormat, kind: ScaleKind, count: int, size: float
) -> None:
    values = numbers(count, size)
    rounded, scales = round_to_blocks(values, of, kind)
    assert (rounded.dtype, rounded.shape, scales.shape) == (
        of.dtype,
        (count,),
        (num_blocks(count),),
    )
    found = widen_blocks(rounded, scales).double()
    of_block = scales.double().repeat_interleave(BLOCK)[:count]
    # Normal numbers of the format: half of the last place; below, half of its smallest step.
    step = 2.0 ** (2 - (1 << (of.exponent_bits - 1)) - of.mantissa_bits) * of_block
    allowed = torch.maximum(values.double().abs() * 2.0 ** -(of.mantissa_bits + 1), step / 2)
    assert ((found - values.double()).abs() <= allowed * (1 + 1e-6)).all()


@SCALED
def test_largest_of_a_block_is_the_largest_of_the_format(of: NumberFormat) -> None:
    values = numbers(1000)
    rounded, _ = round_to_blocks(values, of, ScaleKind.FP32)
    wide = widen(rounded).abs()
    for start in range(0, 1000, BLOCK):
        assert float(wide[start : start + BLOCK].max()) == of.largest


@SCALED
def test_powers_of_two_are_used_as_far_as_they_go(of: NumberFormat) -> None:
    values = numbers(1000)
    rounded, scales = round_to_blocks(values, of, ScaleKind.POWER_OF_TWO)
    mantissas, _ = torch.frexp(scales)
    assert set(mantissas.tolist()) == {0.5}
    wide = widen(rounded).abs()
    for start in range(0, 1000, BLOCK):
        assert of.largest / 2 * 0.9 <= float(wide[start : start + BLOCK].max()) <= of.largest


@SCALED
@KINDS
def test_block_of_zeros_stays_one(of: NumberFormat, kind: ScaleKind) -> None:
    rounded, scales = round_to_blocks(torch.zeros(200), of, kind)
    assert scales.tolist() == [1.0, 1.0]
    assert not widen_blocks(rounded, scales).any()


@KINDS
def test_what_is_not_finite_stays_so_and_spoils_no_other_number(kind: ScaleKind) -> None:
    values = numbers(BLOCK)
    spoiled = values.clone()
    spoiled[3], spoiled[5], spoiled[7] = torch.nan, torch.inf, -torch.inf
    for of in (E4M3, E5M2):
        found = widen_blocks(*round_to_blocks(spoiled, of, kind))
        assert torch.isnan(found[3])
        for place, sign in ((5, 1), (7, -1)):
            expected = torch.isnan(found[place]) if of is E4M3 else found[place] == sign * torch.inf
            assert expected
        others = torch.isfinite(spoiled)
        assert torch.isfinite(found[others]).all()


@KINDS
def test_smallest_and_largest_numbers_of_fp32_have_a_scale(kind: ScaleKind) -> None:
    info = torch.finfo(torch.float32)
    for value in (info.smallest_normal, 2.0**-149, info.max):
        values = torch.full((BLOCK,), value)
        rounded, scales = round_to_blocks(values, E4M3, kind)
        assert torch.isfinite(scales).all() and (scales > 0).all()
        assert torch.isfinite(widen_blocks(rounded, scales)).all()


@SCALED
def test_rounding_again_changes_nothing(of: NumberFormat) -> None:
    values = numbers(1000)
    once = widen_blocks(*round_to_blocks(values, of, ScaleKind.POWER_OF_TWO))
    twice = widen_blocks(*round_to_blocks(once, of, ScaleKind.POWER_OF_TWO))
    assert torch.equal(once, twice)


def test_no_numbers_have_no_blocks() -> None:
    rounded, scales = round_to_blocks(torch.zeros(0), E4M3, ScaleKind.FP32)
    assert (rounded.numel(), scales.numel()) == (0, 0)
    assert widen_blocks(rounded, scales).numel() == 0
