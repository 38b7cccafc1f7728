"""The strategy `dense`: every unit in full in every snapshot. Sources: CheckFreq, Gemini.

Here are the strategy itself, its plan (bytes of each rank, the wait for a snapshot, host memory), and its
entry in the registry.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import override

from moe_ft.config.config import MoeFtConfig
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.job_costs import Sizes, interval_choices
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import StrategyPlan, megabytes
from moe_ft.strategies.interface import RankFacts, SnapshotPlan, Strategy, StrategyKind, WindowPlan
from moe_ft.units import Level, UnitId


class DenseStrategy(Strategy):
    """Takes windows of one snapshot with everything in it."""

    def __init__(self, units: Iterable[UnitId]) -> None:
        snapshot = SnapshotPlan(levels=dict.fromkeys(units, Level.FULL))
        self._plan = WindowPlan(snapshots=(snapshot,))

    @property
    @override
    def always(self) -> Collection[UnitId]:
        return self._plan.snapshots[0].levels.keys()

    @override
    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        return self._plan


class DensePlan(StrategyPlan):
    """Plan of snapshots of everything."""

    @property
    @override
    def sizes(self) -> Sizes:
        job, most = self.job, self.job.heaviest.full_bytes
        return Sizes(
            snapshots=(most,),
            interval=job.interval(most, most),
            persisted_bytes=most,
            read_bytes=most,
            whole_bytes=most,
            sent_share=job.sent_share(most),
        )

    @property
    @override
    def footprint(self) -> Footprint:
        share = MemoryShare(
            region_bytes=self.job.heaviest.full_bytes,
            breakpoint_bytes=self.job.breakpoint_bytes,
            gradient_bytes=self.job.gradient_bytes(),
            index_bytes=self.job.index_bytes(),
        )
        return Footprint(share=share, checkpoint_bytes=sum(self.job.full_bytes))

    @override
    def choices(self) -> Mapping[str, Sequence[str]]:
        most = self.job.heaviest.full_bytes
        return interval_choices(self.job, most, most)

    @override
    def rows(self) -> list[tuple[str, str]]:
        by_rank, gradient_bytes = self.job.full_bytes, self.job.gradient_bytes()
        most = max(by_rank)
        rows = [
            (
                "snapshot",
                f"{megabytes(sum(by_rank))} MB in all, {megabytes(most)} MB of rank "
                f"{by_rank.index(most)}, which has the most",
            )
        ]
        if gradient_bytes:
            value = (
                f"{megabytes(gradient_bytes)} MB of the rank with the most, "
                f"{1 / self.job.sent_share(most):.1f} times less than state; state is what a start sends "
                "first, and what follows a lost one"
            )
            rows.append(("peers get gradients", value))
        return rows


@dataclass(frozen=True, kw_only=True)
class Dense(StrategyKind):
    """Needs nothing of a job."""

    @override
    def contents(self, config: MoeFtConfig) -> str:
        return "the whole state"

    @override
    def plan(self, job: PlannedJob) -> StrategyPlan:
        return DensePlan(job, self.name)

    @override
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        return DenseStrategy(facts.catalog.units)


DENSE = Dense(name="dense", follows_gradients=True)
