"""Rounding and scaling inside Triton kernels, in integers, to the bits of kernels/number_formats.py.

Integers give the same bits on every GPU; hardware casts need not. A format is given as five numbers at run
time, so that one launch can pack in several formats. The numbers are exponent bits, mantissa bits, largest
code, and the codes of infinity and NaN.
"""

import triton
import triton.language as tl

SMALLEST_SCALE = tl.constexpr(2.0**-108)
_INFINITY = tl.constexpr(0x7F800000)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _round_off(numbers, shift):
    half = 1 << (shift - 1)
    return (numbers + half - 1 + ((numbers >> shift) & 1)) >> shift


@triton.jit
def round_bits(bits, exponent_bits, mantissa_bits, max_code, infinity_code, nan_code):
    """Return int32 codes of a format from the int32 bits of fp32 numbers; see `number_formats.round_to`."""
    shift = 23 - mantissa_bits
    rebias = 128 - (1 << (exponent_bits - 1))
    magnitude = bits & 0x7FFFFFFF
    exponent = magnitude >> 23
    normal = _round_off(magnitude, shift) - (rebias << mantissa_bits)
    mantissa = (magnitude & 0x7FFFFF) | ((exponent > 0).to(tl.int32) << 23)
    lost = shift + rebias + 1 - tl.maximum(exponent, 1)
    lost = tl.minimum(tl.maximum(lost, 1), 25)
    subnormal = _round_off(mantissa, lost)
    codes = tl.minimum(tl.where(exponent > rebias, normal, subnormal), max_code)
    codes = tl.where(magnitude == _INFINITY, infinity_code, codes)
    codes = tl.where(magnitude > _INFINITY, nan_code, codes)
    return codes | ((bits < 0).to(tl.int32) << (exponent_bits + mantissa_bits))


@triton.jit
def widen_codes(codes, exponent_bits, mantissa_bits, max_code, infinity_code, nan_code):
    """Return the int32 bits of fp32 numbers from int32 codes of a format; see `rounding.widen`."""
    magnitude_bits = exponent_bits + mantissa_bits
    magnitude = codes & ((1 << magnitude_bits) - 1)
    rebias = 128 - (1 << (exponent_bits - 1))
    normal = (magnitude << (23 - mantissa_bits)) + (rebias << 23)
    # Exponent of the smallest step. BF16 does not use it; its step is no normal fp32 number.
    step = tl.maximum(rebias + 1 - mantissa_bits, 1) << 23
    subnormal = magnitude.to(tl.float32) * step.to(tl.float32, bitcast=True)
    is_normal = ((magnitude >> mantissa_bits) > 0) | (rebias == 0)
    bits = tl.where(is_normal, normal, subnormal.to(tl.int32, bitcast=True))
    bits = tl.where(magnitude > max_code, 0x7FC00000, bits)
    is_infinite = (magnitude == infinity_code) & (infinity_code != nan_code)
    bits = tl.where(is_infinite, _INFINITY, bits)
    return bits | (((codes >> magnitude_bits) & 1) << 31)


@triton.jit
def scales_of(bits, largest, is_power_of_two):
    """Return ``[block]`` fp32 scales of ``[block, 128]`` int32 bits of fp32 numbers."""
    magnitudes = bits & 0x7FFFFFFF
    most = tl.max(tl.where(magnitudes < _INFINITY, magnitudes, 0), axis=1)
    scales = tl.div_rn(
        most.to(tl.float32, bitcast=True), tl.zeros_like(most).to(tl.float32) + largest
    )
    if is_power_of_two:
        scale_bits = scales.to(tl.int32, bitcast=True)
        scales = ((scale_bits + 0x7FFFFF) & _INFINITY).to(tl.float32, bitcast=True)
    return tl.where(most > 0, tl.maximum(scales, SMALLEST_SCALE), 1.0)


@triton.jit
def divide_blocks(bits, scales):
    """Return the bits of ``[block, 128]`` fp32 numbers over their scales; NaN and infinities stay."""
    reciprocals = tl.div_rn(tl.zeros_like(scales) + 1.0, scales)
    scaled = bits.to(tl.float32, bitcast=True) * reciprocals[:, None]
    is_finite = (bits & 0x7FFFFFFF) < _INFINITY
    return tl.where(is_finite, scaled.to(tl.int32, bitcast=True), bits)


@triton.jit
def multiply_blocks(bits, scales):
    """Return the bits of ``[block, 128]`` fp32 numbers times their scales; see `widen_blocks`."""
    wide = bits.to(tl.float32, bitcast=True) * scales[:, None]
    wide = tl.minimum(tl.maximum(wide, -_LARGEST), _LARGEST)
    is_finite = (bits & 0x7FFFFFFF) < _INFINITY
    return tl.where(is_finite, wide.to(tl.int32, bitcast=True), bits)
