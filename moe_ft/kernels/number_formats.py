"""The floating-point formats that state can be packed in, and rounding to them and widening back.

Rounding from fp32 is to nearest, ties to even. A finite number never becomes an infinity: a number beyond the
largest of the format becomes the largest. An infinity stays one if the format has infinities and becomes NaN
otherwise (e4m3). Every NaN becomes the format's canonical quiet NaN, of the same sign.

`round_to` and `widen` are the reference for the kernels. torch's casts do the work. They agree on all finite
numbers that a format can hold. They differ on overflow, infinities and NaN, even between the vector and the
scalar code of one machine, so these are handled here. Tests compare the results with the integer steps of the
kernels.

In block-scaled formats every 128 numbers share a scale, so that moments keep their range in 8 bits. A block's
scale maps its largest finite magnitude to the largest number of the format. It is an fp32 number or the next
power of two; multiplying and dividing by the latter is exact. No step creates or needs a subnormal fp32
number, which some machines treat as zero. The kernels therefore compute the same bits.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

BLOCK = 128
# Its product with the smallest number of a format is normal; a subnormal number over it rounds to 0.
SMALLEST_SCALE = 2.0**-108
_EXPONENT = 0x7F800000


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberFormat:
    """Layout of a binary floating-point format: sign, exponent, mantissa, from the highest bit down.

    Attributes:
        name: as in --moe-ft-state-dtype.
        code_dtype: integers of the same width.
        max_code: code of the largest finite number; codes exclude the sign.
        infinity_code: that of NaN in a format without infinities.
        nan_code: of the canonical NaN.
    """

    name: str
    dtype: torch.dtype
    code_dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    max_code: int
    infinity_code: int
    nan_code: int

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return torch.finfo(self.dtype).max

    @property
    def num_bytes(self) -> int:
        """Bytes of a number."""
        return (1 + self.exponent_bits + self.mantissa_bits) // 8


FP32 = NumberFormat(
    name="fp32",
    dtype=torch.float32,
    code_dtype=torch.int32,
    exponent_bits=8,
    mantissa_bits=23,
    max_code=0x7F7FFFFF,
    infinity_code=0x7F800000,
    nan_code=0x7FC00000,
)
BF16 = NumberFormat(
    name="bf16",
    dtype=torch.bfloat16,
    code_dtype=torch.int16,
    exponent_bits=8,
    mantissa_bits=7,
    max_code=0x7F7F,
    infinity_code=0x7F80,
    nan_code=0x7FC0,
)
FP16 = NumberFormat(
    name="fp16",
    dtype=torch.float16,
    code_dtype=torch.int16,
    exponent_bits=5,
    mantissa_bits=10,
    max_code=0x7BFF,
    infinity_code=0x7C00,
    nan_code=0x7E00,
)
E4M3 = NumberFormat(  # torch.float8_e4m3fn: no infinities, one NaN, up to 448
    name="fp8-e4m3",
    dtype=torch.float8_e4m3fn,
    code_dtype=torch.uint8,
    exponent_bits=4,
    mantissa_bits=3,
    max_code=0x7E,
    infinity_code=0x7F,
    nan_code=0x7F,
)
E5M2 = NumberFormat(
    name="fp8-e5m2",
    dtype=torch.float8_e5m2,
    code_dtype=torch.uint8,
    exponent_bits=5,
    mantissa_bits=2,
    max_code=0x7B,
    infinity_code=0x7C,
    nan_code=0x7E,
)
FORMATS = {each.name: each for each in (BF16, FP16, E4M3, E5M2)}  # shorter than fp32
FORMAT_OF = {each.dtype: each for each in (FP32, *FORMATS.values())}


def convert(values: torch.Tensor, to: NumberFormat) -> torch.Tensor:
    """Return numbers of one format in another one; in their own bit for bit.

    Args:
        values: of the dtype of a format, of any shape.
    """
    of = FORMAT_OF[values.dtype]
    if of is to:
        return values
    wide = values if of is FP32 else widen(values)
    return wide if to is FP32 else round_to(wide, to)


def round_to(values: torch.Tensor, to: NumberFormat) -> torch.Tensor:
    """Round numbers as this file says.

    Args:
        values: fp32, of any shape.
        to: the format, shorter than fp32.

    Returns:
        Numbers of the format's dtype, of the same shape.
    """
    codes = values.clamp(-to.largest, to.largest).to(to.dtype).view(to.code_dtype)
    special = torch.where(values.isnan(), to.nan_code, to.infinity_code)
    special |= torch.signbit(values).int() << (8 * to.num_bytes - 1)
    return torch.where(values.isfinite(), codes, special.to(to.code_dtype)).view(to.dtype)


def widen(values: torch.Tensor) -> torch.Tensor:
    """Return numbers of a format as fp32, exactly; NaN become fp32's canonical one, of the same sign."""
    of, wide = FORMAT_OF[values.dtype], values.to(torch.float32)
    sign = (values.view(of.code_dtype).int() >> (8 * of.num_bytes - 1)) << 31
    nan = (sign | FP32.nan_code).view(torch.float32)
    return torch.where(wide.isnan(), nan, wide)


class ScaleKind(StrEnum):
    """Kinds of scales."""

    FP32 = "fp32"
    POWER_OF_TWO = "power-of-two"


def num_blocks(count: int) -> int:
    """Return the number of scales for a number of elements; the last block may have fewer elements."""
    return -(-count // BLOCK)


def round_to_blocks(
    values: torch.Tensor, to: NumberFormat, kind: ScaleKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply each block by the reciprocal of its scale and round it.

    Args:
        values: ``[n]`` fp32. NaN and infinities do not affect the scale and are converted as usual.

    Returns:
        ``[n]`` numbers of the format, and ``[num_blocks(n)]`` scales, fp32 and > 0.
    """
    blocks = _in_blocks(values)
    is_finite = torch.isfinite(blocks)
    largest = torch.where(is_finite, blocks.abs(), 0.0).amax(dim=1)
    scales = largest / to.largest
    if kind is ScaleKind.POWER_OF_TWO:
        bits = scales.view(torch.int32)
        scales = ((bits + 0x7FFFFF) & _EXPONENT).view(torch.float32)
    scales = torch.where(largest > 0, scales.clamp(min=SMALLEST_SCALE), 1.0)
    # Products with NaN differ between machines.
    scaled = torch.where(is_finite, blocks * (1.0 / scales)[:, None], blocks)
    rounded = round_to(scaled, to)
    return rounded.reshape(-1)[: values.numel()], scales


def widen_blocks(rounded: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the ``[n]`` numbers of `round_to_blocks` in fp32.

    Args:
        rounded: ``[n]`` numbers of the format.
        scales: ``[num_blocks(n)]`` fp32.
    """
    blocks = _in_blocks(widen(rounded))
    # The largest numbers of fp32, rounded up, would overflow.
    most = torch.finfo(torch.float32).max
    wide = (blocks * scales[:, None]).clamp(-most, most)
    wide = torch.where(torch.isfinite(blocks), wide, blocks)
    return wide.reshape(-1)[: rounded.numel()]


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return ``[block, BLOCK]`` numbers, the last block filled up with zeros."""
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).reshape(-1, BLOCK)
