"""Block-scaled formats: every 128 numbers share a scale, so that moments keep their range in 8 bits.

A block's scale maps its largest finite magnitude to the largest number of the format. It is an fp32 number,
or the next power of two, by which multiplying and dividing is exact.

No step makes or needs a subnormal fp32 number, which some machines take for zero: what is computed here is
what the kernels compute.
"""

from enum import StrEnum

import torch

from kernels.number_formats import NumberFormat
from kernels.rounding import round_to, widen

BLOCK = 128
# The smallest number of a format times it is a normal one; a subnormal number divided by it is rounded to 0.
SMALLEST_SCALE = 2.0**-108
_EXPONENT = 0x7F800000


class ScaleKind(StrEnum):
    """What scales may be."""

    FP32 = "fp32"
    POWER_OF_TWO = "power-of-two"


def num_blocks(count: int) -> int:
    """Return how many scales so many numbers have; the last block may have fewer."""
    return -(-count // BLOCK)


def round_to_blocks(
    values: torch.Tensor, to: NumberFormat, kind: ScaleKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply each block by the reciprocal of its scale and round it.

    Args:
        values: ``[n]`` fp32. NaN and infinities do not count for the scale, and become what the format
            makes of them.
        to: an 8-bit format.
        kind: of the scales.

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
    # Products of NaN differ among machines.
    scaled = torch.where(is_finite, blocks * (1.0 / scales)[:, None], blocks)
    rounded = round_to(scaled, to)
    return rounded.reshape(-1)[: values.numel()], scales


def widen_blocks(rounded: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what `round_to_blocks` has left of ``[n]`` numbers, in fp32.

    Args:
        rounded: ``[n]`` numbers of the format.
        scales: ``[num_blocks(n)]`` fp32.
    """
    blocks = _in_blocks(widen(rounded))
    # Rounded up, the largest numbers of fp32 would be beyond it.
    most = torch.finfo(torch.float32).max
    wide = (blocks * scales[:, None]).clamp(-most, most)
    wide = torch.where(torch.isfinite(blocks), wide, blocks)
    return wide.reshape(-1)[: rounded.numel()]


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """Return ``[block, BLOCK]`` numbers, the last block filled up with zeros."""
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).reshape(-1, BLOCK)
