"""Rounding is to the nearest number of the format, whatever bits come in; widening is exact."""

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.kernels.number_formats import FORMATS, NumberFormat, round_to, widen

EACH = pytest.mark.parametrize("of", FORMATS.values(), ids=FORMATS)
ANY_BITS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64)


def all_codes(of: NumberFormat) -> torch.Tensor:
    """Return every number of a format, those with sign too."""
    width = 8 * of.num_bytes
    return torch.arange(2**width).to(of.code_dtype).view(of.dtype)


def of_bits(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def codes(values: torch.Tensor, of: NumberFormat) -> list[int]:
    """Return the codes of numbers, without the sign."""
    width = 8 * of.num_bytes
    return [
        code & ((1 << (width - 1)) - 1)
        for code in values.view(of.code_dtype).to(torch.int32).tolist()
    ]


def finite(of: NumberFormat) -> np.ndarray:
    """Return the finite numbers >= 0 of a format in float64, ascending: the place is the code."""
    found, bias = [], (1 << (of.exponent_bits - 1)) - 1
    for code in range(of.max_code + 1):
        exponent, mantissa = code >> of.mantissa_bits, code & ((1 << of.mantissa_bits) - 1)
        unit = 2.0 ** (max(exponent, 1) - bias - of.mantissa_bits)
        found.append((mantissa + ((1 << of.mantissa_bits) if exponent else 0)) * unit)
    return np.array(found)


NUMBERS = {name: finite(of) for name, of in FORMATS.items()}


def nearest(value: float, of: NumberFormat) -> int:
    """Return the code of the number that is nearest to a finite one, the even of two; without the sign."""
    numbers, size = NUMBERS[of.name], abs(float(value))
    above = min(int(np.searchsorted(numbers, size)), of.max_code)
    below = max(0, above - 1)
    down, up = size - numbers[below], numbers[above] - size
    if down == up:
        return below if below % 2 == 0 else above
    return below if down < up else above


@EACH
@settings(max_examples=200)
@given(bits=ANY_BITS)
def test_any_number_is_rounded_to_the_nearest(of: NumberFormat, bits: list[int]) -> None:
    values = of_bits(bits)
    rounded = round_to(values, of)
    for value, code in zip(values.tolist(), codes(rounded, of), strict=True):
        if np.isnan(value):
            assert code == of.nan_code
        elif np.isinf(value):
            assert code == of.infinity_code
        else:
            assert code == nearest(value, of)
    assert torch.equal(torch.signbit(widen(rounded)), torch.signbit(values))


@EACH
def test_numbers_of_the_format_and_ties_between_them(of: NumberFormat) -> None:
    numbers = NUMBERS[of.name]
    exact = torch.tensor(numbers, dtype=torch.float64).to(torch.float32)
    assert codes(round_to(exact, of), of) == list(range(of.max_code + 1))
    ties = torch.tensor((numbers[:-1] + numbers[1:]) / 2, dtype=torch.float64).to(torch.float32)
    even = [code + code % 2 for code in range(of.max_code)]
    assert codes(round_to(ties, of), of) == even
    for direction, expected in (
        (torch.inf, range(1, of.max_code + 1)),
        (-torch.inf, range(of.max_code)),
    ):
        beside = torch.nextafter(ties, torch.tensor(direction))
        assert codes(round_to(beside, of), of) == list(expected)


@EACH
def test_finite_numbers_beyond_the_largest_are_the_largest(of: NumberFormat) -> None:
    largest = torch.finfo(torch.float32).max
    beyond = torch.tensor([NUMBERS[of.name][-1] * 1.5, largest, -largest]).to(torch.float32)
    beyond = torch.where(torch.isinf(beyond), largest, beyond)
    assert codes(round_to(beyond, of), of) == [of.max_code] * 3


@EACH
def test_all_numbers_survive_widening_and_rounding(of: NumberFormat) -> None:
    numbers = all_codes(of)
    wide = widen(numbers)
    assert torch.equal(torch.isnan(wide), torch.isnan(numbers.to(torch.float32)))
    is_number = ~torch.isnan(wide)
    assert torch.equal(wide[is_number], numbers.to(torch.float32)[is_number])
    again = round_to(wide, of)
    assert torch.equal(again.view(of.code_dtype)[is_number], numbers.view(of.code_dtype)[is_number])
    assert set(codes(again[~is_number], of)) == {of.nan_code}


# XXH3-64 of the codes that `every_upper_half` is rounded to. Saved state depends on these bits.
DIGESTS = {
    "bf16": "2f12e8165fe28b86",
    "fp16": "9343069b01736f84",
    "fp8-e4m3": "6d38c4792886c1f9",
    "fp8-e5m2": "f4a15e1f05e807eb",
}


def every_upper_half() -> torch.Tensor:
    """Return fp32 with every upper half, and lower halves at and next to the ties of all formats."""
    uppers = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lowers = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    return (uppers[:, None] | torch.tensor(lowers, dtype=torch.int32)).view(torch.float32)


@EACH
def test_bits_of_the_formats_never_change(of: NumberFormat) -> None:
    rounded = round_to(every_upper_half(), of)
    content = rounded.view(torch.uint8).numpy().tobytes()
    assert xxhash.xxh3_64_hexdigest(content) == DIGESTS[of.name]


@EACH
def test_numbers_are_converted_the_same_in_short_and_in_long_tensors(of: NumberFormat) -> None:
    # Casts of short tensors do not use vector instructions.
    numbers = every_upper_half().reshape(-1)[::211]
    short = [round_to(part, of).view(of.code_dtype) for part in numbers.split(3)]
    assert torch.equal(torch.cat(short), round_to(numbers, of).view(of.code_dtype))
    codes = all_codes(of).view(of.code_dtype)[::5]
    wide = [widen(part.view(of.dtype)).view(torch.int32) for part in codes.split(3)]
    assert torch.equal(torch.cat(wide), widen(codes.view(of.dtype)).view(torch.int32))


@EACH
@pytest.mark.parametrize("shape", [(0,), (), (3, 5)])
def test_shapes_stay(of: NumberFormat, shape: tuple[int, ...]) -> None:
    rounded = round_to(torch.ones(shape), of)
    assert (rounded.shape, rounded.dtype) == (shape, of.dtype)
    assert widen(rounded).shape == shape


@EACH
def test_values_need_not_lie_side_by_side(of: NumberFormat) -> None:
    values = (torch.arange(12.0) % 4).reshape(3, 4).T
    assert torch.equal(widen(round_to(values, of)), values)
