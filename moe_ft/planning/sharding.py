"""Who saves which part of state that several data-parallel ranks hold alike.

With the distributed optimizer every rank owns a slice already and nothing is decided here.
"""

from collections.abc import Sequence
from itertools import accumulate

from moe_ft.errors import PlanError

Slice = tuple[int, int]


def assign_equal_slices(num_elements: Sequence[int], num_ranks: int) -> list[list[Slice]]:
    """Cut parameters that all ranks hold alike so that every rank saves the same share.

    The parameters are laid end to end and cut into equal pieces; a cut may fall inside of a parameter
    (MoC-System, section 4.1, equal sharding, without its restriction to whole layers).

    Args:
        num_elements: elements of each parameter, in an order that all ranks share.
        num_ranks: ranks that hold them, at least 1.

    Returns:
        ``[rank][parameter]``: the flat range (start, end) of each parameter that a rank saves, empty
        ranges included. The ranges of one parameter over all ranks are disjoint and cover it.

    Raises:
        PlanError: if there is no rank.
    """
    if num_ranks < 1:
        raise PlanError(f"num_ranks must be at least 1, got {num_ranks}")
    ends = list(accumulate(num_elements))
    total = ends[-1] if ends else 0
    cuts = [total * rank // num_ranks for rank in range(num_ranks + 1)]
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
