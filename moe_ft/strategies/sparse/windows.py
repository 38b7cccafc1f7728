"""Division of the units of a stage among the snapshots of a sparse window: bytes in, cuts out.

A window is a run of consecutive snapshots. Each holds one group of units at FULL, the groups still to come
at COMPUTE and those before it not at all (MoEvement, sections 3.2 and 3.5). The order of the units is a
sequence of positions, and a group is a run of them. popularity.py decides which experts come first.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError

Bytes = npt.NDArray[np.int64]

_NO_WAY = 1 << 40  # more modules than any stage has


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionSizes:
    """Bytes that each rank of a stage saves at each position of the order.

    Attributes:
        full: ``[rank, position]`` bytes at FULL; 0 where another rank saves the state. At least one rank.
        compute: likewise at COMPUTE, at most as many as at FULL.
        splits: ``[border]`` number of modules that can be frozen only as a whole and have units on both sides
            of the border before each position, and last of the one after all; None without such modules.
    """

    full: Bytes
    compute: Bytes
    splits: Bytes | None = None

    def __post_init__(self) -> None:
        wrong = np.argwhere((self.compute < 0) | (self.compute > self.full))
        if len(wrong):
            rank, position = wrong[0].tolist()
            raise PlanError(
                f"rank {rank} has {self.compute[rank, position]} bytes at COMPUTE and "
                f"{self.full[rank, position]} at FULL at position {position}; "
                "they must satisfy 0 <= COMPUTE <= FULL"
            )

    @property
    def num_positions(self) -> int:
        """Units of the order."""
        return int(self.full.shape[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowCuts:
    """Positions that each snapshot of a window holds at FULL.

    Attributes:
        ends: ``[snapshot]`` one after the last position of its group, ascending; the last one is the
            number of positions.
        largest_bytes: of any snapshot of any rank.
    """

    ends: tuple[int, ...]
    largest_bytes: int

    @property
    def length(self) -> int:
        """Snapshots of the window."""
        return len(self.ends)

    def groups(self) -> npt.NDArray[np.int64]:
        """Return ``[position]`` the snapshot, from 0, that holds it at FULL."""
        return np.repeat(np.arange(self.length), np.diff(self.ends, prepend=0))


def snapshot_bytes(sizes: PositionSizes, ends: Sequence[int]) -> Bytes:
    """Return ``[rank, snapshot]`` the bytes of every snapshot of a window.

    Args:
        ends: ``[snapshot]`` as of `WindowCuts`.
    """
    borders = [0, *ends]
    full, compute = _running_sums(sizes.full), _running_sums(sizes.compute)
    return np.diff(full[:, borders]) + compute[:, -1:] - compute[:, borders[1:]]


def cut_window(sizes: PositionSizes, length: int) -> WindowCuts:
    """Divide the positions so that the largest snapshot of any rank is as small as possible, to the byte.

    Among the divisions that reach that, the one whose groups end the latest: it holds the least at COMPUTE.
    Where modules freeze only as a whole, groups end earlier if that splits fewer of them, and no later: what
    is FULL later is frozen longer.

    Args:
        sizes: of the stage, in the order in which units are to be saved.
        length: snapshots, at least 1. No group is empty unless there are fewer positions; then the last
            ones are.
    """
    return _cut(_Packing(sizes), length)


def most_window_bytes(sizes: PositionSizes, shortest: int, longest: int) -> Bytes:
    """Return ``[rank]`` the most bytes of a window, of those with so many snapshots.

    The longest window takes the most, unless groups end earlier to keep modules whole: then a shorter one
    may hold more at COMPUTE.
    """
    lengths = [longest] if sizes.splits is None else range(shortest, longest + 1)
    cuts = [cut_window(sizes, each).ends for each in lengths]
    return np.stack([snapshot_bytes(sizes, ends).sum(axis=1) for ends in cuts]).max(axis=0)


def reserved_window_bytes(
    sizes: PositionSizes, shortest: int, longest: int
) -> npt.NDArray[np.float64]:
    """Return ``[rank]`` the bytes for which memory is made, but for a margin.

    Windows take them in this order, or in one that is as good as random, in which a unit is at COMPUTE in
    half of the other snapshots.
    """
    by_chance = sizes.full.sum(axis=1) + sizes.compute.sum(axis=1) * (longest - 1) / 2
    return np.maximum(most_window_bytes(sizes, shortest, longest), by_chance)


def count_splits(columns: Iterable[Sequence[Hashable | None]], num_positions: int) -> Bytes:
    """Return ``[border]`` the number of modules with units on both sides, as in `PositionSizes`.

    Args:
        columns: of each expert-parallel rank, ``[position]`` the module of its unit, None if it has none.
        num_positions: of the order; columns may be shorter.
    """
    splits = np.zeros(num_positions + 1, np.int64)
    for column in columns:
        places: dict[Hashable, list[int]] = {}
        for place, module in enumerate(column):
            if module is not None:
                places.setdefault(module, []).append(place)
        for own in places.values():
            splits[own[0] + 1 : own[-1] + 1] += 1
    return splits


def shortest_window(sizes: PositionSizes, budget_bytes: float, longest: int) -> WindowCuts:
    """Return the shortest window whose snapshots fit into a budget, or the one that misses it least.

    If no window fits, the result is the shortest among those with the smallest largest snapshot.
    Windows with more snapshots than positions are no better than those with as many.

    Args:
        sizes: of the stage, in the order in which units are to be saved.
        budget_bytes: that every rank can copy in one snapshot.
        longest: snapshots that the window may have, at least 1.
    """
    packing = _Packing(sizes)
    most = min(longest, sizes.num_positions)
    ends = packing.pack(math.floor(min(budget_bytes, packing.most_bytes)), most)
    if ends is None:  # then there are positions
        ends = packing.pack(_cut(packing, most).largest_bytes, most)
    assert ends is not None, "a division fits into its own largest snapshot"
    return _cut(packing, max(1, len(ends)))


def _running_sums(sizes: Bytes) -> Bytes:
    """Return ``[rank, border]``: the bytes before each position, and last those of all."""
    return np.pad(np.cumsum(sizes, axis=1, dtype=np.int64), ((0, 0), (1, 0)))


def _different_ranks(sizes: PositionSizes) -> list[int]:
    """Return the first of each set of ranks whose sizes are equal."""
    ranks: dict[tuple[bytes, bytes], int] = {}
    for rank in range(len(sizes.full)):
        ranks.setdefault((sizes.full[rank].tobytes(), sizes.compute[rank].tobytes()), rank)
    return list(ranks.values())


class _Packing:
    """Sums over the positions of a stage, made once to try many budgets.

    The snapshot of positions [a, b) of a rank has full[b] - full[a] + compute[n] - compute[b] bytes, so it
    fits where ``full[b] - compute[b] <= budget + full[a] - compute[n]``. The left side never falls as b
    grows, because FULL is no less than COMPUTE: b is found by binary search.
    """

    def __init__(self, sizes: PositionSizes) -> None:
        ranks = _different_ranks(sizes)
        full, compute = _running_sums(sizes.full[ranks]), _running_sums(sizes.compute[ranks])
        single = sizes.full[ranks] + compute[:, -1:] - compute[:, 1:]
        self.num_positions = sizes.num_positions
        self.most_bytes = int(full[:, -1].max())
        self.most_single_bytes = int(single.max(initial=0))
        self.full, self.compute, self.splits = full, compute, sizes.splits
        # The ranks' left sides one after the other, moved apart, are one ascending sequence: one call
        # searches for all. 64 bits are enough for 9000 different ranks of a petabyte each.
        self._offsets = np.arange(len(ranks)) * self.most_bytes
        self._firsts = np.arange(len(ranks)) * (self.num_positions + 1)
        self._left_sides = (full - compute + self._offsets[:, None]).ravel()
        self._right_sides = np.ascontiguousarray((full - compute[:, -1:]).T)  # less the budget

    def reach(self, start: int, budget: int) -> int:
        """Return the latest end of a snapshot that begins at a position, < 0 if nothing fits."""
        limits = self._right_sides[start] + budget
        # A limit below or above all of a rank's left sides may be found among those of another rank. The
        # result is still negative, or no less than all positions; for the last rank it is never more.
        found = self._left_sides.searchsorted(limits + self._offsets, side="right")
        return int((found - self._firsts).min()) - 1

    def reaches(self, budget: int) -> npt.NDArray[np.int64]:
        """Return ``[position]`` the latest end of a snapshot that begins there, < 0 if nothing fits."""
        limits = self._right_sides + budget + self._offsets
        found = self._left_sides.searchsorted(limits, side="right")
        return (found - self._firsts).min(axis=1) - 1

    def earliest_ends(self, budget: int, length: int) -> list[int]:
        """Return ``[snapshot]`` the earliest end of each group with which the rest still fits.

        A group that ends earlier may begin no later, so this is the packing from the back.
        """
        found = [self.num_positions]
        for _ in range(length - 1):
            needed = (self.full - self.compute)[:, found[-1]] - budget + self.compute[:, -1]
            starts = [row.searchsorted(each) for row, each in zip(self.full, needed, strict=True)]
            found.append(int(max(starts)))
        return found[::-1]

    def pack(self, budget: int, most: int) -> list[int] | None:
        """Return the ends of the fewest groups whose snapshots fit, None if `most` are not enough.

        Each group takes as much as fits. That is optimal: a group that begins later reaches no less far,
        so after any number of groups no other division has come further.
        """
        ends: list[int] = []
        end = 0
        while end < self.num_positions:
            start, end = end, self.reach(end, budget)
            if end <= start or len(ends) == most:
                return None
            ends.append(end)
        return ends


def _cut(packing: _Packing, length: int) -> WindowCuts:
    """Find the least budget for which `length` groups are enough, by bisection over whole bytes."""
    # A snapshot with a position at FULL is no smaller than one that holds nothing else at FULL, and all
    # snapshots of a rank together hold everything at FULL.
    low = max(packing.most_single_bytes, -(-packing.most_bytes // length))
    high = packing.most_bytes
    while low < high:
        middle = (low + high) // 2
        if packing.pack(middle, length) is None:
            low = middle + 1
        else:
            high = middle
    ends = packing.pack(high, length)
    assert ends is not None, "one group with everything fits"
    used = _spread(ends, packing.num_positions, length)
    if packing.splits is not None and length < packing.num_positions:
        used = _keep_modules(packing, used, high)
    return WindowCuts(ends=used, largest_bytes=high)


def _keep_modules(packing: _Packing, latest: Sequence[int], budget: int) -> tuple[int, ...]:
    """End groups earlier where that splits fewer modules in all; among equals as late as possible.

    Args:
        packing: of the positions, more of them than groups.
        latest: ends of a division that fits.
    """
    splits = packing.splits
    assert splits is not None, "only where modules freeze as a whole"
    earliest = packing.earliest_ends(budget, len(latest))
    possible = [np.arange(first, last + 1) for first, last in zip(earliest, latest, strict=True)]
    reach = packing.reaches(budget)
    fewest = [
        np.zeros(len(possible[-1]), np.int64)
    ]  # ``[group][end]`` split at an end and after it
    for starts, ends in zip(possible[-2::-1], possible[:0:-1], strict=True):
        # The ends that fit a start are a run of them.
        first = np.maximum(starts + 1, ends[0]) - ends[0]
        last = np.minimum(reach[starts], ends[-1]) - ends[0]
        fewest.insert(0, splits[starts] + _least_between(fewest[0], first, last))
    chosen, end = [], 0
    for ends, costs in zip(possible, fewest, strict=True):
        fits = (ends > end) & (ends <= reach[end])
        best = np.where(fits, costs, _NO_WAY)[::-1].argmin()
        end = int(ends[::-1][best])
        chosen.append(end)
    return tuple(chosen)


def _least_between(
    values: npt.NDArray[np.int64], first: npt.NDArray[np.int64], last: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return ``[run]`` the least of the values from `first` to `last`, _NO_WAY of an empty run."""
    table = [values]  # ``[power][start]`` the least of 2**power values
    while 2 ** len(table) <= len(values):
        half = 2 ** (len(table) - 1)
        table.append(np.minimum(table[-1][:-half], table[-1][half:]))
    found = np.full(len(first), _NO_WAY)
    lengths = last - first + 1
    for power, least in enumerate(table):
        runs = np.flatnonzero((lengths >= 2**power) & (lengths < 2 ** (power + 1)))
        found[runs] = np.minimum(least[first[runs]], least[last[runs] + 1 - 2**power])
    return found


def _spread(ends: list[int], num_positions: int, length: int) -> tuple[int, ...]:
    """End groups earlier where that leaves a position for each of `length` groups; empty ones are last.

    No snapshot gets larger than the largest: those that begin earlier than they would have hold a single
    position at FULL.
    """
    num_groups = min(length, num_positions)
    ends = ends + [num_positions] * (num_groups - len(ends))
    latest = range(num_positions - num_groups + 1, num_positions + 1)
    used = [min(end, limit) for end, limit in zip(ends, latest, strict=True)]
    return (*used, *[num_positions] * (length - num_groups))
