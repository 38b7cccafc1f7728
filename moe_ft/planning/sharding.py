"""Division of replicated state among the data-parallel ranks that save it.

With the distributed optimizer every rank already owns a slice, and this file decides nothing.
"""

from collections.abc import Sequence
from itertools import accumulate

Slice = tuple[int, int]


def assign_equal_slices(num_elements: Sequence[int], num_ranks: int) -> list[list[Slice]]:
    """Cut replicated parameters so that every rank saves the same share.

    The parameters are laid end to end and cut into equal pieces; a cut may be inside a parameter
    (MoC-System, section 4.1, equal sharding, without its restriction to whole layers).

    Args:
        num_elements: elements of each parameter, in an order that all ranks share.
        num_ranks: ranks that hold them, at least 1.

    Returns:
        ``[rank][parameter]``: the flat range (start, end) of each parameter that a rank saves, empty
        ranges included. The ranges of one parameter over all ranks are disjoint and cover it.
    """
    total = sum(num_elements)
    return _cut(num_elements, [total * rank // num_ranks for rank in range(num_ranks + 1)])


def assign_baseline_slices(num_elements: Sequence[int], num_ranks: int) -> list[list[Slice]]:
    """Let the first rank save all replicated parameters.

    This is the method of Megatron-DeepSpeed and the baseline of MoC-System (Fig. 7a).

    Args:
        num_elements: elements of each parameter, in an order that all ranks share.
        num_ranks: ranks that hold them, at least 1.

    Returns:
        ``[rank][parameter]`` as of `assign_equal_slices`.
    """
    return _cut(num_elements, [0, *[sum(num_elements)] * num_ranks])


def assign_weighted_slices(num_elements: Sequence[int], shares: Sequence[int]) -> list[list[Slice]]:
    """Cut replicated parameters so that the ranks save unequal shares.

    Args:
        num_elements: elements of each parameter, in an order that all ranks share.
        shares: ``[rank]`` non-negative, not all 0; rank r saves shares[r] / sum(shares) of all elements, to
            within one element. If they add up to the number of elements, it saves exactly shares[r].

    Returns:
        ``[rank][parameter]`` as of `assign_equal_slices`.
    """
    total = sum(num_elements)
    ends = list(accumulate(shares, initial=0))
    return _cut(num_elements, [total * end // (ends[-1] or 1) for end in ends])


def adaptive_shares(total_bytes: int, loads: Sequence[int]) -> list[int]:
    """Spread bytes that any rank can save so that the heaviest rank is as light as possible.

    The lightest ranks are filled to a common level (MoC-System, section 4.3, adaptive sharding, without its
    restriction to whole modules).

    Args:
        total_bytes: bytes of state that every rank holds.
        loads: ``[rank]`` bytes that a rank saves anyway, such as its selected experts.

    Returns:
        ``[rank]`` bytes that each takes; their sum is total_bytes. In any other division the heaviest rank
        is at least as heavy.
    """
    order = sorted(range(len(loads)), key=lambda rank: loads[rank])
    in_lightest = 0  # loads of the lightest ranks so far
    for count, rank in enumerate(order, 1):
        in_lightest += loads[rank]
        level, rest = divmod(total_bytes + in_lightest, count)
        if count == len(order) or level <= loads[order[count]]:
            break
    shares = [0] * len(loads)
    for position, rank in enumerate(sorted(order[:count])):
        shares[rank] = level - loads[rank] + (position < rest)
    return shares


def _cut(num_elements: Sequence[int], cuts: Sequence[int]) -> list[list[Slice]]:
    """Cut parameters that are laid end to end; rank r gets the elements between cuts r and r + 1."""
    ends = list(accumulate(num_elements))
    return [
        [
            _intersect(end - count, end, low, high)
            for count, end in zip(num_elements, ends, strict=True)
        ]
        for low, high in zip(cuts, cuts[1:], strict=False)
    ]


def _intersect(start: int, end: int, low: int, high: int) -> Slice:
    """Return the part of [start, end) that lies in [low, high), relative to start."""
    first, last = max(start, low), min(end, high)
    return (first - start, last - start) if first < last else (0, 0)
