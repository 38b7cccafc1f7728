"""Strategies of partial experts for tests: their settings as numbers, and the steps of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from moe_ft.format.records import ExpertProgress, Gaps
from moe_ft.planning.experts import Counts, Expert, ExpertLayout
from moe_ft.planning.lost_tokens import Loss, UnitVersion
from moe_ft.strategies.interface import MeasuredBytes, Resumed, SnapshotPlan
from moe_ft.strategies.partial.selection import PartialConfig, RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.units import UnitId, UnitKind


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options and plan of a run, as numbers; `k_snapshot` None for automatic."""

    k_snapshot: int | None = 1
    k_persist: int = 1
    is_load_aware: bool = False
    raises_k: bool = False
    interval: int | None = 1
    planned_tokens: int = 10_000
    tokens_per_iteration: int = 100
    takes_whole: bool = False

    @property
    def options(self) -> PartialConfig:
        """The same as flags would say it."""
        return PartialConfig(
            k_snapshot="auto" if self.k_snapshot is None else str(self.k_snapshot),
            k_persist=self.k_persist,
            selection="load-aware" if self.is_load_aware else "sequential",
            dynamic_k=self.raises_k,
        )

    @property
    def run(self) -> PlannedRun:
        """The whole run."""
        return PlannedRun(
            interval=self.interval,
            planned_tokens=self.planned_tokens,
            tokens_per_iteration=self.tokens_per_iteration,
            takes_whole=self.takes_whole,
        )


DENSE = UnitId(kind=UnitKind.EMBEDDING)
SETTINGS = Settings()
SHARE = RankShare(always_bytes=100, unit_bytes=10)
ONE_LAYER = ExpertLayout(num_layers=1, num_experts=4, ep_size=1)


def expert(layer: int, number: int) -> UnitId:
    return UnitId(kind=UnitKind.EXPERT, layer=layer, expert=number)


def strategy_of(
    experts: ExpertLayout,
    settings: Settings,
    ep_rank: int | None = None,
    share: RankShare = SHARE,
) -> PartialStrategy:
    """Return the strategy of one expert-parallel rank, or of one that has all experts."""
    units = [
        expert(layer, number)
        for layer in range(experts.num_layers)
        for number in range(experts.num_experts)
        if ep_rank in (None, experts.rank_of(number))
    ]
    layers = [f"layer.{layer}" for layer in range(experts.num_layers)]
    return PartialStrategy([DENSE], units, layers, experts, settings.options, settings.run, share)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[ExpertLayout, int]:
    """Draw experts and a k that they allow."""
    ep_size = draw(st.integers(1, 4))
    experts = ExpertLayout(
        num_layers=draw(st.integers(1, 4)),
        num_experts=ep_size * draw(st.integers(1, 4)),
        ep_size=ep_size,
    )
    return experts, draw(st.integers(1, experts.num_experts))


def tokens(experts: ExpertLayout, seed: int) -> Counts:
    shape = (experts.num_layers, experts.num_experts)
    return np.random.default_rng(seed).integers(0, 50, shape, dtype=np.int64)


def snapshot(strategy: PartialStrategy, iteration: int, *, is_whole: bool = False) -> SnapshotPlan:
    """Plan a snapshot that is not taken."""
    (found,) = strategy.plan_window(iteration, is_whole=is_whole).snapshots
    return found


def take_plan(strategy: PartialStrategy, iteration: int, *, is_whole: bool = False) -> SnapshotPlan:
    """Take a snapshot that completes, and return its plan."""
    window = strategy.plan_window(iteration, is_whole=is_whole)
    strategy.note_begun(window)
    strategy.note_complete(window, iteration)
    return window.snapshots[0]


def take(strategy: PartialStrategy, iteration: int, *, is_whole: bool = False) -> set[UnitId]:
    """Take a snapshot that completes, and return the experts in it."""
    return set(take_plan(strategy, iteration, is_whole=is_whole).rotating)


def persist(strategy: PartialStrategy) -> frozenset[UnitId]:
    """Write a checkpoint that completes, and return the experts in it."""
    plan = strategy.plan_persist()
    strategy.note_persisted(plan)
    return plan.units


def possible(strategy: PartialStrategy) -> list[SnapshotPlan]:
    """Return the plans that regions are sized for."""
    return [each for window in strategy.possible_windows() for each in window.snapshots]


def progress_in(plan: SnapshotPlan) -> ExpertProgress:
    """Return what an index says of the experts."""
    assert plan.progress is not None
    return plan.progress()


def resume(
    strategy: PartialStrategy,
    progress: ExpertProgress | None,
    iteration: int,
    restored: Mapping[Expert, UnitVersion],
    persisted: Mapping[Expert, UnitVersion] | None = None,
    gaps_before: Mapping[str, Sequence[Gaps]] | None = None,
) -> Loss:
    """Continue from a recovered state; versions are given by layer and expert."""
    return strategy.resume(
        Resumed(
            iteration=iteration,
            progress=progress,
            restored=_by_unit(restored),
            persisted=_by_unit(persisted or {}),
            gaps_before=gaps_before or {},
        )
    )


def _by_unit(versions: Mapping[Expert, UnitVersion]) -> dict[str, UnitVersion]:
    return {
        str(expert(int(layer.removeprefix("layer.")), number)): version
        for (layer, number), version in versions.items()
    }


def raise_k(strategy: PartialStrategy, accumulated_plt: float, last_plt: float = 0.0) -> bool:
    """Have Dynamic-K act on a PLT, with the interval that the strategy has seen."""
    interval = progress_in(snapshot(strategy, 0)).interval
    return strategy.k.raise_for(accumulated_plt, last_plt, interval)


def values(strategy: PartialStrategy, copied_bytes: float | None) -> list[int]:
    """Return what a rank says that has measured so much."""
    strategy.note_measured(MeasuredBytes(copied_bytes=copied_bytes))
    return strategy.values()


def progress_of(routed: tuple[int, ...], gaps: Gaps = ()) -> ExpertProgress:
    return ExpertProgress(
        cursor=2,
        k_snapshot=2,
        k_persist=2,
        least_k=1,
        interval=1,
        routed_tokens={"layer.0": routed},
        gaps={"layer.0": (gaps,) * 4},
        planned_tokens=1000,
    )


def version(iteration: int, routed: int, gaps: Gaps = ()) -> UnitVersion:
    return UnitVersion(iteration=iteration, routed_tokens=routed, gaps=gaps)
