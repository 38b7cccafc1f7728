"""The plan of partial experts (MoC-System): bytes of each rank, hidden copies, losses of a failure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.job_costs import Saved, costs_of, interval_flags, places
from moe_ft.planning.lost_tokens import expected_plt
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import (
    describe_ranks,
    failure_lines,
    megabytes,
    memory_table,
    persist_line,
    reduction,
    whole_line,
)
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.size import Build, PartialSizes, Workload, largest_hidden_k
from moe_ft.tables import table

_MAX_RANK_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPlan:
    """The job and what follows from the options of the strategy.

    Attributes:
        sizes: of what its ranks save.
        k_by_target: experts of each MoE layer in a "snapshot" and in a "persist".
    """

    job: PlannedJob
    options: PartialConfig
    build: Build
    sizes: PartialSizes
    k_by_target: Mapping[str, int]

    @property
    def interval(self) -> int:
        """Iterations between snapshots."""
        snapshot, persist = (self.workload(k).bottleneck_bytes for k in self.k_by_target.values())
        return self.job.interval(snapshot, persist)

    def workload(self, k: int, sharding: str | None = None) -> Workload:
        """Return what every rank saves."""
        if sharding is None:
            return self.sizes.plan_workload(k)
        divided = self.job.divided(sharding)
        return PartialSizes(divided, self.options, self.build).plan_workload(k)


def render(job: PlannedJob, options: PartialConfig, build: Build) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: if flags do not fit together.
    """
    plan = _plan(job, options, build)
    described = "\n".join(
        [describe_ranks(job), *_simplifications(job, options), *_adaptive_advice(plan)]
    )
    parts = [described, _size_table(plan), _rank_table(plan), _memory(plan)]
    whole = whole_line(job, plan.workload(job.model.num_experts).bottleneck_bytes)
    failure = failure_lines(job, lambda job: costs(job, options, build), job.heaviest.full_bytes)
    return "\n\n".join([*parts, *_limits(plan), *whole, *_losses(plan), *failure])


def costs(job: PlannedJob, options: PartialConfig, build: Build) -> Costs:
    """Return what partial experts cost a job with uniform routing and sequential selection."""
    plan, num_experts = _plan(job, options, build), job.model.num_experts
    k_snapshot, k_persist = plan.k_by_target.values()
    most = plan.workload(k_snapshot).bottleneck_bytes
    saved = Saved(
        snapshots=(most,),
        interval=plan.interval,
        persisted_bytes=plan.workload(k_persist).bottleneck_bytes,
        read_bytes=job.heaviest.full_bytes,
        whole_bytes=job.heaviest.full_bytes,
        share=_share(job, options, plan.sizes),
        rounds=(num_experts / k_snapshot, num_experts / k_persist),
        sent_share=job.sent_share(most, has_experts=False),
    )
    return costs_of(job, "partial", saved)


def choices(job: PlannedJob, options: PartialConfig, build: Build) -> Mapping[str, Sequence[str]]:
    """Return flags with as many experts as are hidden in snapshots, and an eighth of all on storage."""
    sizes = PartialSizes(job, options, build)
    k_snapshot = max(1, sizes.automatic_k(job.measured.budget_bytes or 0.0))
    k_persist = min(k_snapshot, math.ceil(job.model.num_experts / 8))
    most, persisted = (sizes.plan_workload(k).bottleneck_bytes for k in (k_snapshot, k_persist))
    flags = [f"--moe-ft-k-snapshot={k_snapshot}"]
    if job.persists or job.measured.storage_bandwidth is not None:
        flags.append(f"--moe-ft-k-persist={k_persist}")
    return {
        place: [*flags, *interval_flags(job, most, persisted, at_peers=at_peers)]
        for place, at_peers in places(job).items()
    }


def footprint(job: PlannedJob, options: PartialConfig, build: Build) -> Footprint:
    """Return the room that checkpoints take, at most.

    A checkpoint refers to the files of as many older ones as it takes until every expert was written.
    """
    sizes, num_experts = PartialSizes(job, options, build), job.model.num_experts
    k_persist = min(options.k_persist, num_experts)
    largest = num_experts if job.config.storage.persists_dense else k_persist
    return Footprint(
        share=_share(job, options, sizes),
        checkpoint_bytes=sizes.plan_workload(largest).total_bytes,
        num_older=math.ceil(num_experts / k_persist) - 1 + job.config.storage.keeps_whole,
    )


def _share(job: PlannedJob, options: PartialConfig, sizes: PartialSizes) -> MemoryShare:
    share = sizes.memory_share(options.k_in_memory)
    gradient_bytes = job.gradient_bytes(has_experts=False)
    return replace(share, breakpoint_bytes=job.breakpoint_bytes, gradient_bytes=gradient_bytes)


def _plan(job: PlannedJob, options: PartialConfig, build: Build) -> PartialPlan:
    sizes = PartialSizes(job, options, build)
    k_snapshot = _read_k(job, options, sizes)
    return PartialPlan(
        job=job,
        options=options,
        build=build,
        sizes=sizes,
        k_by_target={"snapshot": k_snapshot, "persist": min(k_snapshot, options.k_persist)},
    )


def _read_k(job: PlannedJob, options: PartialConfig, sizes: PartialSizes) -> int:
    """Return k of snapshots, an automatic one as training would choose it."""
    if options.k_in_memory is not None:
        return options.k_in_memory
    if job.measured.budget_bytes is None:
        raise ConfigError(
            "--moe-ft-k-snapshot=auto needs --iteration-s and --bandwidth: k is the number of experts that "
            "can be copied in an iteration. Give them before the --, or plan with 1 to "
            f"{job.model.num_experts}."
        )
    return sizes.automatic_k(job.measured.budget_bytes)


def _simplifications(job: PlannedJob, options: PartialConfig) -> list[str]:
    """Return lines on settings that are planned as if they were others."""
    lines = []
    if job.model.is_grouped:
        lines.append("grouped GEMM: slices are planned as if every expert were a module of its own")
    if options.selection != "sequential":
        lines.append(f"selection {options.selection}: planned as if it were sequential")
    return lines


def _adaptive_advice(plan: PartialPlan) -> list[str]:
    """Return lines on how much lighter adaptive sharding would make the heaviest rank."""
    if plan.job.is_optimizer_distributed or plan.job.config.strategy.sharding == "adaptive":
        return []
    lines = []
    for target, k in plan.k_by_target.items():
        now = plan.workload(k).bottleneck_bytes
        saved = reduction(plan.workload(k, "adaptive").bottleneck_bytes, now)
        if saved >= 0.001:
            lines.append(
                f"{target}: --moe-ft-sharding adaptive makes the heaviest rank {saved:.1%} lighter"
            )
    return lines


def _size_table(plan: PartialPlan) -> str:
    """Return sizes at both levels and of full checkpoints, with this sharding and without."""
    num_experts = plan.job.model.num_experts
    full = plan.workload(num_experts)
    checkpoints = [(name, k, plan.workload(k)) for name, k in plan.k_by_target.items()]
    checkpoints.append(("full", num_experts, full))
    if not plan.job.is_optimizer_distributed:
        baseline = plan.workload(num_experts, "none")
        checkpoints.append(("full, sharding none", num_experts, baseline))
    headers = (
        "checkpoint",
        "k",
        "total, MB",
        "of full",
        "bottleneck, MB",
        "its rank",
        "times the mean",
        "less than full",
    )
    rows = [
        (
            name,
            k,
            megabytes(workload.total_bytes),
            f"{workload.total_bytes / full.total_bytes:.1%}",
            megabytes(workload.bottleneck_bytes),
            workload.bottleneck_rank,
            f"{workload.bottleneck_bytes * plan.job.num_ranks / workload.total_bytes:.2f}",
            f"{reduction(workload.bottleneck_bytes, full.bottleneck_bytes):.1%}",
        )
        for name, k, workload in checkpoints
    ]
    return table(rows, headers)


def _rank_table(plan: PartialPlan) -> str:
    """Return what each rank saves, or the spread where there are many."""
    targets = list(plan.k_by_target)
    workloads = [plan.workload(k) for k in plan.k_by_target.values()]
    columns = [
        column
        for workload in workloads
        for column in (workload.mean_by_rank(), workload.most_by_rank())
    ]
    headers = [
        "rank" if plan.job.num_ranks <= _MAX_RANK_ROWS else "over ranks",
        *(f"{target}, {what}, MB" for target in targets for what in ("mean", "most")),
    ]
    if plan.job.num_ranks <= _MAX_RANK_ROWS:
        rows = [
            (rank, *(megabytes(value) for value in values))
            for rank, values in enumerate(zip(*columns, strict=True))
        ]
        return table(rows, headers)
    spread: Mapping[str, Callable[[Sequence[float]], float]] = {
        "least": min,
        "mean": lambda column: sum(column) / len(column),
        "most": max,
    }
    return table(
        [(name, *(megabytes(f(column)) for column in columns)) for name, f in spread.items()],
        headers,
    )


def _memory(plan: PartialPlan) -> str:
    """Return host memory: with this k, with one that may become all experts, and of dense snapshots."""
    k = plan.k_by_target["snapshot"]
    shares = {
        f"k {k}": plan.sizes.memory_share(k),
        "k auto, or Dynamic-K": plan.sizes.memory_share(None),
        "dense": MemoryShare(region_bytes=plan.job.heaviest.full_bytes),
    }
    alike = {
        "breakpoint_bytes": plan.job.breakpoint_bytes,
        "index_bytes": plan.job.index_bytes(),
    }
    shares = {name: replace(share, **alike) for name, share in shares.items()}
    return memory_table(plan.job, shares)


def _limits(plan: PartialPlan) -> list[str]:
    """Return the limits that bandwidths set, if they were given."""
    measured = plan.job.measured
    if measured.iteration_s is None:
        return []
    lines = []
    if measured.bandwidth is not None:
        most = plan.workload(plan.k_by_target["snapshot"]).bottleneck_bytes
        lines = _describe_copy(
            plan, most / measured.bandwidth, measured.bandwidth * measured.hidden_s
        )
    most = plan.workload(plan.k_by_target["persist"]).bottleneck_bytes
    planned = plan.interval * plan.job.persist_interval
    lines += persist_line(plan.job, most, period_s=measured.iteration_s, planned=planned)
    return ["\n".join(lines)] if lines else []


def _describe_copy(plan: PartialPlan, copy_s: float, budget_bytes: float) -> list[str]:
    """Return whether a snapshot stays hidden, and the largest that does."""
    hidden_s = plan.job.measured.hidden_s
    largest = largest_hidden_k(plan.workload, plan.job.model.num_experts, budget_bytes)
    lines = [
        f"snapshot: {copy_s:.3f} s, hidden behind {hidden_s:.3f} s of forward and backward; stall "
        f"{max(0.0, copy_s - hidden_s):.3f} s",
        f"largest k-snapshot that stays hidden: {largest or 'none, not even 1'}",
    ]
    automatic = plan.sizes.automatic_k(budget_bytes)
    if automatic != max(1, largest):
        lines.append(
            f"auto takes {automatic}: it allows for one rank having every selected expert that its "
            "expert-parallel rank holds"
        )
    return lines


def _losses(plan: PartialPlan) -> list[str]:
    """Return what a fault loses with sequential selection and uniform routing."""
    num_experts, num_iterations = plan.job.model.num_experts, plan.job.train_iterations
    k_snapshot, k_persist = plan.k_by_target.values()
    persist_interval, storage = plan.interval * plan.job.persist_interval, plan.job.config.storage
    if storage.persists_dense and not storage.persist_interval:
        k_persist, persist_interval = num_experts, storage.persist_dense_interval
    rows, tiers = [], [("memory (no node lost)", k_snapshot, plan.interval)]
    if persist_interval < math.inf:
        tiers.append(("storage (all nodes lost)", k_persist, int(persist_interval)))
    for name, k, interval in tiers:
        # Tokens of an iteration as the unit, and so iterations as the unit of what is lost.
        row = [name, f"{expected_plt(num_experts, k, interval, 1, 1):.2f}"]
        if num_iterations:
            row.append(f"{expected_plt(num_experts, k, interval, 1, num_iterations):.4%}")
        rows.append(row)
    headers = ["a fault that recovers from", "loses tokens of iterations", "PLT"]
    return [table(rows, headers[: len(rows[0])])]
