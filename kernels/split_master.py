"""Split of an fp32 master weight into the BF16 weight that forward uses and the remaining bits.

If the BF16 weights are kept anyway, a master costs 2 bytes and 1 bit instead of 4 bytes. The 2 bytes are the
lower half of the master's bits, the remainder. The bit, called carry, tells whether the upper half was
rounded up. The remainder alone cannot tell, because the upper half decides how a tie is rounded (an even
weight has 65,537 masters). The direction of rounding therefore does not matter.

Masters are restored bit for bit, except a NaN with bits set in its lower half: only the upper half of a NaN
is kept. A weight that was not rounded from its master cannot be split; such weights are counted.
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
        carries: ``[ceil(n / 8)]`` uint8, one bit per weight, the lowest first: whether it was rounded up.
        num_wrong: number of weights that were not rounded from their masters, which cannot be restored.
    """

    remainders: torch.Tensor
    carries: torch.Tensor
    num_wrong: int


def split_masters(masters: torch.Tensor, weights: torch.Tensor) -> SplitMasters:
    """Return the bits that weights leave out of their masters.

    Args:
        masters: ``[n]`` fp32.
        weights: ``[n]`` BF16, rounded from them in either direction.
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
