"""Tables of slots for lost nodes: how likely every expert of all layers still has a live replica.

A rank is a node here. Replicas must carry the whole state of their expert for this to be a recovery: with
slots that homes fill it is not, and replicas of state count instead (placement.py).
"""

from collections.abc import Iterable, Sequence
from functools import cache
from math import comb

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError
from moe_ft.planning.slot_tables import Table

MOST_EXACT = 20  # ranks of which every set of dead ones is looked at


def overlapping(counts: Sequence[int], num_ranks: int) -> Table:
    """Return a table of maximum rank overlap.

    Groups of as many experts as a rank has slots, in order of their replicas, have ranks of their own: as
    many as the first of the group has replicas, and all of them have the whole group. What is left goes to
    the expert on the fewest ranks first, to a rank without it that has the most free slots.

    Args:
        counts: ``[expert]`` replicas, whose sum is that of the slots of all ranks.

    Source: Lazarus, theorem 1. It says nothing about the order of the rest, which changes nothing where the
    theorem holds.
    """
    slots = _slots_per_rank(counts, num_ranks)
    order = sorted(range(len(counts)), key=lambda expert: (counts[expert], expert))
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    left, first = list(counts), 0
    for start in range(0, len(order), slots):
        group = order[start : start + slots]
        end = min(first + counts[group[0]], num_ranks)
        for rank in range(first, end):
            rows[rank].extend(group)
        for expert in group:
            left[expert] -= end - first
        first = end
    while any(left):
        places = {expert: sum(expert in row for row in rows) for expert in order if left[expert]}
        expert = min(places, key=lambda each: (places[each], each))
        free = [rank for rank in range(num_ranks) if len(rows[rank]) < slots]
        rank = min(free, key=lambda each: (expert in rows[each], len(rows[each]), each))
        rows[rank].append(expert)
        left[expert] -= 1
    return tuple(tuple(sorted(row)) for row in rows)


def _slots_per_rank(counts: Sequence[int], num_ranks: int) -> int:
    slots, rest = divmod(sum(counts), num_ranks)
    if rest or min(counts) < 1 or len(counts) > sum(counts):
        raise PlanError(f"{num_ranks} ranks cannot have equally many of the replicas {counts}")
    return slots


def ranks_of(tables: Iterable[Sequence[Sequence[int]]]) -> set[int]:
    """Return the ranks of each expert of each layer as bits of a number, equal ones once."""
    found = set()
    for table in tables:
        places: dict[int, int] = {}
        for rank, row in enumerate(table):
            for expert in row:
                places[expert] = places.get(expert, 0) | 1 << rank
        found |= {*places.values()}
    return found


def lost_sets(tables: Sequence[Sequence[Sequence[int]]]) -> tuple[int, ...]:
    """Return ``[dead ranks]`` how many sets of so many ranks have all replicas of an expert of a layer.

    Args:
        tables: of all layers, over the same ranks, `MOST_EXACT` at most.

    Raises:
        PlanError: if there are more ranks.
    """
    num_ranks = len(tables[0])
    if num_ranks > MOST_EXACT:
        raise PlanError(f"the sets of {num_ranks} ranks are too many to look at, sample them")
    is_lost = np.zeros(1 << num_ranks, dtype=bool)
    is_lost[list(ranks_of(tables))] = True
    for rank in range(num_ranks):  # a set loses what a set without one of its ranks loses
        halves = is_lost.reshape(-1, 2, 1 << rank)
        halves[:, 1] |= halves[:, 0]
    return tuple(np.bincount(_sizes(num_ranks)[is_lost], minlength=num_ranks + 1).tolist())


@cache
def _sizes(num_ranks: int) -> npt.NDArray[np.int64]:
    """Return ``[set of ranks]`` how many they are."""
    sizes = np.zeros(1, dtype=np.int64)
    for _ in range(num_ranks):
        sizes = np.concatenate([sizes, sizes + 1])
    return sizes


def recovery_probability(tables: Sequence[Table], num_dead: int) -> float:
    """Return how likely all experts of all layers have a live replica after random ranks have died.

    Args:
        tables: of all layers, over the same ranks, `MOST_EXACT` at most.

    Source: Lazarus, section 4.3, by counting all sets of dead ranks.
    """
    return 1 - lost_sets(tables)[num_dead] / comb(len(tables[0]), num_dead)


def sample_recovery(
    tables: Sequence[Table], num_dead: int, generator: np.random.Generator, num_samples: int
) -> float:
    """Return the same for any number of ranks, from random sets of dead ones."""
    num_ranks = len(tables[0])
    places = np.array(
        [[mask >> rank & 1 for rank in range(num_ranks)] for mask in ranks_of(tables)]
    )
    order = generator.permuted(np.tile(np.arange(num_ranks), (num_samples, 1)), axis=1)
    alive = (order >= num_dead).astype(np.int64)  # [sample, rank]
    return float((alive @ places.T > 0).all(axis=1).mean())
