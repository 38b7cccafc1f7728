"""The strategy `dense`: every unit in full in every snapshot. Sources: CheckFreq, Gemini.

Here are the strategy itself, its plan (bytes of each rank, the wait for a snapshot, host memory), and its
entry in the registry.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import override

from moe_ft.config.config import MoeFtConfig
from moe_ft.planning.costs import Costs
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.job_costs import Saved, costs_of, interval_flags, known_machine, places
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import (
    describe_ranks,
    failure_lines,
    memory_table,
    persist_line,
    whole_line,
)
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
    def contents(self, config: MoeFtConfig) -> str:
        return "the whole state"

    @override
    def report(self, job: PlannedJob) -> str:
        sizes = job.by_rank([[rank.full_bytes for rank in stage.ranks] for stage in job.stages])
        most = max(sizes)
        size = (
            f"snapshot: {sum(sizes) / 1e6:,.1f} MB in all, {most / 1e6:,.1f} MB of rank "
            f"{sizes.index(most)}, which has the most"
        )
        lines = "\n".join([size, *_limits(job, most), *whole_line(job, most)])
        memory = memory_table(job, {"dense": _share(job)})
        return "\n\n".join(
            [describe_ranks(job), lines, memory, *failure_lines(job, self.costs, most)]
        )

    @override
    def costs(self, job: PlannedJob) -> Costs:
        most = job.heaviest.full_bytes
        saved = Saved(
            snapshots=(most,),
            interval=job.interval(most, most),
            persisted_bytes=most,
            read_bytes=most,
            whole_bytes=most,
            share=_share(job),
            sent_share=job.sent_share(most),
        )
        return costs_of(job, self.name, saved)

    @override
    def choices(self, job: PlannedJob) -> Mapping[str, Sequence[str]]:
        most = job.heaviest.full_bytes
        return {
            place: interval_flags(job, most, most, at_peers=at_peers)
            for place, at_peers in places(job).items()
        }

    @override
    def footprint(self, job: PlannedJob) -> Footprint:
        sizes = job.by_rank([[rank.full_bytes for rank in stage.ranks] for stage in job.stages])
        return Footprint(share=_share(job), checkpoint_bytes=sum(sizes))

    @override
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        return DenseStrategy(facts.catalog.units)


def _share(job: PlannedJob) -> MemoryShare:
    return MemoryShare(
        region_bytes=job.heaviest.full_bytes,
        breakpoint_bytes=job.breakpoint_bytes,
        gradient_bytes=job.gradient_bytes(),
        index_bytes=job.index_bytes(),
    )


def _limits(job: PlannedJob, most_bytes: int) -> list[str]:
    """Return the limits that bandwidths set, if they were given."""
    measured, machine, lines = job.measured, known_machine(job), []
    if measured.iteration_s is None:
        return []
    interval = job.interval(most_bytes, most_bytes)
    if machine is not None:
        (stall_s,) = machine.stalls_s([most_bytes])
        overhead = stall_s / (interval * machine.iteration_s)
        lines.append(
            f"copied in {most_bytes / machine.bandwidth:.3f} s, alongside {machine.hidden_s:.3f} s of "
            f"forward and backward; stall {stall_s:.3f} s, {overhead:.1%} of the time with --moe-ft-interval "
            f"{interval}"
        )
    planned = interval * job.persist_interval
    if gradient_bytes := job.gradient_bytes():
        times = 1 / job.sent_share(most_bytes)
        lines.append(
            f"peers get gradients: {gradient_bytes / 1e6:,.1f} MB of the rank with the most, {times:.1f} "
            "times less than state; state is what a start sends first, and what follows a lost one"
        )
    return [*lines, *persist_line(job, most_bytes, period_s=measured.iteration_s, planned=planned)]


DENSE = Dense(name="dense", follows_gradients=True)
