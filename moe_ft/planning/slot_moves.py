"""Moves of replicas from one table of slots to the next: their number, the ranks of rows, and who sends.

This is the way of systems that move an expert with its state. In slots that homes fill, every table costs the
same, and only the number of moves tells how much a table changes.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_ft.planning.slot_tables import Table

Rows = Sequence[Sequence[int]]  # [rank][slot] expert; empty for a rank that has nothing


class Move(NamedTuple):
    """A replica that a rank fetches; the source is None if no rank has its expert."""

    expert: int
    source: int | None
    destination: int


def count_moves(previous: Rows, table: Table) -> int:
    """Return the replicas that ranks must fetch: those they did not have in the previous table.

    Args:
        previous: ``[rank][slot]`` experts of the same ranks; rows that are missing had nothing.
        table: the next one.
    """
    return len(plan_moves(previous, table))


def plan_moves(previous: Rows, table: Table) -> list[Move]:
    """Choose a source for every replica that a rank must fetch: each time the one that sent the least.

    Source: Lazarus, section 5 (point-to-point messages balanced among all owners).
    """
    owners: dict[int, list[int]] = {}
    for rank, row in enumerate(previous):
        for expert in sorted({*row}):
            owners.setdefault(expert, []).append(rank)
    sent: Counter[int | None] = Counter()
    moves = []
    for rank, row in enumerate(table):
        had = Counter(previous[rank] if rank < len(previous) else ())
        for expert in sorted((Counter(row) - had).elements()):
            sources = owners.get(expert, ())
            source = min(sources, key=lambda each: (sent[each], each), default=None)
            sent[source] += 1
            moves.append(Move(expert, source, rank))
    return moves


def arrange_greedily(previous: Rows, table: Table) -> Table:
    """Give the rows of a table to ranks, one rank after the other, each the row it has most of.

    Source: Lazarus, section 5, the greedy mapping of nodes.
    """
    left, rows = list(table), []
    for had in previous:
        row = max(left, key=lambda each: _overlap(had, each))
        left.remove(row)
        rows.append(row)
    return tuple(rows)


def arrange(previous: Rows, table: Table) -> Table:
    """Give the rows of a table to ranks so that they fetch as few replicas as can be."""
    kept = [[_overlap(had, row) for row in table] for had in previous]
    return tuple(table[row] for row in _assign(-np.array(kept)))


def _overlap(had: Sequence[int], row: Sequence[int]) -> int:
    return (Counter(had) & Counter(row)).total()


def _assign(costs: npt.NDArray[np.int64]) -> list[int]:
    """Return ``[row]`` the column of a square matrix, each once, whose costs have the least sum.

    Source: the Hungarian method by shortest augmenting paths, O(n^3): Jonker and Volgenant 1987.
    """
    size = len(costs)
    column_of, row_of = [-1] * size, [-1] * size
    prices = np.zeros(size, dtype=np.int64)  # of columns
    for start in range(size):
        row, came_from = start, np.full(size, -1)
        paid = np.zeros(size, dtype=np.int64)  # by the way to each column, once it is taken
        distance = np.full(size, np.iinfo(np.int64).max // 2)
        taken = np.zeros(size, dtype=bool)
        base = 0
        while True:
            own = costs[row] - prices
            reduced = base + own - (own[column_of[row]] if column_of[row] >= 0 else 0)
            closer = ~taken & (reduced < distance)
            distance[closer], came_from[closer] = reduced[closer], row
            column = int(np.where(taken, np.iinfo(np.int64).max, distance).argmin())
            taken[column], base = True, int(distance[column])
            paid[column] = base
            if row_of[column] < 0:
                break
            row = row_of[column]
        prices[taken] += paid[taken] - base
        while column >= 0:
            row = int(came_from[column])
            column_of[row], next_column = column, column_of[row]
            row_of[column] = row
            column = next_column
    return column_of
