"""Strategy `sparse` (MoEvement): windows of snapshots, each with one group of units at FULL. Pure.

In which order units are saved is planning/positions.py, how groups are cut planning/windows.py. What turns a
window into the state at its end is recovery/conversion.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from moe_ft.planning.experts import Counts
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.strategies.sparse.popularity import Popularity, has_moved
from moe_ft.strategies.sparse.positions import RankUnits, StageUnits
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    WindowCuts,
    cut_window,
    most_window_bytes,
    snapshot_bytes,
)
from moe_ft.units import Level, UnitId

_SHRINK_MARGIN = 0.9  # a shorter window must fit with some room, or the length would swing
MEMORY_MARGIN = 0.1  # beyond what a window takes whose order is as good as random
_MARGIN_USED = 0.75  # of it, by the estimate; the rest is for what that leaves out


class _Reorder(Enum):
    """What became of the order at the start of a window."""

    NONE = auto()
    DONE = auto()
    REFUSED = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSettings:
    """What the flags say.

    Attributes:
        window: snapshots in a window, None for automatic.
        longest: that automatic may choose.
        measure: of popularity, see `Popularity`.
        decay: of the time-decayed measure.
        change, fraction: the order changes when the frequencies of this fraction of the experts have
            changed by more than that.
    """

    window: int | None
    longest: int
    measure: str = "count"
    decay: float = 0.9
    change: float = 0.10
    fraction: float = 0.25


class SparseStrategy:
    """Owned by the training thread. All ranks of a stage plan alike.

    A group of units is a run of positions of the stage's order, and the same for all its ranks.

    Attributes:
        window: snapshots in the windows that begin from now on; equal on all ranks of the job.
        counted_layers: MoE layers of the stage, in the order of the counts.
    """

    saves_all = True
    rotating: frozenset[UnitId] = frozenset()
    most_rotating = 0

    def __init__(
        self,
        rank: int,
        ranks: Sequence[RankUnits],
        layers: Sequence[str],
        settings: SparseSettings,
    ) -> None:
        """Make a strategy.

        Args:
            rank: this one's position among the stage's.
            ranks: ``[rank of the stage]``.
            layers: MoE layers of the stage in which experts are trained.
            settings: the flags.
        """
        self._rank, self._ranks, self._settings = rank, tuple(ranks), settings
        self.counted_layers = tuple(layers)
        num_experts = 1 + max((unit.expert for each in ranks for unit in each.sizes), default=0)
        self._popularity = Popularity(settings.measure, settings.decay)
        self._units = StageUnits(ranks, layers)
        # Until something is counted any order will do.
        self._order = self._units.order(np.random.default_rng(0).random((len(layers), num_experts)))
        self._version = 0
        self._frequencies: Any = None  # that the order was made for
        self._refused: Any = None  # those of the last order that was not taken
        self._limits = self._limit()
        self.window = settings.window or self._longest
        self._budget: int | None = None
        self._measured_for = (-1, 0)  # order and length when the wanted length was chosen
        self._is_whole_planned = False
        self._whole_iteration: int | None = None
        self._cuts: dict[int, WindowCuts] = {}
        # Until something is measured; a rank that saves nothing will never measure anything.
        self._wanted = self.window if self._own_largest(1) else 1

    @property
    def _longest(self) -> int:
        return max(1, min(self._settings.longest, self._sizes.num_positions))

    @property
    def _sizes(self) -> PositionSizes:
        return self._order.sizes

    def _limit(self) -> Any:
        """Return ``[rank of the stage]`` the bytes that a window may take, whatever its order."""
        return self._most_bytes() * (1 + MEMORY_MARGIN * _MARGIN_USED)

    def _most_bytes(self) -> Any:
        """Return ``[rank of the stage]`` what a window takes: in the first order, or one as good as random.

        In a random order a unit is at COMPUTE in half of the other snapshots.
        """
        (shortest, longest), sizes = self._limits_of_length, self._sizes
        by_chance = sizes.full.sum(axis=1) + sizes.compute.sum(axis=1) * (longest - 1) / 2
        return np.maximum(most_window_bytes(sizes, shortest, longest), by_chance)

    @property
    def memory_margin(self) -> float:
        """How much more memory than `possible_windows` this rank's may take, as a fraction."""
        longest = self._window_bytes(self._sizes, self._limits_of_length[1])[self._rank]
        most = self._most_bytes()[self._rank] * (1 + MEMORY_MARGIN)
        return float(most / longest - 1) if longest else MEMORY_MARGIN

    @property
    def _limits_of_length(self) -> tuple[int, int]:
        """The shortest and the longest window that there may be."""
        fixed = self._settings.window
        return (1, self._longest) if fixed is None else (fixed, fixed)

    @staticmethod
    def _window_bytes(sizes: PositionSizes, length: int) -> Any:
        return snapshot_bytes(sizes, cut_window(sizes, length).ends).sum(axis=1)

    def plan_window(self, iteration: int, *, is_last: bool = False) -> WindowPlan:
        """Return the snapshots of the next window; the last one of a training holds everything at once."""
        self._is_whole_planned = is_last or self.window == 1
        if is_last:
            return self._whole()
        return self._plan(self.window, self._reorder())

    def _whole(self) -> WindowPlan:
        levels = dict.fromkeys(self._ranks[self._rank].sizes, Level.FULL)
        return WindowPlan(snapshots=(SnapshotPlan(levels=levels),), key="whole")

    def _plan(self, length: int, reorder: _Reorder = _Reorder.NONE) -> WindowPlan:
        cuts, own = self._cut(length), self._ranks[self._rank].sizes
        order = self._order.columns[self._ranks[self._rank].ep_rank]
        column = [unit if unit in own else None for unit in order]
        snapshots, start = [], 0
        for end in cuts.ends:
            levels = {unit: Level.FULL for unit in column[start:end] if unit}
            levels |= {unit: Level.COMPUTE for unit in column[end:] if unit}
            snapshots.append(SnapshotPlan(levels=levels))
            start = end
        facts = {
            "reordered": reorder is _Reorder.DONE,
            "reorder_refused": reorder is _Reorder.REFUSED,
            "largest_bytes": cuts.largest_bytes,
            "budget_bytes": self._budget,
        }
        return WindowPlan(snapshots=tuple(snapshots), key=(self._version, length), facts=facts)

    def _cut(self, length: int) -> WindowCuts:
        if length not in self._cuts:
            self._cuts[length] = cut_window(self._sizes, length)
        return self._cuts[length]

    def possible_windows(self) -> list[WindowPlan]:
        """Return the longest window, which takes the most memory, and the one that ends a training."""
        return [self._plan(self._limits_of_length[1]), self._whole()]

    def _reorder(self) -> _Reorder:
        """Order experts anew if their popularity has changed.

        Source: MoEvement, sections 3.5 and 5.6.
        """
        if not self._popularity.has_counts:
            return _Reorder.NONE
        now, settings = self._popularity.frequencies(), self._settings

        def has_moved_from(before: Any) -> bool:
            return before is None or has_moved(
                before, now, change=settings.change, fraction=settings.fraction
            )

        if not has_moved_from(self._frequencies):
            return _Reorder.NONE
        if self._refused is not None and not has_moved_from(self._refused):
            return _Reorder.REFUSED
        order = self._units.order(self._popularity.scores())
        is_same = order.columns == self._order.columns
        if not is_same and not self._fits(order.sizes):
            self._refused = now  # memory was made for another order; counts go on for the next try
            return _Reorder.REFUSED
        self._frequencies, self._refused = now, None
        self._popularity.restart()
        if is_same:
            return _Reorder.NONE
        self._order = order
        self._version += 1
        self._cuts.clear()
        return _Reorder.DONE

    def _fits(self, sizes: PositionSizes) -> bool:
        """Return whether windows of an order fit into memory, now and when they get longer."""
        found = [
            self._window_bytes(sizes, self.window),
            most_window_bytes(sizes, *self._limits_of_length),
        ]
        return all(np.all(each <= self._limits) for each in found)

    def is_whole(self, iteration: int) -> bool:
        """Return whether a snapshot of this iteration holds everything."""
        return self._whole_iteration == iteration

    def resume(self, window: int) -> None:
        """Begin with the window of the run that is gone on with, if the length is automatic.

        Called with the same window on all ranks.
        """
        if self._settings.window is None:
            self.window = min(window, self._settings.longest)
            self._wanted = min(self._wanted, self.window)

    def values(self, copied_bytes: float | None, flow_bytes: float | None) -> list[int]:
        """Return the length that this rank wants, negated: the longest that a rank wants is taken.

        Nothing if the length is fixed.
        """
        if self._settings.window is not None:
            return []
        if copied_bytes is not None and flow_bytes is not None:
            self._measure(int(min(copied_bytes, flow_bytes)))
        return [-self._wanted]

    def _measure(self, budget: int) -> None:
        """Choose the shortest window whose snapshots of this rank have no more bytes than that."""
        key = self._version, self.window
        has_moved = self._budget is None or _has_changed(budget, self._budget)
        if has_moved or key != self._measured_for:
            self._budget, self._measured_for = budget, key
            wanted = self._shortest(budget)
            if wanted < self.window:
                wanted = min(self.window, self._shortest(int(budget * _SHRINK_MARGIN)))
            self._wanted = wanted

    def _shortest(self, budget: int) -> int:
        for length in range(1, self._longest):
            if self._own_largest(length) <= budget:
                return length
        return self._longest

    def _own_largest(self, length: int) -> int:
        """Return the bytes of this rank's largest snapshot in windows of a length."""
        own = PositionSizes(
            full=self._sizes.full[self._rank : self._rank + 1],
            compute=self._sizes.compute[self._rank : self._rank + 1],
        )
        return int(snapshot_bytes(own, self._cut(length).ends).max(initial=0))

    def agree(self, values: list[int]) -> dict[str, int]:
        """Take the longest window that a rank wants, for the windows that begin from now on."""
        if not values:
            return {}
        before, self.window = self.window, -values[0]
        return {"window": self.window} if self.window != before else {}

    def add_tokens(self, counts: Counts) -> None:
        """Note the ``[layer, expert]`` tokens, or gate probabilities, of an iteration."""
        self._popularity.add(counts)

    def note_complete(self, iteration: int) -> None:
        """All ranks have the window of the last plan."""
        if self._is_whole_planned:
            self._whole_iteration = iteration

    def plan_persist(self, *, is_last: bool = False) -> frozenset[UnitId]:
        """Nothing rotates."""
        return frozenset()

    def note_persisted(self) -> None:
        """Nothing depends on it."""


def _has_changed(budget: int, planned: int, tolerance: float = 0.05) -> bool:
    return abs(budget - planned) > tolerance * min(budget, planned)
