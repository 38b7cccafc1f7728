"""Tables of slots: the expert of each slot of each rank, in one layer.

Tables here level the load. Those that survive lost nodes are in replica_survival.py.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError
from moe_ft.planning.replica_counts import allocate, popular
from moe_ft.planning.token_shares import divide

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
    placing = _Placing(load, counts, [[] for _ in range(num_ranks)], slots_per_rank)
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


class _Placing:
    """Rows of a table that is being made, and the work of the ranks."""

    def __init__(
        self, load: Sequence[int], counts: Sequence[int], rows: list[list[int]], slots: int
    ) -> None:
        self._rows, self._slots = rows, slots
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
