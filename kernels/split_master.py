"""An fp32 master weight as the BF16 weight that forward uses, and what that leaves out.

Where the BF16 weights are kept too, masters cost 2 bytes and 1 bit more each, and not 4 bytes. The 16-bit
remainder is the lower half of the master's bits. The bit tells whether the upper half was rounded up: the
remainder alone cannot, because at one half rounding to nearest even depends on the upper half (an even weight
has 65,537 masters). So it does not matter in which direction a weight was rounded.

Masters come back bit for bit, but for a NaN with bits set in its lower half: of a NaN the upper half is kept.
A weight that was not rounded from its master cannot be split; such places are counted.
"""

from dataclasses import dataclass

import numpy as np
import torch

_LOWER, _INFINITY, _QUIET = 0xFFFF, 0x7F80, 0x40
_MAGNITUDE = 0x7FFF


@dataclass(frozen=True, slots=True)
class SplitMasters:
    """Masters without their weights.

    Attributes:
        remainders: ``[n]`` int16, the lower halves of the bits; of a NaN the upper half.
        carries: ``[ceil(n / 8)]`` uint8, a bit for each, the lowest first: whether it was rounded up.
        num_wrong: how many weights were not rounded from their masters; these do not come back.
    """

    remainders: torch.Tensor
    carries: torch.Tensor
    num_wrong: int


def split_masters(masters: torch.Tensor, weights: torch.Tensor) -> SplitMasters:
    """Return what weights leave out of their masters.

    Args:
        masters: ``[n]`` fp32.
        weights: ``[n]`` BF16, what was rounded from them, in whatever direction.
    """
    bits = masters.contiguous().view(torch.int32)
    lower, upper = bits & _LOWER, (bits >> 16) & _LOWER
    codes = weights.contiguous().view(torch.int16).to(torch.int32) & _LOWER
    are_both_nan = _is_nan(codes) & torch.isnan(masters)
    carries = (codes != upper) & ~are_both_nan
    is_wrong = carries & ((codes - 1 != upper) | _is_nan(codes))
    # A NaN whose bits are all in the lower half would come back as an infinity.
    of_nan = torch.where(upper & _MAGNITUDE == _INFINITY, upper | _QUIET, upper)
    remainders = torch.where(are_both_nan, of_nan, lower)
    return SplitMasters(
        remainders=remainders.to(torch.int16),
        carries=torch.from_numpy(np.packbits(carries.numpy(), bitorder="little")),
        num_wrong=int(is_wrong.sum()),
    )


def join_masters(
    remainders: torch.Tensor, carries: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the ``[n]`` fp32 masters that `split_masters` was given with these weights."""
    lower = remainders.to(torch.int32) & _LOWER
    codes = weights.contiguous().view(torch.int16).to(torch.int32) & _LOWER
    bits = np.unpackbits(carries.numpy(), count=len(lower), bitorder="little")
    upper = codes - torch.from_numpy(bits).to(torch.int32)
    return torch.where(_is_nan(codes), lower << 16, (upper << 16) | lower).view(torch.float32)


def _is_nan(codes: torch.Tensor) -> torch.Tensor:
    return codes & _MAGNITUDE > _INFINITY
