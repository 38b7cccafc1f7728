"""The strategy `partial`: non-expert state and k experts per MoE layer in each snapshot (MoC-System).

selection.py chooses the experts, lost_tokens.py counts their tokens. All ranks of a stage have the same
numbers and so choose the same experts; only the experts that a rank has are different.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind
from typing import Any, override

import numpy as np

from moe_ft.format.records import ExpertProgress, Gaps
from moe_ft.planning.experts import Counts, Expert, ExpertLayout
from moe_ft.planning.lost_tokens import Loss, TokenLedger, UnitVersion, job_plt
from moe_ft.strategies.interface import (
    JobLoss,
    PersistPlan,
    PlanBreakpoint,
    Resumed,
    SnapshotPlan,
    Strategy,
    WindowPlan,
)
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.selection import (
    ExpertsPerLayer,
    PlannedRun,
    RankShare,
    Selection,
    Versions,
    advance,
    fill_up,
    most_on_a_rank,
    rank_counts,
    select_by_keys,
    select_load_aware,
    select_sequential,
    select_to_persist,
    sequential_bottleneck,
)
from moe_ft.units import Level, UnitId, parse_unit


@dataclass(frozen=True, kw_only=True)
class PartialLoss(JobLoss):
    """Tokens whose updates a recovery has dropped. PLT is of the whole planned run, also for Dynamic-K.

    Attributes:
        repeated_tokens: tokens that some experts are trained with again.
        per_expert: lost by this recovery, ``[expert]`` by layer name.
    """

    repeated_tokens: int
    total_lost_tokens: int
    per_expert: Mapping[str, tuple[int, ...]]
    k_snapshot: int
    k_persist: int

    @override
    def fields(self) -> dict[str, Any]:
        return {
            "lost_tokens": self.lost_tokens,
            "plt": self.plt,
            "repeated_tokens": self.repeated_tokens,
            "total_lost_tokens": self.total_lost_tokens,
            "total_plt": self.total_plt,
            "lost_per_expert": {layer: list(lost) for layer, lost in self.per_expert.items()},
            "k_snapshot": self.k_snapshot,
            "k_persist": self.k_persist,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Turn:
    """Changes that one snapshot makes once it is complete.

    Attributes:
        trained: ``[layer, expert]`` tokens of their versions.
        start: position of the first layer in the next snapshot.
        is_whole: whether it is part of the whole state of its iteration.
    """

    selection: Selection
    trained: Counts
    start: int
    is_whole: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Persist:
    """Experts that go to storage, and the versions in memory when they were chosen."""

    selection: Selection
    versions: Versions


class PartialStrategy(Strategy):
    """Owned by the training thread.

    Attributes:
        k: experts per layer in a snapshot and in a checkpoint, now.
    """

    saves_all = False

    def __init__(
        self,
        always: Iterable[UnitId],
        rotating: Iterable[UnitId],
        layers: Sequence[str],
        experts: ExpertLayout,
        options: PartialConfig,
        run: PlannedRun,
        share: RankShare,
        frozen: Collection[Expert] = (),
    ) -> None:
        """Make the strategy of one rank at the start of a run.

        Args:
            layers: names of the stage's MoE layers, in the order of the counts.
        """
        self._always = dict.fromkeys(always, Level.FULL)
        self._own = tuple(sorted(rotating))
        self.rotating = frozenset(self._own)
        self.counted_layers = tuple(layers)
        self._experts, self._options, self._run, self._share = experts, options, run, share
        self.k = ExpertsPerLayer(options, run, experts.num_experts)
        self._divisions = share.possible(experts, [] if self.k.is_auto else self.k.possible())
        self._ledger = TokenLedger(layers, experts.num_experts, frozen)
        self._saved = Versions.none(experts.num_layers, experts.num_experts)  # in memory
        self._persisted = self._saved  # on storage
        self._start = 0  # position of the first layer in the interleaved order
        self._interval, self._saved_iteration = run.interval or 1, -1
        self._num_whole = 0  # snapshots towards the whole state of an iteration
        self._whole_iteration = -1
        self._copied_bytes: float | None = None

    @property
    @override
    def always(self) -> Collection[UnitId]:
        return self._always.keys()

    @property
    def _cursors(self) -> tuple[int, ...]:
        return self._experts.first_cursors(self.k.snapshot, self._start)

    @property
    @override
    def most_rotating(self) -> int:
        if self.k.may_grow or self._run.takes_whole:
            return len(self.rotating)
        by_layer = Counter(unit.layer_name for unit in self.rotating)
        return sum(min(self.k.snapshot, count) for count in by_layer.values())

    @override
    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        selection = self._select(is_whole=is_whole)
        start = self._start if is_whole else self._start + self.k.snapshot
        start %= self._experts.num_experts
        snapshot = SnapshotPlan(
            levels=self._always,
            rotating=self._of_this_rank(selection, self._ledger.routed, self._ledger.gaps),
            shares=None if is_whole else self._shares(selection),
            progress=bind(
                self._progress, start, self._ledger.routed, dict(self._ledger.gaps), self._k_now
            ),
        )
        turn = _Turn(
            selection=selection, trained=self._ledger.trained, start=start, is_whole=is_whole
        )
        return WindowPlan(snapshots=(snapshot,), key=snapshot.shares, memo=turn)

    def _select(self, *, is_whole: bool) -> Selection:
        experts, k = self._experts, self.k.snapshot
        if is_whole:  # what is not of this iteration yet
            return select_by_keys(experts, self._cursors, [self._saved.iterations], self._k_whole)
        if self._options.is_load_aware:
            unsaved = self._ledger.trained - self._saved.trained
            selection = select_load_aware(experts, self._cursors, unsaved, k)
        else:
            selection = select_sequential(experts, self._cursors, k)
        if self.k.is_auto:
            return fill_up(experts, advance(experts, self._cursors, k), selection)
        return selection

    def _of_this_rank(
        self, selection: Selection, routed: Counts, gaps: Mapping[str, Sequence[Gaps]]
    ) -> dict[UnitId, tuple[int, Gaps]]:
        """Return the routed tokens and the gaps of the selected units that this rank has."""
        chosen = {
            (layer, expert): (int(routed[index, expert]), gaps[layer][expert])
            for index, layer in enumerate(self.counted_layers)
            for expert in selection[index]
        }
        return {
            unit: chosen[unit.layer_name, unit.expert]
            for unit in self._own
            if (unit.layer_name, unit.expert) in chosen
        }

    def _shares(self, selection: Selection) -> tuple[int, ...] | None:
        """Return the division of replicated state, the equal one if regions were not sized for the best one.

        That happens when a recovery brings back a k that the flags of this start cannot lead to.
        """
        shares = self._share.divide(rank_counts(self._experts, selection))
        return shares if shares in self._divisions else None

    @property
    def _k_now(self) -> tuple[int, int, int, int]:
        return self.k.snapshot, self.k.persist, self.k.least, self._interval

    @override
    def plan_breakpoint(self) -> PlanBreakpoint:
        routed, gaps = self._ledger.routed, dict(self._ledger.gaps)
        start, k_now = self._start, self._k_now
        levels = {**self._always, **dict.fromkeys(self._own, Level.FULL)}
        everything = tuple(tuple(range(self._experts.num_experts)) for _ in self.counted_layers)

        def plan(tokens: Callable[[], Counts | None]) -> SnapshotPlan:
            counts = tokens()
            now = routed if counts is None else self._ledger.after(routed, counts)
            return SnapshotPlan(
                levels=levels,
                rotating=self._of_this_rank(everything, now, gaps),
                progress=bind(self._progress, start, now, gaps, k_now),
            )

        return plan

    def _progress(
        self,
        cursor: int,
        routed: Counts,
        gaps: dict[str, tuple[Gaps, ...]],
        k_now: tuple[int, int, int, int],
    ) -> ExpertProgress:
        """Return the progress as it was when these numbers were taken."""
        k_snapshot, k_persist, least_k, interval = k_now
        return ExpertProgress(
            cursor=cursor,
            k_snapshot=k_snapshot,
            k_persist=k_persist,
            least_k=least_k,
            interval=interval,
            routed_tokens={
                layer: tuple(routed[index].tolist())
                for index, layer in enumerate(self.counted_layers)
            },
            gaps=gaps,
            planned_tokens=self._run.planned_tokens,
        )

    @override
    def possible_windows(self) -> list[WindowPlan]:
        plans = [SnapshotPlan(levels=self._always, shares=shares) for shares in self._divisions]
        return [WindowPlan(snapshots=(plan,), key=plan.shares) for plan in plans]

    @override
    def is_whole(self, iteration: int) -> bool:
        num_experts = self._num_whole * self._k_whole
        return iteration == self._whole_iteration and num_experts >= self._experts.num_experts

    @property
    def _k_whole(self) -> int:
        """Experts per layer in each of these snapshots: all where memory was made for that."""
        return self._experts.num_experts if self._run.takes_whole else self.k.snapshot

    @override
    def add_tokens(self, counts: Counts) -> None:
        self._ledger.add(counts)

    @override
    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        turn: _Turn = plan.memo
        self._start = turn.start
        if 0 <= self._saved_iteration < iteration:
            self._interval = iteration - self._saved_iteration
        self._saved_iteration = iteration
        self.k.note_snapshot()
        if turn.is_whole:
            self._num_whole = 1 + self._num_whole * (iteration == self._whole_iteration)
            self._whole_iteration = iteration
        self._saved = self._saved.replaced(turn.selection, Versions.of(turn.trained, iteration))

    @override
    def plan_persist(self, *, is_whole: bool = False) -> PersistPlan:
        saved, persisted = self._saved, self._persisted
        selection = select_to_persist(
            self._experts,
            self._cursors,
            saved.iterations,
            persisted.iterations,
            saved.trained - persisted.trained if self._options.is_load_aware else None,
            self._experts.num_experts if is_whole else self.k.persist,
        )
        units = frozenset(self._of_this_rank(selection, self._ledger.routed, self._ledger.gaps))
        return PersistPlan(units=units, memo=_Persist(selection=selection, versions=saved))

    @override
    def note_persisted(self, plan: PersistPlan) -> None:
        persist: _Persist = plan.memo
        self._persisted = self._persisted.replaced(persist.selection, persist.versions)

    @override
    def note_measured(self, copied_bytes: float | None, flow_bytes: float | None) -> None:
        self._copied_bytes = copied_bytes

    @override
    def values(self) -> list[int]:
        # The largest k whose snapshots training hides on this rank (section 5.3), 0 until measured.
        if not self.k.is_auto:
            return []
        return [0 if self._copied_bytes is None else self.largest_k(self._copied_bytes)]

    def largest_k(self, budget_bytes: float) -> int:
        """Return the largest k whose snapshot fits into some bytes on this rank, at least 1."""
        if not self._experts.num_layers:
            return self._experts.num_experts
        room = budget_bytes - self._share.always_bytes
        most_selected = most_on_a_rank if self._options.is_load_aware else sequential_bottleneck
        fitting = [
            k
            for k in range(1, self._experts.num_experts + 1)
            if most_selected(self._experts, k) * self._share.unit_bytes <= room
        ]
        return max(fitting, default=1)

    @override
    def agree(self, values: list[int]) -> dict[str, int]:
        has_changed = bool(values) and self.k.agree(values[0])
        return {"k_snapshot": self.k.snapshot} if has_changed else {}

    @override
    def resume(self, resumed: Resumed) -> Loss:
        restored, persisted = by_expert(resumed.restored), by_expert(resumed.persisted)
        in_memory = restored if resumed.in_memory is None else by_expert(resumed.in_memory)
        intact = {
            expert: version
            for expert, version in persisted.items()
            # One that is newer than what was restored is not intact.
            if expert in restored and version.iteration <= restored[expert].iteration
        }
        self._saved, self._persisted = (
            Versions(trained=trained, iterations=iterations).up_to(resumed.iteration)
            for trained, iterations in (self._ledger.tables(in_memory), self._ledger.tables(intact))
        )
        progress = resumed.progress
        if progress is None:  # nothing was counted
            nothing = np.zeros_like(self._ledger.routed)
            progress = self._progress(0, nothing, dict(self._ledger.gaps), self._k_now)
        self._start, self._interval = progress.cursor, self._run.interval or progress.interval
        self.k.resume(progress)
        return self._ledger.recover(progress.routed_tokens, restored, resumed.gaps_before)

    @override
    def settle_losses(self, losses: Sequence[Loss | None]) -> JobLoss:
        lost: dict[str, tuple[int, ...]] = {}
        repeated, accumulated = dict(lost), dict(lost)
        for loss in losses:
            if loss is not None:  # ranks of a stage have equal ones
                lost |= loss.lost
                repeated |= loss.repeated
                accumulated |= loss.accumulated
        planned_tokens = self._run.planned_tokens
        lost_tokens, plt = job_plt(lost, planned_tokens)
        total_lost_tokens, total_plt = job_plt(accumulated, planned_tokens)
        self.k.raise_for(total_plt, plt, self._interval)
        return PartialLoss(
            lost_tokens=lost_tokens,
            plt=plt,
            repeated_tokens=job_plt(repeated, planned_tokens)[0],
            total_lost_tokens=total_lost_tokens,
            total_plt=total_plt,
            per_expert=lost,
            k_snapshot=self.k.snapshot,
            k_persist=self.k.persist,
        )


def by_expert(versions: Mapping[str, UnitVersion]) -> dict[Expert, UnitVersion]:
    """Return versions by layer name and expert instead of by unit name."""
    units = {name: parse_unit(name) for name in versions}
    return {(units[name].layer_name, units[name].expert): versions[name] for name in versions}
