"""The strategy `partial`: non-expert state and k experts per MoE layer in each snapshot (MoC-System).

Which experts is selection.py, counting their tokens token_ledger.py. All ranks of a stage have the same
numbers and so choose the same; what differs is which of the experts are on the rank.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind

import numpy as np

from moe_ft.format.records import ExpertProgress
from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.planning.lost_tokens import Gaps, expected_plt, next_k
from moe_ft.planning.sharding import adaptive_shares
from moe_ft.planning.token_ledger import NEVER, Loss, TokenLedger, UnitVersion
from moe_ft.strategies.interface import SingleSnapshots, SnapshotPlan
from moe_ft.strategies.partial.selection import (
    Selection,
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
from moe_ft.units import Level, Part, UnitId, UnitKind

_SNAPSHOTS_BETWEEN_CHANGES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialSettings:
    """What the flags say.

    Attributes:
        k_snapshot: experts per MoE layer in each snapshot; None for as many as forward and backward hide.
        k_persist: of each layer, that go to storage.
        is_load_aware: selection by unsaved tokens, else sequential.
        raises_k: Dynamic-K: doubles k when one more fault could take the PLT past the share of plt_limit
            that k has.
        interval: iterations between snapshots, None for automatic.
        planned_tokens: tokens times top-k that a layer processes in the whole planned run.
        tokens_per_iteration: tokens times top-k of an iteration, on average over the planned run.
    """

    k_snapshot: int | None
    k_persist: int
    is_load_aware: bool
    raises_k: bool
    plt_limit: float
    interval: int | None
    planned_tokens: int
    tokens_per_iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """What a rank of the stage saves, in bytes, and who shares the state that is replicated.

    Attributes:
        always_bytes: what every snapshot of this rank holds.
        unit_bytes: the largest of its rotating units.
        replicated_bytes: state that the data-parallel ranks hold alike, which adaptive sharding divides
            anew in each snapshot; 0 for a division that stays.
        ep_ranks: ``[data-parallel rank]`` which expert-parallel rank it is.
    """

    always_bytes: int
    unit_bytes: int
    replicated_bytes: int = 0
    ep_ranks: tuple[int, ...] = ()


class PartialStrategy(SingleSnapshots):
    """Owned by the training thread.

    Attributes:
        rotating: this rank's units that only some snapshots hold.
        counted_layers: MoE layers of the stage, in the order of the counts.
        k_snapshot, k_persist: now.
    """

    saves_all = False

    def __init__(
        self,
        always: Iterable[UnitId],
        rotating: Iterable[UnitId],
        layers: Sequence[str],
        experts: ExpertLayout,
        settings: PartialSettings,
        share: RankShare,
        frozen: Collection[tuple[str, int]] = (),
    ) -> None:
        """Make the strategy of one rank at the start of a run.

        Args:
            always: this rank's units that every snapshot holds.
            rotating: the others.
            layers: names of the stage's MoE layers, in the order of the counts.
            experts: of the stage.
            settings: of the flags.
            share: of this rank.
            frozen: experts of the stage, by layer name and number, that are not trained.
        """
        self._always = dict.fromkeys(always, Level.FULL)
        self._rotating = tuple(sorted(rotating))
        self.rotating = frozenset(self._rotating)
        self.counted_layers = self._layers = tuple(layers)
        self._experts = experts
        self._settings, self._share = settings, share
        self.k_snapshot = settings.k_snapshot or 1
        self.k_persist = min(settings.k_persist, experts.num_experts)
        self._least_k = 1
        self._start = 0  # position in the interleaved order of the first layer
        self._interval = settings.interval or 1
        self._saved_iteration: int | None = None
        shape = (experts.num_layers, experts.num_experts)
        self._ledger = TokenLedger(layers, experts.num_experts, frozen)
        # Tokens whose updates the versions in memory and on storage incorporate, and their iterations.
        self._saved, self._persisted = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._saved_at = np.full(shape, NEVER, np.int64)
        self._persisted_at = np.full(shape, NEVER, np.int64)
        self._planned: tuple[Selection, Counts, int] | None = None
        self._persisting: Selection = ()
        self._num_last = self._num_since_change = 0
        self._is_last = False
        self._divisions = {plan.shares for plan in self.possible_plans()}

    @property
    def _cursors(self) -> tuple[int, ...]:
        return self._experts.first_cursors(self.k_snapshot, self._start)

    @property
    def most_rotating(self) -> int:
        """The most rotating units that a snapshot of this rank may ever hold."""
        may_grow = self._settings.k_snapshot is None or self._settings.raises_k
        if may_grow:
            return len(self.rotating)
        by_layer = Counter(unit.layer_name for unit in self._rotating)
        return sum(min(self.k_snapshot, count) for count in by_layer.values())

    def plan(self, iteration: int, *, is_last: bool = False) -> SnapshotPlan:
        """Return the units of the next snapshot; what was planned and not completed is planned again."""
        self._is_last = is_last
        selection = self._select(iteration, is_last=is_last)
        routed, trained = self._ledger.routed, self._ledger.trained
        start = self._start if is_last else self._start + self.k_snapshot
        start %= self._experts.num_experts
        self._planned = (selection, trained, start)
        tokens = self._of_this_rank(selection, routed)
        return SnapshotPlan(
            levels=self._always,
            rotating=tokens,
            shares=None if is_last else self._shares(selection),
            progress=bind(
                _progress,
                self._layers,
                start,
                (self.k_snapshot, self.k_persist, self._least_k),
                self._interval,
                routed,
                self._ledger.gaps,
                self._settings.planned_tokens,
            ),
        )

    def _select(self, iteration: int, *, is_last: bool) -> Selection:
        experts, k = self._experts, self.k_snapshot
        if is_last:  # what is not of this iteration yet
            return select_by_keys(experts, self._cursors, [self._saved_at], k)
        if self._settings.is_load_aware:
            unsaved = self._ledger.trained - self._saved
            selection = select_load_aware(experts, self._cursors, unsaved, k)
        else:
            selection = select_sequential(experts, self._cursors, k)
        if self._settings.k_snapshot is None:
            behind = advance(experts, self._cursors, k)
            return fill_up(experts, behind, selection)
        return selection

    def _of_this_rank(self, selection: Selection, routed: Counts) -> dict[UnitId, tuple[int, Gaps]]:
        """Return the routed tokens and the gaps of the selected units that this rank has."""
        chosen = {
            (layer, expert): (int(routed[index, expert]), self._ledger.gaps[layer][expert])
            for index, layer in enumerate(self._layers)
            for expert in selection[index]
        }
        return {
            unit: chosen[unit.layer_name, unit.expert]
            for unit in self._rotating
            if (unit.layer_name, unit.expert) in chosen
        }

    def _shares(self, selection: Selection) -> tuple[int, ...] | None:
        """Return how replicated state is divided, equally if regions were not sized for the best way.

        That happens when a recovery brings back a k that the flags of this start cannot lead to.
        """
        shares = self._divide(rank_counts(self._experts, selection))
        return shares if shares in self._divisions else None

    def _divide(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shares of replicated state for ``[expert-parallel rank]`` selected experts."""
        share = self._share
        if not share.replicated_bytes:
            return None
        loads = [counts[ep_rank] * share.unit_bytes for ep_rank in share.ep_ranks]
        return tuple(adaptive_shares(share.replicated_bytes, loads))

    def possible_plans(self) -> list[SnapshotPlan]:
        """Return a plan for each division of the replicated state that snapshots will need.

        All layers together take consecutive places around the expert-parallel ranks, so what counts is at
        which rank they begin; with automatic k ranks with room take as many as the others.
        """
        ep_size, is_auto = self._experts.ep_size, self._settings.k_snapshot is None
        divisions = dict.fromkeys([None, self._divide([0] * ep_size)])
        for k in () if is_auto else self._possible_k():
            least, num_more = divmod(self._experts.num_layers * k, ep_size)
            for start in range(ep_size):
                counts = [least + ((rank - start) % ep_size < num_more) for rank in range(ep_size)]
                divisions[self._divide(counts)] = None
        return [SnapshotPlan(levels=self._always, shares=shares) for shares in divisions]

    def _possible_k(self) -> list[int]:
        most = self._experts.num_experts
        doubled = [self.k_snapshot * 2**power for power in range(most.bit_length())]
        return [min(k, most) for k in doubled] if self._settings.raises_k else [self.k_snapshot]

    def is_whole(self, iteration: int) -> bool:
        """Return whether the snapshots since training ended hold every expert."""
        return self._num_last * self.k_snapshot >= self._experts.num_experts

    def add_tokens(self, counts: Counts) -> None:
        """Note the tokens of an iteration."""
        self._ledger.add(counts)

    def note_complete(self, iteration: int) -> None:
        """Note that all ranks have the planned snapshot: the selection goes on."""
        assert self._planned is not None
        selection, trained, self._start = self._planned
        if self._saved_iteration is not None and iteration > self._saved_iteration:
            self._interval = iteration - self._saved_iteration
        self._saved_iteration = iteration
        self._num_since_change += 1
        self._num_last += self._is_last
        for layer, experts in enumerate(selection):
            chosen = list(experts)
            self._saved[layer, chosen] = trained[layer, chosen]
            self._saved_at[layer, chosen] = iteration

    def plan_persist(self, *, is_last: bool = False) -> frozenset[UnitId]:
        """Choose the experts whose versions in memory go to storage now."""
        k = self._experts.num_experts if is_last else self.k_persist
        unpersisted = self._saved - self._persisted if self._settings.is_load_aware else None
        self._persisting = select_to_persist(
            self._experts, self._cursors, self._saved_at, self._persisted_at, unpersisted, k
        )
        self._versions_to_persist = (self._saved.copy(), self._saved_at.copy())
        return frozenset(self._of_this_rank(self._persisting, self._saved))

    def note_persisted(self) -> None:
        """Note that what was chosen last is on storage."""
        saved, saved_at = self._versions_to_persist
        for layer, experts in enumerate(self._persisting):
            chosen = list(experts)
            self._persisted[layer, chosen] = saved[layer, chosen]
            self._persisted_at[layer, chosen] = saved_at[layer, chosen]

    def values(self, copied_bytes: float | None, flow_bytes: float | None = None) -> list[int]:
        """Return the largest k whose snapshots forward and backward hide on this rank (section 5.3).

        0 while nothing is measured; nothing if k is fixed.
        """
        if self._settings.k_snapshot is not None:
            return []
        return [0 if copied_bytes is None else self.largest_k(copied_bytes)]

    def largest_k(self, budget_bytes: float) -> int:
        """Return the largest k whose snapshot takes no more than some bytes on this rank, at least 1."""
        if not self._experts.num_layers:
            return self._experts.num_experts
        room = budget_bytes - self._share.always_bytes
        fitting = [
            k
            for k in range(1, self._experts.num_experts + 1)
            if self._most_selected(k) * self._share.unit_bytes <= room
        ]
        return max(fitting, default=1)

    def _most_selected(self, k: int) -> int:
        if self._settings.is_load_aware:
            return most_on_a_rank(self._experts, k)
        return sequential_bottleneck(self._experts, k)

    def agree(self, values: list[int]) -> dict[str, int]:
        """Take the least k over all ranks, not more often than every few snapshots."""
        if not values or values[0] == 0 or self._num_since_change < _SNAPSHOTS_BETWEEN_CHANGES:
            return {}
        k = max(values[0], self._least_k)
        if k == self.k_snapshot:
            return {}
        self._set_k(k)
        return {"k_snapshot": k}

    def _set_k(self, k: int) -> None:
        self.k_snapshot, self._num_since_change = k, 0

    def resume(
        self,
        progress: ExpertProgress,
        iteration: int,
        restored: Mapping[tuple[str, int], UnitVersion],
        persisted: Mapping[tuple[str, int], UnitVersion],
        gaps_before: Mapping[str, Sequence[Gaps]],
    ) -> Loss:
        """Go on from a recovered state.

        Args:
            progress: of the state that was recovered.
            iteration: of that state.
            restored: the versions that the experts of the stage got, by layer name and expert; an expert
                that is not there got the state that the run began with.
            persisted: the versions that the newest checkpoint on storage has, likewise.
            gaps_before: ``[expert]`` by layer name, of the newest state that is known.

        Returns:
            What the recovery lost.
        """
        self._saved, self._saved_at = self._ledger.tables(restored)
        self._persisted, self._persisted_at = self._ledger.tables(
            {
                expert: version
                for expert, version in persisted.items()
                # One that is newer than what was restored is not intact.
                if expert in restored and version.iteration <= restored[expert].iteration
            }
        )
        for versions_at in (self._saved_at, self._persisted_at):
            # Versions from beyond: what is saved at this iteration or later shall count as newer.
            np.minimum(versions_at, iteration, out=versions_at)
        self._start, self._interval = progress.cursor, self._settings.interval or progress.interval
        if self._settings.raises_k:
            self.k_persist = max(self.k_persist, progress.k_persist)
            self._least_k = progress.least_k
            self._set_k(max(self.k_snapshot, progress.k_snapshot))
        elif self._settings.k_snapshot is None:
            self._set_k(progress.k_snapshot)
        return self._ledger.recover(progress.routed_tokens, restored, gaps_before)

    def nothing_counted(self) -> ExpertProgress:
        """Return the progress of a state that was saved by a strategy that counts no tokens."""
        zeros = np.zeros_like(self._saved)
        k = (self.k_snapshot, self.k_persist, self._least_k)
        planned_tokens = self._settings.planned_tokens
        return _progress(
            self._layers, 0, k, self._interval, zeros, self._ledger.gaps, planned_tokens
        )

    def raise_k(self, accumulated_plt: float, last_plt: float = 0.0) -> bool:
        """Double k where one more fault could take the PLT past the limit of k (Dynamic-K, see `next_k`).

        Args:
            accumulated_plt: of the whole job and the whole planned run, by all recoveries.
            last_plt: likewise, by the last one.

        Returns:
            Whether k has changed.
        """
        settings, num_experts, k = self._settings, self._experts.num_experts, self.k_snapshot
        if not settings.raises_k:
            return False
        run = (self._interval, settings.tokens_per_iteration, settings.planned_tokens)
        raised = next_k(
            k,
            num_experts,
            accumulated_plt,
            last_plt,
            lambda k: expected_plt(num_experts, k, *run),
            settings.plt_limit,
        )
        if raised == k:
            return False
        factor = -(-raised // k)
        self._least_k, self.k_persist = raised, min(factor * self.k_persist, num_experts)
        self._set_k(raised)
        return True


def _progress(
    layers: Sequence[str],
    cursor: int,
    k: tuple[int, int, int],
    interval: int,
    routed: Counts,
    gaps: Mapping[str, tuple[Gaps, ...]],
    planned_tokens: int,
) -> ExpertProgress:
    return ExpertProgress(
        cursor=cursor,
        k_snapshot=k[0],
        k_persist=k[1],
        least_k=k[2],
        interval=interval,
        routed_tokens={layer: tuple(routed[i].tolist()) for i, layer in enumerate(layers)},
        gaps=dict(gaps),
        planned_tokens=planned_tokens,
    )


def divide_units(
    units: Iterable[UnitId], covers: str, *, master_always_full: bool
) -> tuple[list[UnitId], list[UnitId]]:
    """Divide units into those that every snapshot holds and those that rotate.

    Args:
        units: whole units.
        covers: what of an expert rotates: weights, optimizer or both (the paper's W, O and WO).
        master_always_full: whether fp32 master weights are in every snapshot nevertheless.

    Returns:
        Both, experts in two parts where only one of them rotates. Both are empty for experts where
        nothing of them rotates any more.
    """
    always, rotating = [], []
    weights_rotate = covers in ("weights", "both") and not master_always_full
    moments_rotate = covers in ("optimizer", "both")
    for unit in units:
        if unit.kind is not UnitKind.EXPERT:
            always.append(unit)
        elif weights_rotate and moments_rotate:
            rotating.append(unit)
        else:
            weights, moments = (_part(unit, part) for part in (Part.WEIGHTS, Part.MOMENTS))
            (rotating if weights_rotate else always).append(weights)
            (rotating if moments_rotate else always).append(moments)
    return always, rotating


def _part(unit: UnitId, part: Part) -> UnitId:
    return UnitId(kind=unit.kind, block=unit.block, layer=unit.layer, expert=unit.expert, part=part)
