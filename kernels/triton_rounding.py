"""What kernels/rounding.py defines, for use inside of Triton kernels: the same steps on the same integers."""

import triton
import triton.language as tl


@triton.jit
def _round_off(numbers, shift):
    half = tl.full(numbers.shape, 1, tl.int32) << (shift - 1)
    return (numbers + half - 1 + ((numbers >> shift) & 1)) >> shift


@triton.jit
def round_bits(
    bits,
    EXPONENT_BITS: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MAX_CODE: tl.constexpr,
    INFINITY_CODE: tl.constexpr,
    NAN_CODE: tl.constexpr,
):
    """Return int32 codes of a format from the int32 bits of fp32 numbers; see `rounding.round_to`."""
    SHIFT: tl.constexpr = 23 - MANTISSA_BITS
    REBIAS: tl.constexpr = 127 - ((1 << (EXPONENT_BITS - 1)) - 1)
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    normal = _round_off(magnitude, tl.full(bits.shape, SHIFT, tl.int32)) - (REBIAS << MANTISSA_BITS)
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0).to(tl.int32) << 23)
    lost = SHIFT + REBIAS + 1 - tl.maximum(exponent, 1)
    lost = tl.minimum(tl.maximum(lost, 1), 25)
    subnormal = _round_off(mantissa, lost)
    codes = tl.minimum(tl.where(exponent > REBIAS, normal, subnormal), MAX_CODE)
    codes = tl.where(magnitude == 0x7F800000, INFINITY_CODE, codes)
    codes = tl.where(magnitude > 0x7F800000, NAN_CODE, codes)
    sign = (bits < 0).to(tl.int32) << (EXPONENT_BITS + MANTISSA_BITS)
    return codes | sign
