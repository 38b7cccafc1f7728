"""An fp32 master weight as the BF16 weight that forward uses, and what that leaves out.

Where a snapshot holds the BF16 weights anyway, masters cost 2 bytes more each and not 4. The remainder is the
lower half of the master's bits; it tells whether the upper half was rounded up: beyond one half. At one half
exactly, rounding to nearest even depends on the upper half, and 16 bits cannot say which it was, because
an even weight has 65,537 masters. So masters that the rule does not give back are listed: half of those at
one half, one in 131,072 of arbitrary numbers, more where masters came from a shorter format; and whatever
does not follow the rule at all, such as NaN. What comes back is the master, bit for bit, in any case.
"""

from dataclasses import dataclass

import torch

_LOWER, _HALF = 0xFFFF, 0x8000


@dataclass(frozen=True, slots=True)
class SplitMasters:
    """Masters without their weights.

    Attributes:
        remainders: ``[n]`` int16, the lower halves of the bits.
        places: ``[k]`` int64, ascending: where the rule is wrong.
        uppers: ``[k]`` int16, the upper halves of the bits there.
    """

    remainders: torch.Tensor
    places: torch.Tensor
    uppers: torch.Tensor


def split_masters(masters: torch.Tensor, weights: torch.Tensor) -> SplitMasters:
    """Return what weights leave out of their masters.

    Args:
        masters: ``[n]`` fp32.
        weights: ``[n]`` BF16, what was rounded from them, in whatever way.
    """
    bits = masters.contiguous().view(torch.int32)
    lower, upper = bits & _LOWER, (bits >> 16) & _LOWER
    places = (_upper_by_rule(lower, weights) != upper).nonzero().squeeze(1)
    return SplitMasters(
        remainders=lower.to(torch.int16), places=places, uppers=upper[places].to(torch.int16)
    )


def join_masters(parts: SplitMasters, weights: torch.Tensor) -> torch.Tensor:
    """Return the ``[n]`` fp32 masters that `split_masters` was given with these weights."""
    lower = parts.remainders.to(torch.int32) & _LOWER
    upper = _upper_by_rule(lower, weights)
    upper[parts.places] = parts.uppers.to(torch.int32) & _LOWER
    return ((upper << 16) | lower).view(torch.float32)


def _upper_by_rule(lower: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the upper halves, one less than the weight's bits where more than one half was rounded up."""
    codes = weights.contiguous().view(torch.int16).to(torch.int32)
    return (codes - (lower > _HALF).to(torch.int32)) & _LOWER
