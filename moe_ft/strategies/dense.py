"""The strategy `dense`: every unit in full in every snapshot. Sources: CheckFreq, Gemini.

Here are the strategy itself, its plan (bytes of each rank, the wait for a snapshot, host memory), and its
entry in the registry.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import override

from moe_ft.config.config import MoeFtConfig
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import describe_ranks, memory_table, persist_line, whole_line
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


@dataclass(frozen=True, kw_only=True)
class Dense(StrategyKind):
    """Needs nothing of a job."""

    @override
    def report(self, job: PlannedJob) -> str:
        job.measured.refuse_unplanned("dense")
        sizes = job.by_rank([[rank.full_bytes for rank in stage.ranks] for stage in job.stages])
        most = max(sizes)
        size = (
            f"snapshot: {sum(sizes) / 1e6:,.1f} MB in all, {most / 1e6:,.1f} MB of rank "
            f"{sizes.index(most)}, which has the most"
        )
        lines = "\n".join([size, *_limits(job, most), *whole_line(job, most)])
        return "\n\n".join([describe_ranks(job), lines, memory_table(job, {"dense": _share(job)})])

    @override
    def footprint(self, job: PlannedJob) -> Footprint:
        sizes = job.by_rank([[rank.full_bytes for rank in stage.ranks] for stage in job.stages])
        return Footprint(share=_share(job), checkpoint_bytes=sum(sizes))

    @override
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        return DenseStrategy(facts.catalog.units)


def _share(job: PlannedJob) -> MemoryShare:
    return MemoryShare(region_bytes=job.heaviest.full_bytes, breakpoint_bytes=job.breakpoint_bytes)


def _limits(job: PlannedJob, most_bytes: int) -> list[str]:
    """Return the limits that bandwidths set, if they were given."""
    measured, lines = job.measured, []
    if measured.iteration_s is None:
        return []
    interval = job.interval(most_bytes, most_bytes)
    if measured.bandwidth is not None:
        copy_s = most_bytes / measured.bandwidth
        stall_s = max(0.0, copy_s - measured.hidden_s)
        overhead = stall_s / (interval * measured.iteration_s)
        lines.append(
            f"copied in {copy_s:.3f} s, alongside {measured.hidden_s:.3f} s of forward and backward; stall "
            f"{stall_s:.3f} s, {overhead:.1%} of the time with --moe-ft-interval {interval}"
        )
    planned = interval * job.persist_interval
    return [*lines, *persist_line(job, most_bytes, period_s=measured.iteration_s, planned=planned)]


DENSE = Dense(name="dense")
