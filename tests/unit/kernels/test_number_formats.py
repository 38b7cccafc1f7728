"""Formats describe torch's types: their codes decode to the numbers that they are said to be."""

import math

import pytest
import torch

from kernels.number_formats import E4M3, FORMAT_OF, FORMATS, FP32, NumberFormat

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


def test_shorter_formats_are_found_by_name_and_all_by_type() -> None:
    assert FP32.name not in FORMATS
    assert {each.dtype: each for each in (FP32, *FORMATS.values())} == FORMAT_OF
    assert all(each.name == name for name, each in FORMATS.items())
