"""Block-scaled formats: every 128 numbers share a scale, so that moments keep their range in 8 bits.

A block's scale maps its largest finite magnitude to the largest number of the format. It is an fp32 number
or the next power of two; multiplying and dividing by the latter is exact.

No step creates or needs a subnormal fp32 number, which some machines treat as zero. The kernels therefore
compute the same bits.
"""

from enum import StrEnum

import torch

from kernels.number_formats import NumberFormat, round_to, widen

BLOCK = 128
# Its product with the smallest number of a format is normal; a subnormal number over it rounds to 0.
SMALLEST_SCALE = 2.0**-108
_EXPONENT = 0x7F800000


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
