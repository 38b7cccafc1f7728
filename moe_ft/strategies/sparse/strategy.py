"""Strategy `sparse` (MoEvement): windows of snapshots, each with one group of units at FULL. Pure.

positions.py orders the units, windows.py cuts groups, length.py chooses the length of a window.
recovery/replay.py turns a window into the state at its end.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

import numpy as np

from moe_ft.planning.experts import Counts
from moe_ft.strategies.interface import Resumed, SnapshotPlan, Strategy, WindowPlan
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.length import WindowLength
from moe_ft.strategies.sparse.popularity import Popularity, has_moved
from moe_ft.strategies.sparse.positions import RankUnits, StageOrder, StageUnits
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    WindowCuts,
    cut_window,
    most_window_bytes,
    reserved_window_bytes,
    snapshot_bytes,
)
from moe_ft.units import Level, UnitId

MEMORY_MARGIN = 0.1  # beyond what a window takes whose order is as good as random
_MARGIN_USED = 0.75  # of it, by the estimate; the rest is for what that leaves out
_HINT = "A longer --moe-ft-window or --moe-ft-max-window, or more ranks, make them smaller."


class _Reorder(Enum):
    """Result of looking for a better order at the start of a window."""

    NONE = auto()
    DONE = auto()
    REFUSED = auto()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Ordering:
    """An order of the units of the stage.

    Attributes:
        version: larger than that of each order before.
        made_for: frequencies of the experts that it was made for; None before anything is counted.
        refused: frequencies for which a later order was refused since; None if none was.
        cuts: windows of this order by length, as far as they have been cut.
    """

    order: StageOrder
    version: int = 0
    made_for: Any = None
    refused: Any = None
    cuts: dict[int, WindowCuts] = field(default_factory=dict)

    @property
    def sizes(self) -> PositionSizes:
        """Bytes of each position on each rank."""
        return self.order.sizes

    def cut(self, length: int) -> WindowCuts:
        """Return the groups of a window."""
        if length not in self.cuts:
            self.cuts[length] = cut_window(self.sizes, length)
        return self.cuts[length]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Turn:
    """Changes that one window makes.

    Attributes:
        ordering: of its units, from its beginning.
        restarts_counts: whether popularity is counted again from its beginning.
    """

    ordering: _Ordering
    restarts_counts: bool = False
    is_whole: bool = False


class SparseStrategy(Strategy):
    """Owned by the training thread. All ranks of a stage make the same plans.

    A group of units is a run of positions of the stage's order, and the same for all its ranks.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[RankUnits],
        layers: Sequence[str],
        options: SparseConfig,
    ) -> None:
        """Make a strategy.

        Args:
            ranks: ``[rank of the stage]``.
        """
        self._rank, self._own, self._options = rank, ranks[rank], options
        self.counted_layers = tuple(layers)
        num_experts = 1 + max((unit.expert for each in ranks for unit in each.sizes), default=0)
        self._popularity = Popularity(options.unit_order, options.popularity_decay)
        self._units = StageUnits(ranks, layers)
        # Until something is counted any order will do.
        scores = np.random.default_rng(0).random((len(layers), num_experts))
        self._ordering = _Ordering(order=self._units.order(scores))
        self.length = WindowLength(
            options,
            self._ordering.sizes.num_positions,
            saves_nothing=not self._largest_of_this_rank(1),
        )
        most = reserved_window_bytes(self._ordering.sizes, *self.length.limits)
        self._limits = most * (1 + MEMORY_MARGIN * _MARGIN_USED)
        self._whole_iteration: int | None = None

    @property
    def always(self) -> Collection[UnitId]:
        """All units."""
        return self._own.sizes.keys()

    @property
    def memory_margin(self) -> float:
        """Fraction by which a window of this rank may take more memory than `possible_windows`."""
        longest = _window_bytes(self._ordering.sizes, self.length.limits[1])[self._rank]
        most = reserved_window_bytes(self._ordering.sizes, *self.length.limits)[self._rank]
        return float(most * (1 + MEMORY_MARGIN) / longest - 1) if longest else MEMORY_MARGIN

    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        """Return the snapshots of the next window; the last one of a training holds everything at once."""
        if is_whole:
            return self._whole()
        ordering, reorder = self._reordered()
        return self._plan(self.length.now, ordering, reorder)

    def _whole(self) -> WindowPlan:
        levels = dict.fromkeys(self._own.sizes, Level.FULL)
        turn = _Turn(ordering=self._ordering, is_whole=True)
        return WindowPlan(snapshots=(SnapshotPlan(levels=levels),), key="whole", memo=turn)

    def _plan(
        self, length: int, ordering: _Ordering, reorder: _Reorder = _Reorder.NONE
    ) -> WindowPlan:
        cuts, own = ordering.cut(length), self._own.sizes
        order = ordering.order.columns[self._own.ep_rank]
        column = [unit if unit in own else None for unit in order]
        snapshots, start = [], 0
        for end in cuts.ends:
            levels = {unit: Level.FULL for unit in column[start:end] if unit}
            levels |= {unit: Level.COMPUTE for unit in column[end:] if unit}
            snapshots.append(SnapshotPlan(levels=levels))
            start = end
        return WindowPlan(
            snapshots=tuple(snapshots),
            key=(ordering.version, length),
            facts={
                "reordered": reorder is _Reorder.DONE,
                "reorder_refused": reorder is _Reorder.REFUSED,
                "largest_bytes": cuts.largest_bytes,
                "budget_bytes": self.length.budget_bytes,
            },
            hint=_HINT,
            memo=_Turn(
                ordering=ordering,
                restarts_counts=ordering.made_for is not self._ordering.made_for,
                is_whole=length == 1,
            ),
        )

    def possible_windows(self) -> list[WindowPlan]:
        """Return the longest window, which takes the most memory, and the one that ends a training."""
        return [self._plan(self.length.limits[1], self._ordering), self._whole()]

    def _reordered(self) -> tuple[_Ordering, _Reorder]:
        """Return the order for the next window: another one if the popularity of experts has changed.

        Source: MoEvement, sections 3.5 and 5.6.
        """
        before = self._ordering
        if not self._popularity.has_counts:
            return before, _Reorder.NONE
        now = self._popularity.frequencies()
        if not self._has_moved(before.made_for, now):
            return before, _Reorder.NONE
        if before.refused is not None and not self._has_moved(before.refused, now):
            return before, _Reorder.REFUSED
        order = self._units.order(self._popularity.scores())
        if order.columns == before.order.columns:
            return replace(before, made_for=now, refused=None), _Reorder.NONE
        if not self._fits(order.sizes):
            # Memory was made for another order; counts continue for the next try.
            return replace(before, refused=now), _Reorder.REFUSED
        return _Ordering(order=order, version=before.version + 1, made_for=now), _Reorder.DONE

    def _has_moved(self, before: Any, now: Any) -> bool:
        options = self._options
        return before is None or has_moved(
            before, now, change=options.reorder_change, fraction=options.reorder_fraction
        )

    def _fits(self, sizes: PositionSizes) -> bool:
        """Return whether windows of an order fit into memory, now and when they get longer."""
        found = [
            _window_bytes(sizes, self.length.now),
            most_window_bytes(sizes, *self.length.limits),
        ]
        return all(np.all(each <= self._limits) for each in found)

    def note_begun(self, plan: WindowPlan) -> None:
        """Keep the order of a window that was begun."""
        turn: _Turn = plan.memo
        self._ordering = turn.ordering
        if turn.restarts_counts:
            self._popularity.restart()

    def is_whole(self, iteration: int) -> bool:
        """Return whether a snapshot of this iteration holds everything."""
        return self._whole_iteration == iteration

    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        """Note that all ranks have a window."""
        if plan.memo.is_whole:
            self._whole_iteration = iteration

    def resume(self, resumed: Resumed) -> None:
        """Begin with windows as long as that of the run that is continued."""
        self.length.resume(resumed.window)

    def note_measured(self, copied_bytes: float | None, flow_bytes: float | None) -> None:
        """Measure how long windows must be, once both parts are known."""
        if self.length.is_auto and copied_bytes is not None and flow_bytes is not None:
            budget = int(min(copied_bytes, flow_bytes))
            self.length.measure(budget, self._ordering.version, self._largest_of_this_rank)

    def _largest_of_this_rank(self, length: int) -> int:
        """Return the bytes of this rank's largest snapshot in windows of a length."""
        sizes, own = self._ordering.sizes, slice(self._rank, self._rank + 1)
        own_sizes = PositionSizes(full=sizes.full[own], compute=sizes.compute[own])
        return int(snapshot_bytes(own_sizes, self._ordering.cut(length).ends).max(initial=0))

    def values(self) -> list[int]:
        """Return the length that this rank wants, see `WindowLength.values`."""
        return self.length.values()

    def agree(self, values: list[int]) -> dict[str, int]:
        """Take the longest window that a rank wants, for the windows that begin from now on."""
        return {"window": self.length.now} if self.length.agree(values) else {}

    def add_tokens(self, counts: Counts) -> None:
        """Note the ``[layer, expert]`` tokens, or gate probabilities, of an iteration."""
        self._popularity.add(counts)


def _window_bytes(sizes: PositionSizes, length: int) -> Any:
    """Return ``[rank of the stage]`` the bytes of a window."""
    return snapshot_bytes(sizes, cut_window(sizes, length).ends).sum(axis=1)
