"""Sparse windows of a stage: how popular experts are, the order of units, and groups of these. Pure.

A window is a run of consecutive snapshots. Each holds one group of units at FULL, the groups still to come
at COMPUTE and those before it not at all (MoEvement, sections 3.2 and 3.5). The order of the units is a
sequence of positions, and a group is a run of them. A position is one unit of every rank: the k-th experts of
the expert-parallel ranks, which have different ones, or the same unit of all.

Popular experts are saved last: in a recovery they stay frozen the longest, which saves the most work
(MoEvement, section 3.5; other measures are in its Appendix B). Its capacity-aware measure is for experts of
different capacities, which Megatron does not have: divided by one capacity, counts have the order that they
have anyway.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.strategies.interface import UnitSizes
from moe_ft.units import Level, UnitId, UnitKind

Scores = npt.NDArray[np.float64]  # [layer, expert]

MEASURES = ("count", "soft-count", "decayed")


class Popularity:
    """The popularity of the experts of a stage so far. Owned by one strategy.

    Popularity depends on what was added and in which order, and on nothing else: ranks that add the same
    numbers have the same scores to the bit.

    - count: tokens since `restart`.
    - soft-count: probabilities of the whole gate since `restart`, summed over all tokens.
    - decayed: after each iteration ``decay x score + (1 - decay) x tokens``.
    """

    def __init__(self, measure: str, decay: float) -> None:
        """Begin with nothing counted.

        Args:
            decay: alpha of "decayed", at least 0 and less than 1; other measures ignore it.
        """
        self._decay = decay if measure == "decayed" else None
        self._total: Scores | None = None

    def add(self, counts: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> None:
        """Note what the experts got in an iteration.

        Args:
            counts: ``[layer, expert]`` tokens; for "soft-count" probabilities, summed over tokens.
        """
        total = np.zeros(counts.shape) if self._total is None else self._total
        if self._decay is None:
            self._total = total + counts
        else:
            self._total = self._decay * total + (1 - self._decay) * counts

    @property
    def has_counts(self) -> bool:
        """True if some expert has been used since counting began; until then all are equally popular."""
        return self._total is not None and bool(self._total.any())

    def scores(self) -> Scores:
        """Return ``[layer, expert]`` popularity; its unit depends on the measure."""
        assert self._total is not None, "something was counted"
        return self._total.copy()

    def frequencies(self) -> Scores:
        """Return ``[layer, expert]`` the scores as fractions of their layer."""
        return fractions_of_layers(self.scores())

    def restart(self) -> None:
        """Begin to count again, because the order was changed; "decayed" continues."""
        if self._decay is None and self._total is not None:
            self._total = np.zeros_like(self._total)


def fractions_of_layers(scores: Scores) -> Scores:
    """Return scores as fractions of their layer, equal ones where a layer has none.

    Args:
        scores: ``[layer, expert]``, not negative.
    """
    totals = scores.sum(axis=1, keepdims=True)
    equal = np.full_like(scores, 1 / max(1, scores.shape[1]), dtype=np.float64)
    return np.divide(scores, totals, out=equal, where=totals > 0)


def has_moved(before: Scores, now: Scores, *, change: float = 0.10, fraction: float = 0.25) -> bool:
    """Return whether popularity differs enough from what the order was made for (MoEvement, section 3.5).

    Args:
        before: ``[layer, expert]`` frequencies when the order was made.
        change: an expert has changed if its frequency differs by more than this, relative to before. One
            that was at 0 has changed if it is not any more.
        fraction: of all experts of the stage that must have changed, at least.
    """
    has_changed = np.abs(now - before) > change * before
    return has_changed.size > 0 and bool(has_changed.mean() >= fraction)


def order_experts(scores: Scores, experts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order experts from the least popular to the most popular, compared by their fraction of their layer.

    Args:
        scores: ``[layer, expert]`` of the stage, not negative.
        experts: those of one expert-parallel rank, as (index of the layer, expert). Equally popular ones
            are ordered by that.
    """
    fractions = fractions_of_layers(scores).tolist()
    return sorted(experts, key=lambda expert: (fractions[expert[0]][expert[1]], expert))


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
        self.full = full
        self.compute = compute
        self.splits = sizes.splits
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


_BACK_TO_FRONT = (
    UnitKind.OUTPUT,
    UnitKind.FINAL_NORM,
    UnitKind.OTHER,
    UnitKind.NON_EXPERT,
    UnitKind.EMBEDDING,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankUnits:
    """The units of one rank of a stage.

    Attributes:
        sizes: bytes that it saves at FULL and at COMPUTE, by unit; 0 where other ranks save all.
        grouped_layers: whose experts on a rank are one module, and can be frozen only together.
    """

    ep_rank: int
    sizes: Mapping[UnitId, tuple[int, int]]
    grouped_layers: frozenset[str] = frozenset()


def rank_units(ep_rank: int, catalog: UnitSizes, grouped_layers: frozenset[str]) -> RankUnits:
    """Return the units of a rank with their sizes, each tensor aligned as regions are."""
    return RankUnits(
        ep_rank=ep_rank,
        sizes={
            unit: (
                catalog.num_bytes(unit, alignment=ALIGNMENT_BYTES),
                catalog.num_bytes(unit, Level.COMPUTE, alignment=ALIGNMENT_BYTES),
            )
            for unit in catalog.units
        },
        grouped_layers=grouped_layers,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageOrder:
    """An order of the units of a stage.

    Attributes:
        columns: by expert-parallel rank, ``[position]`` its unit; None where other ranks have more experts.
    """

    columns: Mapping[int, tuple[UnitId | None, ...]]
    sizes: PositionSizes


class StageUnits:
    """The units of a stage, to be put in order again and again."""

    def __init__(self, ranks: Sequence[RankUnits], layers: Sequence[str]) -> None:
        """Collect the units.

        Args:
            ranks: ``[rank of the stage]``.
            layers: MoE layers in which experts are trained, in the order of the scores.
        """
        self._num_ranks = len(ranks)
        self._experts = []
        for ep_rank in sorted({each.ep_rank for each in ranks}):
            members = [rank for rank, each in enumerate(ranks) if each.ep_rank == ep_rank]
            own = {unit for rank in members for unit in ranks[rank].sizes}
            units = sorted(unit for unit in own if unit.kind is UnitKind.EXPERT)
            self._experts.append(_Experts(ep_rank, members, units, ranks, layers))
        found = {unit for each in ranks for unit in each.sizes if unit.kind is not UnitKind.EXPERT}
        others = sorted(found, key=from_back_to_front)
        sizes = _sizes_of(ranks, others)
        order = spread_over_ranks(sizes[:, :, 0])
        self._others = [others[index] for index in order]
        self._other_sizes = sizes[:, order]

    def order(self, scores: Scores) -> StageOrder:
        """Put experts in ascending order of popularity, and everything else after them, back to front.

        Later layers first is MoEvement, Appendix E. Both orders are followed within what each rank owns;
        see `spread_over_ranks`. Experts that are one module stay together; see `order_modules`.

        Args:
            scores: ``[layer, expert]`` popularity.
        """
        most = max(len(each.units) for each in self._experts)
        sizes = np.zeros((self._num_ranks, most, 2), np.int64)
        columns = {}
        modules: list[list[str]] = []
        for each in self._experts:
            order = each.order(scores)
            sizes[np.array(each.members)[:, None], np.arange(len(order))] = each.sizes[:, order]
            padding = [None] * (most - len(order))
            own = [each.units[index] for index in order]
            columns[each.ep_rank] = (*own, *padding, *self._others)
            modules.append([each.modules[index] for index in order])
        both = np.concatenate([sizes, self._other_sizes], axis=1)
        is_grouped = any(each.is_grouped for each in self._experts)
        splits = count_splits(modules, both.shape[1]) if is_grouped else None
        return StageOrder(
            columns=columns,
            sizes=PositionSizes(full=both[:, :, 0], compute=both[:, :, 1], splits=splits),
        )


class _Experts:
    """The experts of one expert-parallel rank, and what the ranks that have them save of each."""

    def __init__(
        self,
        ep_rank: int,
        members: Sequence[int],
        units: Sequence[UnitId],
        ranks: Sequence[RankUnits],
        layers: Sequence[str],
    ) -> None:
        self.ep_rank = ep_rank
        self.members = members
        self.units = units
        self.sizes = _sizes_of([ranks[rank] for rank in members], units)
        grouped = {layer for rank in members for layer in ranks[rank].grouped_layers}
        self.modules = [
            unit.layer_name if unit.layer_name in grouped else str(unit) for unit in units
        ]
        self.is_grouped = len(set(self.modules)) < len(self.modules)
        numbers = {layer: number for number, layer in enumerate(layers)}
        # Nothing is counted in a layer in which no expert is trained.
        self._places = [
            (numbers[unit.layer_name], unit.expert) if unit.layer_name in numbers else None
            for unit in units
        ]

    def order(self, scores: Scores) -> list[int]:
        """Return the indices of the units in the order in which they are saved."""
        modules = self.modules if self.is_grouped else None
        return order_units(scores, self._places, modules, self.sizes[:, :, 0])


def order_units(
    scores: Scores,
    places: Sequence[tuple[int, int] | None],
    modules: Sequence[Hashable] | None,
    full: Bytes,
) -> list[int]:
    """Put the experts of a rank in ascending order of popularity, within what each of its owners has.

    Args:
        scores: ``[layer, expert]`` popularity.
        places: ``[expert]`` where its score is; None if it has none, then it comes first.
        modules: as of `order_modules`; None if each is a module of its own.
        full: ``[rank, expert]`` bytes at FULL.

    Returns:
        Indices of the experts, in the new order.
    """
    if modules is not None:
        fractions = fractions_of_layers(scores)
        popularity = [-1.0 if place is None else float(fractions[place]) for place in places]
        return order_modules(popularity, modules, full)
    counted = {place: index for index, place in enumerate(places) if place is not None}
    order = [index for index, place in enumerate(places) if place is None]
    order += [counted[place] for place in order_experts(scores, list(counted))]
    return [order[place] for place in spread_over_ranks(full[:, order])]


def order_modules(
    popularity: Sequence[float], modules: Sequence[Hashable], full: Bytes
) -> list[int]:
    """Put experts in ascending order of the popularity of their modules, the experts of one together.

    Transformer Engine computes the weight gradients of all experts of a grouped module or of none, so what
    one expert more saves depends on all of them. A module whose parts several ranks own goes where as much
    lies before it for one as for the other, as far as popularity leaves that open: else its experts would be
    far apart in the merged order of `spread_over_ranks`.

    Args:
        popularity: ``[expert]``, comparable between layers. A module has the mean of its experts', because a
            window is divided by bytes; with equal modules that is the order of the sums.
        modules: ``[expert]`` the module that it belongs to.
        full: ``[rank, expert]`` bytes at FULL.

    Returns:
        Indices of the experts, in the new order.
    """
    members: dict[Hashable, list[int]] = {}
    for index, module in enumerate(modules):
        members.setdefault(module, []).append(index)
    means = [(sum(popularity[each] for each in own) / len(own), own) for own in members.values()]
    ascending = [own for _, own in sorted(means)]
    whole = np.array([full[:, own].sum(axis=1) for own in ascending]).reshape(-1, len(full)).T
    order = [index for place in spread_over_ranks(whole) for index in ascending[place]]
    return [order[place] for place in spread_over_ranks(full[:, order])]


def spread_over_ranks(full: Bytes) -> list[int]:
    """Merge what different ranks own, so that each rank's state is spread over the whole order.

    Data-parallel ranks own slices of a buffer in which whole layers lie end to end. If units stayed in the
    order that is wanted, a group could hold all that one rank owns, whose snapshot then is no smaller than
    a dense one. So a unit goes where as large a fraction of its owner's bytes lies before it as of any other
    owner's. Units of one owner keep their order; with one owner of everything nothing changes.

    Args:
        full: ``[rank, unit]`` bytes at FULL, in the order that is wanted.

    Returns:
        Indices of the units, in the new order.
    """
    num_units = full.shape[1]
    totals = full.sum(axis=1, keepdims=True)
    middles = np.cumsum(full, axis=1) - full / 2
    fractions = np.divide(middles, totals, out=np.zeros(full.shape), where=totals > 0)
    # A unit that several own is where it is for them on average; one that none does stays about in place.
    shares = full.sum(axis=0)
    places = np.divide(
        (full * fractions).sum(axis=0),
        shares,
        out=(np.arange(num_units) + 0.5) / max(1, num_units),
        where=shares > 0,
    )
    # Units that differ by rounding alone keep the order that was asked for.
    found: list[int] = np.argsort(places.round(9), kind="stable").tolist()
    return found


def _sizes_of(ranks: Sequence[RankUnits], units: Sequence[UnitId]) -> npt.NDArray[np.int64]:
    """Return ``[rank, unit, level]`` the bytes at FULL and at COMPUTE."""
    sizes = [[each.sizes.get(unit, (0, 0)) for unit in units] for each in ranks]
    return np.array(sizes, dtype=np.int64).reshape(len(ranks), len(units), 2)


def from_back_to_front(unit: UnitId) -> tuple[Any, ...]:
    """Sort units that are no experts: the output first, the embedding last (Appendix E)."""
    kind = UnitKind.NON_EXPERT if unit.layer >= 0 else unit.kind  # a layer's parts stay together
    return _BACK_TO_FRONT.index(kind), unit.block != "mtp", -unit.layer, str(unit)
