"""Levels of groups through which many ranks agree: blocks of ranks, then the leaders of blocks, and so on.

The groups themselves, and what goes through them, are engine/agreement.py.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

# Ranks of a group: those of a node, where nodes have as many, so that most messages stay on it.
FAN_OUT = 8


def plan_levels(ranks: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Divide ranks into groups, the first ranks of these into groups, until one group is left.

    Args:
        ranks: ascending.

    Returns:
        ``[level][group]`` ascending ranks. The first rank of a group is its leader, and a member of a group
        of the next level, unless that group would be of it alone. Groups of one rank are left out, and no
        level is empty.
    """
    levels: list[list[tuple[int, ...]]] = []
    members = tuple(ranks)
    while len(members) > 1:
        groups = [members[start : start + FAN_OUT] for start in range(0, len(members), FAN_OUT)]
        levels.append([group for group in groups if len(group) > 1])
        members = tuple(group[0] for group in groups)
    return levels


def divide[Value](values: Mapping[int, Value], members: Sequence[int]) -> list[dict[int, Value]]:
    """Divide values by rank among the members of a group: each gets its own, and those of who is below it.

    Args:
        members: ascending. The ranks below one are those from it to the next.
    """
    parts: list[dict[int, Value]] = [{} for _ in members]
    for rank, value in values.items():
        parts[bisect_right(members, rank) - 1][rank] = value
    return parts


def most_connections(num_ranks: int) -> int:
    """Return the most other ranks that a rank is connected to in the groups of all levels."""
    levels = plan_levels(range(num_ranks))
    return sum(
        len(level[0]) - 1 for level in levels
    )  # of the first rank, which leads wherever it is
