"""Rounding fp32 to shorter formats and widening them again, in integers: the same bits on every machine.

A cast is done by hardware or by library code that need not agree on NaN, overflow or subnormal numbers. What
is computed here in torch is what the kernels compute too, step by step.
"""

import torch

from kernels.number_formats import FORMAT_OF, FP32, NumberFormat

_MANTISSA_BITS, _BIAS = 23, 127  # of fp32
_MAGNITUDE, _INFINITY, _MANTISSA = 0x7FFFFFFF, 0x7F800000, 0x7FFFFF
_MOST_SHIFT = 25  # behind it nothing is left of 24 bits, whatever is rounded


def convert(values: torch.Tensor, to: NumberFormat) -> torch.Tensor:
    """Return numbers of one format in another one; in their own bit for bit.

    Args:
        values: of the dtype of a format, of any shape.
        to: the other format.
    """
    of = FORMAT_OF[values.dtype]
    if of is to:
        return values
    wide = values if of is FP32 else widen(values, of)
    return wide if to is FP32 else round_to(wide, to)


def round_to(values: torch.Tensor, to: NumberFormat) -> torch.Tensor:
    """Round numbers as kernels/number_formats.py says.

    Args:
        values: fp32, of any shape.
        to: the format, shorter than fp32.

    Returns:
        Numbers of the format's dtype, of the same shape.
    """
    bits = values.contiguous().view(torch.int32)
    magnitude = bits & _MAGNITUDE
    exponent = magnitude >> _MANTISSA_BITS
    shift = _MANTISSA_BITS - to.mantissa_bits
    rebias = _BIAS - to.bias
    # Normal results: exponent and mantissa are rounded as one number, a carry raises the exponent.
    normal = _round_off(magnitude, torch.full_like(magnitude, shift)) - (rebias << to.mantissa_bits)
    # Subnormal ones have the exponent 1, and lose the more of their mantissa the smaller they are.
    hidden = (exponent > 0).to(torch.int32) << _MANTISSA_BITS
    mantissa = (magnitude & _MANTISSA) | hidden
    lost = (shift + rebias + 1 - exponent.clamp(min=1)).clamp(1, _MOST_SHIFT)
    subnormal = _round_off(mantissa, lost)
    codes = torch.where(exponent > rebias, normal, subnormal).clamp(max=to.max_code)
    codes = torch.where(magnitude == _INFINITY, to.infinity_code, codes)
    codes = torch.where(magnitude > _INFINITY, to.nan_code, codes)
    sign = (bits < 0).to(torch.int32) << (to.exponent_bits + to.mantissa_bits)
    return (codes | sign).to(to.code_dtype).view(to.dtype)


def _round_off(numbers: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Drop the lowest bits of integers >= 0, to nearest, ties to even."""
    half = torch.ones_like(numbers) << (shift - 1)
    is_odd = (numbers >> shift) & 1
    return (numbers + half - 1 + is_odd) >> shift


def widen(values: torch.Tensor, of: NumberFormat) -> torch.Tensor:
    """Return numbers of a format as fp32, exactly; NaN become fp32's canonical one, of the same sign.

    Args:
        values: of the format's dtype, of any shape.
        of: the format.
    """
    codes = values.contiguous().view(of.code_dtype).to(torch.int32)
    magnitude_bits = of.exponent_bits + of.mantissa_bits
    magnitude = codes & ((1 << magnitude_bits) - 1)
    exponent, rebias = magnitude >> of.mantissa_bits, _BIAS - of.bias
    shift = _MANTISSA_BITS - of.mantissa_bits
    normal = (magnitude << shift) + (rebias << _MANTISSA_BITS)
    if rebias:
        # A power of two times a small integer: fp32 has both, and their product.
        step = 2.0 ** (1 - of.bias - of.mantissa_bits)
        subnormal = (magnitude.to(torch.float32) * step).view(torch.int32)
        bits = torch.where(exponent > 0, normal, subnormal)
    else:
        bits = magnitude << shift
    is_infinite = (magnitude == of.infinity_code) & (of.infinity_code != of.nan_code)
    bits = torch.where(magnitude > of.max_code, 0x7FC00000, bits)
    bits = torch.where(is_infinite, _INFINITY, bits)
    sign = (codes >> magnitude_bits) & 1
    return (bits | (sign << 31)).view(torch.float32)
