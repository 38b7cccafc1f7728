"""The plan of selective checkpoints: bytes of each rank in its budget, host memory, losses of a failure."""

import math

import numpy as np

from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs
from moe_ft.planning.host_memory import MemoryShare, num_slots
from moe_ft.planning.job_costs import Saved, costs_of
from moe_ft.planning.planned_job import PlannedJob, PlannedRank
from moe_ft.planning.report import (
    describe_ranks,
    failure_lines,
    megabytes,
    memory_table,
    persist_line,
    whole_line,
)
from moe_ft.strategies.selective.config import NAME, PAPER, SelectiveConfig
from moe_ft.tables import table
from moe_ft.units import UnitKind


class SelectiveSizes:
    """Bytes that the ranks of a planned job save: of each as much as its budget allows.

    Memory and peers are planned as if they had one budget, the smaller one. Without skew in the routing, the
    experts come in turn.
    """

    def __init__(self, job: PlannedJob, options: SelectiveConfig) -> None:
        """Collect the sizes.

        Raises:
            ConfigError: if a budget follows from what was not given.
        """
        self.job, self._options = job, options
        local = options.local_bytes
        if local is None and job.measured.budget_bytes is None:
            raise ConfigError(
                "--moe-ft-local-budget=auto needs --iteration-s and --bandwidth: it is what can be copied in "
                "an iteration. Give them before the --, or plan with a size like 2GiB."
            )
        self.local_bytes = float(job.measured.budget_bytes or 0 if local is None else local)
        self.remote_bytes = self._remote()
        self.budget_bytes = min(self.local_bytes, self.remote_bytes)
        self._follows = options.selective_rule != PAPER
        self.follow_all = self._follows and 0 < job.gradient_bytes() <= self.remote_bytes

    def _remote(self) -> float:
        measured, factor = self.job.measured, self.job.replication_factor
        if not factor:
            return math.inf
        if self._options.remote_bytes is not None:
            return float(self._options.remote_bytes)
        if measured.network_bandwidth is None or measured.iteration_s is None:
            return math.inf
        return measured.network_bandwidth * measured.iteration_s / factor

    def by_stage(self, budget_bytes: float) -> list[list[int]]:
        """Return ``[stage][rank]`` bytes of a snapshot with a budget."""
        return [
            [int(min(max(budget_bytes, _least(rank)), rank.full_bytes)) for rank in stage.ranks]
            for stage in self.job.stages
        ]

    @property
    def snapshot_bytes(self) -> int:
        """The most that a rank saves in a snapshot."""
        return max(map(max, self.by_stage(self.budget_bytes)))

    @property
    def rounds(self) -> float:
        """Snapshots until each expert had a turn, on the rank where that takes the longest."""
        ranks = [rank for stage in self.job.stages for rank in stage.ranks]
        saved = [each for of_stage in self.by_stage(self.budget_bytes) for each in of_stage]
        return max(
            (rank.full_bytes - _always(rank)) / max(1, num_bytes - _always(rank))
            if rank.full_bytes > _always(rank)
            else 1.0
            for rank, num_bytes in zip(ranks, saved, strict=True)
        )

    @property
    def share(self) -> MemoryShare:
        """Host memory of the rank that needs the most."""
        job, shares = self.job, []
        takes_all = self._options.local_bytes is None or job.config.storage.persists_dense
        for rank in (rank for stage in job.stages for rank in stage.ranks):
            sizes = sorted(
                rank.num_bytes(unit)
                for unit in rank.sizes
                if unit.kind is UnitKind.EXPERT and rank.owns(unit)
            )
            slot = max(
                (rank.slot_bytes(unit) for unit in rank.sizes if unit.kind is UnitKind.EXPERT),
                default=0,
            )
            room = self.local_bytes - _always(rank)
            fitting = sum(int(end <= room) for end in np.cumsum(sizes))
            most = len(sizes) if takes_all else max(1, fitting)
            retained = len(sizes) if job.config.memory.num_replicas != 0 else 0
            shares.append(
                MemoryShare(
                    region_bytes=_always(rank),
                    pool_bytes=num_slots(len(sizes) + retained, most) * slot,
                    breakpoint_bytes=job.breakpoint_bytes,
                    gradient_bytes=job.gradient_bytes(has_experts=self._follows),
                    index_bytes=job.index_bytes(),
                )
            )
        return max(shares, key=lambda share: share.own_bytes(persists=False))


def _always(rank: PlannedRank) -> int:
    return sum(size.full for unit, size in rank.sizes.items() if unit.kind is not UnitKind.EXPERT)


def _least(rank: PlannedRank) -> int:
    experts = (size.full for unit, size in rank.sizes.items() if unit.kind is UnitKind.EXPERT)
    return _always(rank) + max(experts, default=0)


def costs(job: PlannedJob, options: SelectiveConfig) -> Costs:
    """Return what selective checkpoints cost a job with uniform routing, which is their worst case."""
    sizes, full = SelectiveSizes(job, options), job.heaviest.full_bytes
    most = sizes.snapshot_bytes
    saved = Saved(
        snapshots=(most,),
        interval=job.interval(most, most),
        persisted_bytes=most,
        read_bytes=full,
        whole_bytes=full,
        share=sizes.share,
        rounds=(sizes.rounds, sizes.rounds),
    )
    return costs_of(job, NAME, saved)


def render(job: PlannedJob, options: SelectiveConfig) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: if flags do not fit together.
    """
    sizes, measured = SelectiveSizes(job, options), job.measured
    most, full = sizes.snapshot_bytes, job.heaviest.full_bytes
    interval = job.interval(most, most)
    remote = "none" if math.isinf(sizes.remote_bytes) else f"{megabytes(sizes.remote_bytes)} MB"
    lines = [
        f"budgets of a rank: {megabytes(sizes.local_bytes)} MB in memory, {remote} at each peer; planned as "
        "if both had the smaller one",
        f"snapshot: at most {megabytes(most)} MB of a rank, {most / full:.1%} of a full one",
    ]
    if sizes.follow_all and full <= sizes.local_bytes:
        lines.append(
            f"peers can follow all experts by gradients: {megabytes(job.gradient_bytes())} MB a snapshot, "
            "after which they lack nothing"
        )
    if measured.budget_bytes is not None and measured.bandwidth is not None:
        stall_s = max(0.0, most / measured.bandwidth - measured.hidden_s)
        lines.append(
            f"copied in {most / measured.bandwidth:.3f} s, alongside {measured.hidden_s:.3f} s of forward "
            f"and backward; stall {stall_s:.3f} s"
        )
    if measured.iteration_s is not None:
        planned = interval * job.persist_interval
        lines += persist_line(job, most, period_s=measured.iteration_s, planned=planned)
    lost = interval * (sizes.rounds - 1) / 2
    row = ["memory or peers", f"{lost:.2f}"]
    headers = ["a fault that recovers from", "loses tokens of iterations, at most"]
    if job.train_iterations:
        row.append(f"{lost / job.train_iterations:.4%}")
        headers.append("PLT")
    uniform = (
        "Routing is taken as uniform; the more it is skewed, the less is lost at the same bytes."
    )
    share = sizes.share
    dense = MemoryShare(region_bytes=full, index_bytes=share.index_bytes)
    return "\n\n".join(
        [
            describe_ranks(job),
            "\n".join(lines),
            memory_table(job, {NAME: share, "dense": dense}),
            *whole_line(job, full),
            table([row], headers) + "\n" + uniform,
            *failure_lines(job, lambda other: costs(other, options), full),
        ]
    )
