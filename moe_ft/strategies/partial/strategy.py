"""The strategy `partial`: non-expert state and k experts per MoE layer in each snapshot (MoC-System).

selection.py chooses the experts; what it has in common with other strategies is in strategies/rotating.py.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, override

from moe_ft.arithmetic import ceil_div
from moe_ft.format.records import ExpertProgress
from moe_ft.planning.experts import Expert, ExpertLayout
from moe_ft.planning.lost_tokens import Loss
from moe_ft.strategies.interface import (
    JobLoss,
    MeasuredBytes,
    PersistPlan,
    SnapshotPlan,
    WindowPlan,
)
from moe_ft.strategies.partial.selection import (
    ExpertsPerLayer,
    PartialConfig,
    RankShare,
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
from moe_ft.strategies.rotating import (
    PlannedRun,
    RotatingExperts,
    Selection,
    SelectionTurn,
    SnapshotMemo,
    TokenLoss,
)
from moe_ft.units import UnitId


@dataclass(frozen=True, kw_only=True)
class PartialLoss(TokenLoss):
    """Tokens whose updates a recovery has dropped, and the experts per layer after it (Dynamic-K)."""

    k_snapshot: int
    k_persist: int

    @override
    def fields(self) -> dict[str, Any]:
        now = {"k_snapshot": self.k_snapshot, "k_persist": self.k_persist}
        return {**super().fields(), **now}


class PartialStrategy(RotatingExperts):
    """Owned by the training thread.

    Attributes:
        k: experts per layer in a snapshot and in a checkpoint, now.
    """

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
        super().__init__(always, rotating, layers, experts, run, frozen)
        self._options = options
        self._share = share
        self.k = ExpertsPerLayer(options, run, experts.num_experts)
        self._divisions = share.possible(experts, [] if self.k.is_auto else self.k.possible())
        self._start = 0  # position of the first layer in the interleaved order
        self._copied_bytes: float | None = None

    @property
    def _cursors(self) -> tuple[int, ...]:
        return self._experts.first_cursors(self.k.snapshot, self._start)

    @property
    @override
    def most_rotating(self) -> int:
        if self.k.may_grow or self._run.takes_whole:
            return len(self.rotation.units)
        by_layer = Counter(unit.layer_name for unit in self.rotation.units)
        return sum(min(self.k.snapshot, count) for count in by_layer.values())

    @override
    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        selection = self._select(is_whole=is_whole)
        start = self._start if is_whole else self._start + self.k.snapshot
        start %= self._experts.num_experts
        shares = None if is_whole else self._shares(selection)
        snapshot = replace(
            self._snapshot(selection, self._turn._replace(cursor=start)), shares=shares
        )
        memo = SnapshotMemo(
            selection=selection, trained=self._ledger.trained, is_whole=is_whole, cursor=start
        )
        return WindowPlan(snapshots=(snapshot,), key=shares, memo=memo)

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

    def _shares(self, selection: Selection) -> tuple[int, ...] | None:
        """Return the division of replicated state, the equal one if regions were not sized for the best one.

        That happens when a recovery brings back a k that the flags of this start cannot lead to.
        """
        shares = self._share.divide(rank_counts(self._experts, selection))
        return shares if shares in self._divisions else None

    @property
    @override
    def _turn(self) -> SelectionTurn:
        k = self.k
        return SelectionTurn(self._start, k.snapshot, k.persist, k.least, self._interval)

    @override
    def possible_windows(self) -> list[WindowPlan]:
        plans = [SnapshotPlan(levels=self._always, shares=shares) for shares in self._divisions]
        return [WindowPlan(snapshots=(plan,), key=plan.shares) for plan in plans]

    @property
    @override
    def _num_of_whole(self) -> int:
        return ceil_div(self._experts.num_experts, self._k_whole)

    @property
    def _k_whole(self) -> int:
        """Experts per layer in each of these snapshots: all where memory was made for that."""
        return self._experts.num_experts if self._run.takes_whole else self.k.snapshot

    @override
    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        super().note_complete(plan, iteration)
        memo: SnapshotMemo = plan.memo
        self._start = memo.cursor
        self.k.note_snapshot()

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
        return self._persist(selection)

    @override
    def note_measured(self, measured: MeasuredBytes) -> None:
        self._copied_bytes = measured.copied_bytes

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
    def _continue(self, progress: ExpertProgress) -> None:
        super()._continue(progress)
        self._start = progress.cursor
        self.k.resume(progress)

    @override
    def settle_losses(self, losses: Sequence[Loss | None]) -> JobLoss:
        loss = TokenLoss.of(losses, self._run.planned_tokens)
        self.k.raise_for(loss.total_plt, loss.plt, self._interval)
        return PartialLoss(**vars(loss), k_snapshot=self.k.snapshot, k_persist=self.k.persist)
