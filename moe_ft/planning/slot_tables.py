"""Tables of slots: the expert of each slot of each rank in one layer, and who sends how many tokens where.

Numbers of replicas follow from the tokens that go to each expert, ranks from the numbers. Most tables here
level the load. For lost nodes others are better: those of maximum rank overlap. How likely every expert of
all layers still has a live replica is here too. A rank is a node then, and replicas must carry the whole
state of their expert for that to be a recovery: with slots that homes fill it is not, and replicas of state
count instead (placement.py).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from math import comb

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError

Numbers = npt.NDArray[np.int64]


def divide(totals: Numbers, weights: Numbers) -> Numbers:
    """Divide integers in proportion to weights, by largest remainder; ties go to the first.

    Args:
        totals: ``[row]`` to be divided.
        weights: ``[row, column]`` whose sum of a row is at least 1.

    Returns:
        ``[row, column]`` less than 1 from the exact share each; the sum of a row is its total.
    """
    sums = weights.sum(axis=1, keepdims=True)
    found, rest = np.divmod(totals[:, None] * weights, sums)
    missing = totals - found.sum(axis=1)
    order = np.argsort(-rest, axis=1, kind="stable")
    extra = (np.arange(weights.shape[1]) < missing[:, None]).astype(np.int64)
    np.put_along_axis(found, order, np.take_along_axis(found, order, axis=1) + extra, axis=1)
    return found


def share_of(tokens: Numbers, replicas: Numbers, source: int) -> tuple[Numbers, Numbers]:
    """Return how many tokens for each expert one rank sends to each other, and what all ranks get.

    Every rank gets tokens of an expert in proportion to its replicas: its own first, then those that others
    have left, in order of the ranks.

    Args:
        tokens: ``[source, expert]`` that a rank has for an expert.
        replicas: ``[expert, rank]`` slots of a rank that have the expert.

    Returns:
        ``[expert, destination]``, whose sum over destinations are the rank's tokens; ``[rank]`` tokens that a
        rank gets, of each expert less than one from the exact share.

    Raises:
        PlanError: if an expert has no replica.

    Source: Lazarus, algorithm 1, with the sum of line 10 over all other receivers, and in integers.
    """
    own, sent, free = _left(tokens, replicas)
    # Lay the tokens left to send and the room left on one line: where two pieces overlap, tokens go.
    end, free_to = sent[:, : source + 1].sum(axis=1, keepdims=True), free.cumsum(axis=1)
    first = np.maximum(end - sent[:, source, None], free_to - free)
    found: Numbers = np.maximum(np.minimum(end, free_to) - first, 0)
    found[:, source] += own[:, source]
    return found, (own + free).sum(axis=0)


def _left(tokens: Numbers, replicas: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return ``[expert, rank]`` tokens that stay, that are left to send, and that there is room for."""
    if (lost := np.flatnonzero(replicas.sum(axis=1) == 0)).size:
        raise PlanError(f"experts {', '.join(map(str, lost))} have no replica")
    wanted = tokens.T
    capacity = divide(wanted.sum(axis=1), replicas)
    own = np.minimum(wanted, capacity)
    return own, wanted - own, capacity - own


def possible_minimum(num_experts: int, num_slots: int, minimum: int) -> int:
    """Return the replicas that every expert can have, at most `minimum`.

    Raises:
        PlanError: if there are fewer slots than experts, or the minimum is less than 1.
    """
    if minimum < 1:
        raise PlanError(f"every expert needs a replica, but the minimum is {minimum}")
    if not 0 < num_experts <= num_slots:
        raise PlanError(f"{num_experts} experts need as many slots, there are {num_slots}")
    return min(minimum, num_slots // num_experts)


def allocate(load: Sequence[int], num_slots: int, minimum: int) -> tuple[int, ...]:
    """Return the replicas of each expert, in proportion to its load.

    Experts get slots in order of their load, the least loaded first: the share of their load in what is left,
    rounded down, and no less than the minimum. The last one gets the rest. If the slots do not suffice for
    the minimum, it is the largest for which they do (section 6.2 of the paper).

    Args:
        load: ``[expert]`` tokens; equal ones are in order of the experts.
        num_slots: of all ranks of the layer.
        minimum: replicas that every expert should have, at least 1.

    Returns:
        ``[expert]`` replicas; their sum is `num_slots`.

    Raises:
        PlanError: as `possible_minimum` does.

    Source: Lazarus, equation 1, in integers.
    """
    least = possible_minimum(len(load), num_slots, minimum)
    counts = [0] * len(load)
    slots, tokens = num_slots, sum(load)
    ascending = sorted(range(len(load)), key=lambda expert: (load[expert], expert))
    for done, expert in enumerate(ascending):
        share = load[expert] * slots // tokens if tokens else slots // (len(load) - done)
        counts[expert] = max(share, least)
        slots -= counts[expert]
        tokens -= load[expert]
    assert slots == 0  # a share of the least loaded leaves the minimum for all others
    return tuple(counts)


def popular(load: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Return the replicas of each expert, next to its share of the load of the last iteration.

    Args:
        load: ``[expert]`` tokens.
        num_slots: of all ranks of the layer.

    Returns:
        ``[expert]`` replicas, at least 1; their sum is `num_slots`.

    Raises:
        PlanError: as `possible_minimum` does.

    Source: SYMI, the placement of an iteration by the popularity of the one before.
    """
    possible_minimum(len(load), num_slots, 1)
    goals = [tokens * num_slots for tokens in load] if any(load) else [num_slots] * len(load)
    total = sum(load) or len(load)
    counts = [max(goal // total, 1) for goal in goals]

    def excess(expert: int) -> int:
        return counts[expert] * total - goals[expert]

    while sum(counts) > num_slots:
        counts[max((each for each in range(len(load)) if counts[each] > 1), key=excess)] -= 1
    while sum(counts) < num_slots:
        counts[min(range(len(load)), key=excess)] += 1
    return tuple(counts)


Table = tuple[tuple[int, ...], ...]  # [rank][slot] expert
Replicas = npt.NDArray[np.int64]  # [expert, rank] slots

_TOKENS = 1_000_000  # of made-up loads
_SCALE = 1 << 20  # of a token: work is compared in integers, so that all ranks choose alike


def stock(num_experts: int, num_ranks: int) -> Table:
    """Return Megatron's table: each rank has the next equal part of the experts, each once.

    Raises:
        PlanError: if the ranks do not divide the experts.
    """
    if num_experts % num_ranks:
        raise PlanError(f"{num_ranks} ranks cannot have equal parts of {num_experts} experts")
    slots = num_experts // num_ranks
    return tuple(tuple(range(rank * slots, (rank + 1) * slots)) for rank in range(num_ranks))


def first_table(num_experts: int, num_ranks: int, slots_per_rank: int, minimum: int) -> Table:
    """Return the table that a run begins with: Megatron's where every expert has one slot."""
    if num_ranks * slots_per_rank == num_experts:
        return stock(num_experts, num_ranks)
    return balanced([1] * num_experts, num_ranks, slots_per_rank, minimum)


def balanced(load: Sequence[int], num_ranks: int, slots_per_rank: int, minimum: int) -> Table:
    """Return a table in which ranks get about equally many tokens.

    The replicas with the most tokens are placed first, each on the rank with the least work among those with
    a free slot, if possible on one that has none of its expert.

    Args:
        load: ``[expert]`` tokens.
        num_ranks: expert-parallel ranks of the layer's stage.
        minimum: replicas that every expert should have, at least 1: as `allocate` takes it.

    Returns:
        ``[rank][slot]`` experts, ascending on each rank.

    Raises:
        PlanError: if there are fewer slots than experts, or the minimum is less than 1.
    """
    counts = allocate(load, num_ranks * slots_per_rank, minimum)
    placing = _SlotPlacing(load, counts, [[] for _ in range(num_ranks)], slots_per_rank)
    placing.fill(counts)
    return placing.table()


def contiguous(load: Sequence[int], num_ranks: int, slots_per_rank: int) -> Table:
    """Return SYMI's table: replicas next to their share of the load, experts in order, slot after slot.

    Args:
        load: ``[expert]`` tokens of the last iteration.

    Raises:
        PlanError: if there are fewer slots than experts.

    Source: SYMI, placement by the popularity of the last iteration.
    """
    counts = popular(load, num_ranks * slots_per_rank)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return cut(experts, slots_per_rank)


def replicas_of(table: Table, num_experts: int) -> Replicas:
    """Return ``[expert, rank]`` how many slots of a rank have an expert."""
    found = np.zeros((num_experts, len(table)), dtype=np.int64)
    np.add.at(found, (np.array(table), np.arange(len(table))[:, None]), 1)
    return found


def count_moves(previous: Sequence[Sequence[int]], table: Table) -> int:
    """Return the replicas that ranks did not have in the previous table.

    Args:
        previous: ``[rank][slot]`` experts of the same ranks; rows that are missing had nothing.
    """
    had = [Counter(row) for row in previous[: len(table)]]
    had += [Counter[int]() for _ in range(len(table) - len(had))]
    return sum((Counter(row) - old).total() for row, old in zip(table, had, strict=True))


def cut(experts: Sequence[int], slots_per_rank: int) -> Table:
    """Return the table whose slots, rank after rank, have these experts."""
    starts = range(0, len(experts), slots_per_rank)
    return tuple(tuple(experts[start : start + slots_per_rank]) for start in starts)


def imbalance(table: Table, load: Sequence[int]) -> float:
    """Return the tokens of the busiest rank over the mean, as they are dispatched."""
    tokens = divide(np.array(load), replicas_of(table, len(load))).sum(axis=0)
    return float(tokens.max() / tokens.mean())


def skewed(num_experts: int, ratio: int, *, is_one_hot: bool) -> list[int]:
    """Return loads whose largest is so many times the smallest: one hot expert, or a geometric row."""
    if is_one_hot:
        parts = np.array([ratio, *[1] * (num_experts - 1)], dtype=float)
    else:
        parts = float(ratio) ** np.linspace(1, 0, num_experts)
    loads: list[int] = np.rint(parts / parts.sum() * _TOKENS).astype(int).tolist()
    return loads


class _SlotPlacing:
    """Rows of a table that is being made, and the work of the ranks."""

    def __init__(
        self, load: Sequence[int], counts: Sequence[int], rows: list[list[int]], slots: int
    ) -> None:
        self._rows = rows
        self._slots = slots
        # Of one replica: tokens are divided equally among the replicas.
        self._each = [_SCALE * tokens // count for tokens, count in zip(load, counts, strict=True)]
        self._work = [sum(self._each[expert] for expert in row) for row in rows]

    def table(self) -> Table:
        """Return the table, experts ascending on each rank."""
        return tuple(tuple(sorted(row)) for row in self._rows)

    def fill(self, counts: Sequence[int]) -> None:
        """Place the replicas that are missing, those with the most tokens first."""
        placed = self._placed(len(counts))
        for expert in sorted(range(len(counts)), key=lambda each: (-self._each[each], each)):
            if counts[expert] <= placed[expert]:
                continue
            free = [
                self._key(expert, rank) for rank in range(len(self._rows)) if self._is_free(rank)
            ]
            heapify(free)
            for _ in range(counts[expert] - placed[expert]):
                *_, rank = heappop(free)
                self._rows[rank].append(expert)
                self._work[rank] += self._each[expert]
                if self._is_free(rank):
                    heappush(free, self._key(expert, rank))

    def _placed(self, num_experts: int) -> list[int]:
        placed = [0] * num_experts
        for expert in (expert for row in self._rows for expert in row):
            placed[expert] += 1
        return placed

    def _is_free(self, rank: int) -> bool:
        return len(self._rows[rank]) < self._slots

    def _key(self, expert: int, rank: int) -> tuple[int, int, int]:
        return self._rows[rank].count(expert), self._work[rank], rank


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
