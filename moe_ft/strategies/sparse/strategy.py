"""Strategy `sparse` (MoEvement): windows of snapshots, each with one group of units at FULL. Pure.

windows.py orders the units and cuts groups. `WindowLength` is the length of windows: fixed, or the shortest
whose snapshots cost no time, measured while training. recovery/restore.py turns a window into the state at
its end.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, override

import numpy as np

from moe_ft.config.fields import Bounds, ConfigPart, setting
from moe_ft.planning.experts import Counts
from moe_ft.strategies.interface import MeasuredBytes, Resumed, SnapshotPlan, Strategy, WindowPlan
from moe_ft.strategies.sparse.windows import (
    MEASURES,
    Popularity,
    PositionSizes,
    RankUnits,
    StageOrder,
    StageUnits,
    WindowCuts,
    cut_window,
    has_moved,
    most_window_bytes,
    reserved_window_bytes,
    snapshot_bytes,
)
from moe_ft.units import Level, UnitId


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseConfig(ConfigPart):
    """Sparse windows: how many snapshots hold everything once, and which units come first."""

    TITLE: ClassVar[str] = "strategy sparse"
    PAGE: ClassVar[str] = "sparse.md"
    window: str = setting(
        "auto",
        "snapshots of consecutive iterations that together hold every unit; auto = as few as cost no "
        "time, measured while training",
        metavar="{N,auto}",
        bounds=Bounds(at_least=1),
    )
    max_window: int = setting(
        8,
        "longest window that auto may choose; host memory is reserved for it",
        metavar="N",
        bounds=Bounds(at_least=1),
        remedy="Give a number of snapshots",
        needs=("window=auto",),
    )
    unit_order: str = setting(
        "count",
        "what makes an expert popular, and so late in the window: its tokens, the probabilities that the "
        "gate gives it for all tokens, or a decaying average of its tokens",
        choices=MEASURES,
    )
    popularity_decay: float = setting(
        0.9,
        "share of the average that an iteration keeps with --moe-ft-unit-order decayed",
        bounds=Bounds(at_least=0, below=1),
        remedy="Write 0.9 to remember about ten iterations",
        needs=("unit_order=decayed",),
        metavar="FRACTION",
    )
    reorder_change: float = setting(
        0.10,
        "relative change of an expert's share of tokens that counts as one",
        bounds=Bounds(at_least=0),
        remedy="Write 0.1 for ten percent",
        metavar="FRACTION",
    )
    reorder_fraction: float = setting(
        0.25,
        "fraction of the experts that must have changed before units are ordered again",
        bounds=Bounds(at_least=0, at_most=1),
        remedy="Write 0.25 for a quarter of the experts",
        metavar="FRACTION",
    )

    @property
    def is_soft(self) -> bool:
        """True if the gate's probabilities are summed up, not tokens."""
        return self.unit_order == "soft-count"

    @property
    def window_snapshots(self) -> int | None:
        """The window, None for automatic; raises ConfigError if it is neither."""
        return self.number_or_auto("window")


_SHRINK_MARGIN = 0.9  # a shorter window must fit with some room, or the length would swing
MEMORY_MARGIN = 0.1  # beyond what a window takes whose order is as good as random
_MARGIN_USED = 0.75  # of it, by the estimate; the rest is for what that leaves out
_HINT = "A longer --moe-ft-window or --moe-ft-max-window, or more ranks, make them smaller."


class WindowLength:
    """Owned by the strategy. `now` is equal on all ranks of the job.

    Attributes:
        budget_bytes: that a snapshot of this rank may have to cost no time; None until measured.
    """

    def __init__(self, options: SparseConfig, num_positions: int, *, saves_nothing: bool) -> None:
        """Begin with the fixed length, or the longest.

        Args:
            saves_nothing: whether this rank has nothing to save, and so will never measure anything.
        """
        fixed = options.window_snapshots
        self._longest_possible = options.max_window
        self.longest = max(1, min(options.max_window, num_positions))
        self.is_auto = fixed is None
        self.now = fixed or self.longest
        self.budget_bytes: int | None = None
        self._measured_for: Any = None  # order and length when the wanted length was chosen
        self._wanted = 1 if saves_nothing else self.now

    @property
    def limits(self) -> tuple[int, int]:
        """The shortest and the longest window that there may be."""
        return (1, self.longest) if self.is_auto else (self.now, self.now)

    def measure(self, budget_bytes: int, order: int, largest: Callable[[int], int]) -> None:
        """Choose the shortest window whose snapshots of this rank fit into a budget.

        Args:
            largest: returns the bytes of this rank's largest snapshot in windows of a length.
        """
        measured_for = order, self.now
        has_moved = self.budget_bytes is None or _has_changed(budget_bytes, self.budget_bytes)
        if has_moved or measured_for != self._measured_for:
            self.budget_bytes = budget_bytes
            self._measured_for = measured_for
            wanted = self._shortest(budget_bytes, largest)
            if wanted < self.now:
                roomy = self._shortest(int(budget_bytes * _SHRINK_MARGIN), largest)
                wanted = min(self.now, roomy)
            self._wanted = wanted

    def _shortest(self, budget_bytes: int, largest: Callable[[int], int]) -> int:
        shorter = range(1, self.longest)
        return next((each for each in shorter if largest(each) <= budget_bytes), self.longest)

    def values(self) -> list[int]:
        """Return the length that this rank wants, negated: the longest that a rank wants is taken.

        Nothing if the length is fixed.
        """
        return [-self._wanted] if self.is_auto else []

    def agree(self, values: list[int]) -> bool:
        """Take the longest window that a rank wants; return whether that is another one."""
        if not values:
            return False
        before, self.now = self.now, -values[0]
        return self.now != before

    def resume(self, window: int) -> None:
        """Begin with the window of the run that is continued, if the length is automatic.

        One snapshot may be a whole state that was taken for storage, and says nothing of the length.
        """
        if self.is_auto and window > 1:
            self.now = min(window, self._longest_possible)
            self._wanted = min(self._wanted, self.now)


def _has_changed(budget: int, planned: int, tolerance: float = 0.05) -> bool:
    return abs(budget - planned) > tolerance * min(budget, planned)


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
        self._rank = rank
        self._own = ranks[rank]
        self._options = options
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
    @override
    def always(self) -> Collection[UnitId]:
        return self._own.sizes.keys()

    @property
    @override
    def memory_margin(self) -> float:
        longest = _window_bytes(self._ordering.sizes, self.length.limits[1])[self._rank]
        most = reserved_window_bytes(self._ordering.sizes, *self.length.limits)[self._rank]
        return float(most * (1 + MEMORY_MARGIN) / longest - 1) if longest else MEMORY_MARGIN

    @override
    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        if is_whole:
            return self._whole()
        ordering, is_refused = self._reordered()
        return self._plan(self.length.now, ordering, is_refused=is_refused)

    def _whole(self) -> WindowPlan:
        levels = dict.fromkeys(self._own.sizes, Level.FULL)
        turn = _Turn(ordering=self._ordering, is_whole=True)
        return WindowPlan(snapshots=(SnapshotPlan(levels=levels),), key="whole", memo=turn)

    def _plan(self, length: int, ordering: _Ordering, *, is_refused: bool = False) -> WindowPlan:
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
                "reordered": ordering.version > self._ordering.version,
                "reorder_refused": is_refused,
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

    @override
    def possible_windows(self) -> list[WindowPlan]:
        return [self._plan(self.length.limits[1], self._ordering), self._whole()]

    def _reordered(self) -> tuple[_Ordering, bool]:
        """Return the order for the next window, and whether a better one was refused.

        It is another one if the popularity of experts has changed.

        Source: MoEvement, sections 3.5 and 5.6.
        """
        before = self._ordering
        if not self._popularity.has_counts:
            return before, False
        now = self._popularity.frequencies()
        if not self._has_moved(before.made_for, now):
            return before, False
        if before.refused is not None and not self._has_moved(before.refused, now):
            return before, True
        order = self._units.order(self._popularity.scores())
        if order.columns == before.order.columns:
            return replace(before, made_for=now, refused=None), False
        if not self._fits(order.sizes):
            # Memory was made for another order; counts continue for the next try.
            return replace(before, refused=now), True
        return _Ordering(order=order, version=before.version + 1, made_for=now), False

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

    @override
    def note_begun(self, plan: WindowPlan) -> None:
        turn: _Turn = plan.memo
        self._ordering = turn.ordering
        if turn.restarts_counts:
            self._popularity.restart()

    @override
    def is_whole(self, iteration: int) -> bool:
        return self._whole_iteration == iteration

    @override
    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        if plan.memo.is_whole:
            self._whole_iteration = iteration

    @override
    def resume(self, resumed: Resumed) -> None:
        self.length.resume(resumed.window)

    @override
    def note_measured(self, measured: MeasuredBytes) -> None:
        copied_bytes, flow_bytes = measured.copied_bytes, measured.flow_bytes
        if self.length.is_auto and copied_bytes is not None and flow_bytes is not None:
            budget = int(min(copied_bytes, flow_bytes))
            self.length.measure(budget, self._ordering.version, self._largest_of_this_rank)

    def _largest_of_this_rank(self, length: int) -> int:
        """Return the bytes of this rank's largest snapshot in windows of a length."""
        sizes, own = self._ordering.sizes, slice(self._rank, self._rank + 1)
        own_sizes = PositionSizes(full=sizes.full[own], compute=sizes.compute[own])
        return int(snapshot_bytes(own_sizes, self._ordering.cut(length).ends).max(initial=0))

    @override
    def values(self) -> list[int]:
        return self.length.values()

    @override
    def agree(self, values: list[int]) -> dict[str, int]:
        return {"window": self.length.now} if self.length.agree(values) else {}

    @override
    def add_tokens(self, counts: Counts) -> None:
        self._popularity.add(counts)


def _window_bytes(sizes: PositionSizes, length: int) -> Any:
    """Return ``[rank of the stage]`` the bytes of a window."""
    return snapshot_bytes(sizes, cut_window(sizes, length).ends).sum(axis=1)
