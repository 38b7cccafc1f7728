"""Experts that only some snapshots hold: their versions, and the part of a strategy that all of these share.

A strategy chooses the experts (partial/selection.py, selective/selection.py); planning/lost_tokens.py counts
their tokens. All ranks of a stage have the same numbers and so choose the same experts; only the experts that
a rank has are different.
"""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial as bind
from typing import Any, NamedTuple, override

import numpy as np

from moe_ft.config.config import MoeFtConfig
from moe_ft.format.records import ExpertProgress, Gaps
from moe_ft.planning.experts import Counts, Expert, ExpertFacts, ExpertLayout
from moe_ft.planning.lost_tokens import NEVER, Debts, Loss, TokenLedger, UnitVersion, job_plt
from moe_ft.strategies.interface import (
    JobLoss,
    PersistPlan,
    PlanBreakpoint,
    Resumed,
    Rotation,
    SnapshotPlan,
    Strategy,
    WindowPlan,
)
from moe_ft.units import Level, UnitId, parse_unit

Selection = tuple[tuple[int, ...], ...]  # per MoE layer the selected experts, ascending


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertVersions:
    """One version of each expert.

    Attributes:
        trained: ``[layer, expert]`` tokens whose updates it incorporates.
        iterations: ``[layer, expert]``, NEVER for an expert without a version.
    """

    trained: Counts
    iterations: Counts

    @classmethod
    def none(cls, num_layers: int, num_experts: int) -> "ExpertVersions":
        """Return the table of a run that has saved nothing yet."""
        shape = (num_layers, num_experts)
        return cls(trained=np.zeros(shape, np.int64), iterations=np.full(shape, NEVER, np.int64))

    @classmethod
    def of(cls, trained: Counts, iteration: int) -> "ExpertVersions":
        """Return the versions that all experts have at an iteration."""
        return cls(trained=trained, iterations=np.full_like(trained, iteration))

    def replaced(self, selection: Selection, newer: "ExpertVersions") -> "ExpertVersions":
        """Return a table in which the selected experts have other versions."""
        trained, iterations = self.trained.copy(), self.iterations.copy()
        for layer, experts in enumerate(selection):
            chosen = list(experts)
            trained[layer, chosen] = newer.trained[layer, chosen]
            iterations[layer, chosen] = newer.iterations[layer, chosen]
        return ExpertVersions(trained=trained, iterations=iterations)

    def up_to(self, iteration: int) -> "ExpertVersions":
        """Return a table in which no version counts as newer than an iteration.

        A recovery may leave newer ones. What is saved from this iteration on replaces them.
        """
        return ExpertVersions(
            trained=self.trained, iterations=np.minimum(self.iterations, iteration)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """Plan of the whole run.

    Attributes:
        interval: iterations between snapshots, None for automatic.
        planned_tokens: tokens times top-k that a layer processes in the whole run.
        tokens_per_iteration: tokens times top-k of an iteration, on average.
        takes_whole: whether some snapshots hold all experts (--moe-ft-persist-dense-interval).
        makes_up: whether lost tokens are owed to their experts (--moe-ft-capacity-boost).
    """

    interval: int | None
    planned_tokens: int
    tokens_per_iteration: int
    takes_whole: bool = False
    makes_up: bool = False

    @classmethod
    def of(cls, config: MoeFtConfig, experts: ExpertFacts) -> "PlannedRun":
        """Return the plan that settings and a job make."""
        return cls(
            interval=config.strategy.interval_iterations,
            planned_tokens=experts.planned_tokens,
            tokens_per_iteration=experts.tokens_per_iteration,
            takes_whole=config.storage.persists_dense,
            makes_up=config.recovery.capacity_boost > 0,
        )


class SelectionTurn(NamedTuple):
    """State of a selection, as `ExpertProgress` keeps it; a strategy without one has the defaults."""

    cursor: int = 0
    k_snapshot: int = 1
    k_persist: int = 1
    least_k: int = 1
    interval: int = 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SnapshotMemo:
    """Changes that one snapshot makes once it is complete.

    Attributes:
        trained: ``[layer, expert]`` tokens of its versions.
        is_whole: whether it is part of the whole state of its iteration.
        cursor: of the next snapshot, where experts take turns.
        remote: experts whose newest versions go to peers; None if peers get whatever they lack.
        followed: numbers of the experts whose next step peers follow.
    """

    selection: Selection
    trained: Counts
    is_whole: bool
    cursor: int = 0
    remote: Selection | None = None
    followed: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Persist:
    """Experts that go to storage, and the versions in memory when they were chosen."""

    selection: Selection
    versions: ExpertVersions


@dataclass(frozen=True, kw_only=True)
class TokenLoss(JobLoss):
    """Tokens whose updates a recovery has dropped. PLT and MTL are of the whole planned run.

    Attributes:
        mtl: by this recovery, over all layers together: PLT is their mean, MTL their sum (MoEtion, eq. 6).
        repeated_tokens: tokens that some experts are trained with again.
        per_expert: lost by this recovery, ``[expert]`` by layer name.
    """

    mtl: float
    total_mtl: float
    repeated_tokens: int
    total_lost_tokens: int
    per_expert: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, losses: Sequence[Loss | None], planned_tokens: int) -> "TokenLoss":
        """Return the cost for the job of what the stages of all ranks have lost."""
        lost: dict[str, tuple[int, ...]] = {}
        repeated, accumulated = dict(lost), dict(lost)
        for loss in losses:
            if loss is not None:  # ranks of a stage have equal ones
                lost |= loss.lost
                repeated |= loss.repeated
                accumulated |= loss.accumulated
        lost_tokens, plt = job_plt(lost, planned_tokens)
        total_lost_tokens, total_plt = job_plt(accumulated, planned_tokens)
        return TokenLoss(
            lost_tokens=lost_tokens,
            plt=plt,
            mtl=plt * len(lost),
            repeated_tokens=job_plt(repeated, planned_tokens)[0],
            total_lost_tokens=total_lost_tokens,
            total_plt=total_plt,
            total_mtl=total_plt * len(accumulated),
            per_expert=lost,
        )

    @override
    def fields(self) -> dict[str, Any]:
        return {
            "lost_tokens": self.lost_tokens,
            "plt": self.plt,
            "mtl": self.mtl,
            "repeated_tokens": self.repeated_tokens,
            "total_lost_tokens": self.total_lost_tokens,
            "total_plt": self.total_plt,
            "total_mtl": self.total_mtl,
            "lost_per_expert": {layer: list(lost) for layer, lost in self.per_expert.items()},
        }


class RotatingExperts(Strategy):
    """Strategy whose snapshots hold some of the experts. Owned by the training thread."""

    def __init__(
        self,
        always: Iterable[UnitId],
        rotating: Iterable[UnitId],
        layers: Sequence[str],
        experts: ExpertLayout,
        run: PlannedRun,
        frozen: Collection[Expert] = (),
    ) -> None:
        """Make the strategy of one rank at the start of a run.

        Args:
            layers: names of the stage's MoE layers, in the order of the counts.
        """
        self._always = dict.fromkeys(always, Level.FULL)
        self._own = tuple(sorted(rotating))
        self.rotation = Rotation(units=frozenset(self._own), is_empty=False)
        self.counted_layers = tuple(layers)
        self._experts = experts
        self._run = run
        self._ledger = TokenLedger(layers, experts.num_experts, frozen)
        self.debts = Debts(tokens=np.zeros_like(self._ledger.routed)) if run.makes_up else None
        self._saved = ExpertVersions.none(experts.num_layers, experts.num_experts)  # in memory
        self._persisted = self._saved  # on storage
        self._interval = run.interval or 1
        self._saved_iteration = -1
        self._whole_iteration = -1
        self._num_whole = 0  # snapshots towards the whole state of that iteration

    @property
    @override
    def always(self) -> Collection[UnitId]:
        return self._always.keys()

    @property
    def _turn(self) -> SelectionTurn:
        """State of the selection now."""
        return SelectionTurn(interval=self._interval)

    @property
    @abstractmethod
    def _num_of_whole(self) -> int:
        """Snapshots that hold a whole state together, on the stage that needs most."""

    @override
    def possible_windows(self) -> list[WindowPlan]:
        return [WindowPlan(snapshots=(SnapshotPlan(levels=self._always),))]

    @override
    def is_whole(self, iteration: int) -> bool:
        # All stages take equally many snapshots: the last ones of some have no experts.
        return iteration == self._whole_iteration and self._num_whole >= self._num_of_whole

    def _snapshot(self, selection: Selection, turn: SelectionTurn) -> SnapshotPlan:
        """Return a snapshot of the selected experts as they are now."""
        routed, gaps = self._ledger.routed, dict(self._ledger.gaps)
        return SnapshotPlan(
            levels=self._always,
            rotating=self._of_this_rank(selection, routed, gaps),
            progress=bind(self._progress, turn, routed, gaps, self.debts),
        )

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

    @override
    def plan_breakpoint(self) -> PlanBreakpoint:
        routed, gaps, turn = self._ledger.routed, dict(self._ledger.gaps), self._turn
        debts = self.debts
        levels = {**self._always, **dict.fromkeys(self._own, Level.FULL)}
        everything = tuple(tuple(range(self._experts.num_experts)) for _ in self.counted_layers)

        def plan(tokens: Callable[[], Counts | None]) -> SnapshotPlan:
            counts = tokens()
            now, owed = routed, debts
            if counts is not None:
                trained, made_up = np.split(counts, [len(self.counted_layers)])
                now, owed = self._ledger.after(routed, trained), debts and debts.paid(made_up)
            return SnapshotPlan(
                levels=levels,
                rotating=self._of_this_rank(everything, now, gaps),
                progress=bind(self._progress, turn, now, gaps, owed),
            )

        return plan

    def _progress(
        self,
        turn: SelectionTurn,
        routed: Counts,
        gaps: dict[str, tuple[Gaps, ...]],
        debts: Debts | None,
    ) -> ExpertProgress:
        """Return the progress as it was when these numbers were taken."""
        return ExpertProgress(
            **turn._asdict(),
            routed_tokens=self._ledger.by_layer(routed),
            gaps=gaps,
            planned_tokens=self._run.planned_tokens,
            owed=self._ledger.by_layer(debts.tokens) if debts and debts.num_left else {},
            boost_left=debts.num_left if debts else 0,
        )

    @override
    def add_tokens(self, counts: Counts) -> None:
        tokens, made_up = np.split(counts, [len(self.counted_layers)])
        self._ledger.add(tokens)
        self.debts = self.debts and self.debts.paid(made_up)

    @override
    def at_risk(self) -> dict[str, int]:
        return {
            target: int(np.maximum(0, self._ledger.trained - there.trained).sum())
            for target, there in self._targets().items()
            if (there.iterations != NEVER).any()
        }

    def _targets(self) -> dict[str, ExpertVersions]:
        """Return the versions of the experts that are known to be somewhere."""
        return {"memory": self._saved, "storage": self._persisted}

    @override
    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        memo: SnapshotMemo = plan.memo
        if memo.is_whole:
            self._num_whole = 1 + self._num_whole * (iteration == self._whole_iteration)
            self._whole_iteration = iteration
        if 0 <= self._saved_iteration < iteration:
            self._interval = iteration - self._saved_iteration
        self._saved_iteration = iteration
        self._saved = self._saved.replaced(
            memo.selection, ExpertVersions.of(memo.trained, iteration)
        )

    def _persist(self, selection: Selection) -> PersistPlan:
        """Return the plan of writing the selected experts' versions in memory to storage."""
        units = frozenset(self._of_this_rank(selection, self._ledger.routed, self._ledger.gaps))
        return PersistPlan(units=units, memo=_Persist(selection=selection, versions=self._saved))

    @override
    def note_persisted(self, plan: PersistPlan) -> None:
        persist: _Persist = plan.memo
        self._persisted = self._persisted.replaced(persist.selection, persist.versions)

    def _continue(self, progress: ExpertProgress) -> None:
        """Continue with the state of the selection that a recovery has brought back."""
        self._interval = self._run.interval or progress.interval

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
            ExpertVersions(trained=trained, iterations=iterations).up_to(resumed.iteration)
            for trained, iterations in (self._ledger.tables(in_memory), self._ledger.tables(intact))
        )
        progress = resumed.progress
        if progress is None:  # nothing was counted
            nothing = np.zeros_like(self._ledger.routed)
            turn = self._turn._replace(cursor=0)
            progress = self._progress(turn, nothing, dict(self._ledger.gaps), None)
        self._continue(progress)
        loss = self._ledger.recover(progress.routed_tokens, restored, resumed.gaps_before)
        if self.debts is not None:
            before = Debts(tokens=self._ledger.table(progress.owed), num_left=progress.boost_left)
            self.debts = before.owing(self._ledger.table(loss.lost))
        return loss

    @override
    def settle_losses(self, losses: Sequence[Loss | None]) -> JobLoss:
        return TokenLoss.of(losses, self._run.planned_tokens)


def by_expert(versions: Mapping[str, UnitVersion]) -> dict[Expert, UnitVersion]:
    """Return versions by layer name and expert instead of by unit name."""
    units = {name: parse_unit(name) for name in versions}
    return {(units[name].layer_name, units[name].expert): versions[name] for name in versions}
