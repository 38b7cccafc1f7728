"""The plan of partial experts (MoC-System): bytes by rank, what hides behind training, what a fault loses."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from moe_ft.commands.plan.flags import Schedule, read_replication, read_schedule, refuse_foreign
from moe_ft.commands.plan.memory import memory_table
from moe_ft.commands.plan.persist import persist_line
from moe_ft.commands.plan.saved_model import describe_model, read_model
from moe_ft.errors import ConfigError
from moe_ft.planning.host_memory import MemoryShare
from moe_ft.planning.lost_tokens import expected_plt
from moe_ft.planning.model_size import ModelShape
from moe_ft.planning.ownership import SavingLayout, Sharding
from moe_ft.strategies.partial.size import (
    SavedModel,
    Workload,
    largest_hidden_k,
    reduction,
)

_MAX_RANK_ROWS = 16

# Flags of other strategies: name, the value it has if it was left out, the reason.
_FOREIGN = (
    ("window", "auto", "a snapshot holds what the next recovery needs"),
    ("max_window", 8, "a snapshot holds what the next recovery needs"),
    ("network_bandwidth", None, "what sending replicas takes is not planned"),
    ("moe_router_topk", 2, "nothing is run again"),
    ("mtbf_s", None, "what a recovery takes is not planned"),
    ("restart_s", 0.0, "what a recovery takes is not planned"),
    ("weight_bytes", None, "snapshots hold master weights and moments, not the weights of forward"),
)


def add_partial_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only this strategy has."""
    group = parser.add_argument_group("strategy partial")
    group.add_argument(
        "--k-snapshot", type=int, metavar="K", help="experts per MoE layer copied to host memory"
    )
    group.add_argument(
        "--k-persist", type=int, metavar="K", help="of those, written to storage (default: all)"
    )
    group.add_argument(
        "--partial-covers",
        choices=("weights", "optimizer", "both"),
        default="both",
        help="what of an expert is saved only when it is selected: its master weights, its moments, "
        "or both (default)",
    )
    group.add_argument(
        "--master-always-full",
        action="store_true",
        help="save the master weights of all experts, as the measurements of MoC-System imply",
    )
    group.add_argument(
        "--overlap-grad-reduce",
        action="store_true",
        help="Megatron's: the first stage's buffers have buckets, each of which all ranks share",
    )
    group.add_argument(
        "--ddp-bucket-size",
        type=int,
        metavar="N",
        help="parameters of a bucket (default Megatron's: 40e6, or 1e6 for each data-parallel rank)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPlan:
    """What was asked about partial experts, checked."""

    model: SavedModel
    schedule: Schedule
    k_by_target: Mapping[str, int]  # "snapshot", "persist"
    persists: bool
    ranks_per_node: int
    replication_factor: int

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.model.shape

    @property
    def layout(self) -> SavingLayout:
        """The ranks of a stage."""
        return self.model.layout

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.layout.dp * len(self.model.stages)

    def workload(self, k: int, sharding: Sharding | None = None) -> Workload:
        """Return what every rank saves."""
        if sharding is None:
            return self.model.plan_workload(k)
        layout = replace(self.layout, sharding=sharding)
        return replace(self.model, layout=layout).plan_workload(k)


def render_partial(options: argparse.Namespace) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: if the flags do not fit together.
    """
    refuse_foreign(options, "partial", _FOREIGN)
    model = read_model(options)
    k_snapshot, k_persist = _check_k(options, model.shape.num_experts)
    schedule = read_schedule(options)
    plan = PartialPlan(
        model=model,
        schedule=schedule,
        k_by_target={"snapshot": k_snapshot, "persist": k_persist},
        persists=options.storage or schedule.storage_bandwidth is not None,
        ranks_per_node=options.ranks_per_node,
        replication_factor=read_replication(options),
    )
    parts = [_describe(plan), _size_table(plan), _rank_table(plan), _memory(plan)]
    return "\n\n".join([*parts, *_limits(plan), *_losses(plan)])


def _check_k(options: argparse.Namespace, num_experts: int) -> tuple[int, int]:
    """Return k of snapshots and of persists."""
    if options.k_snapshot is None:
        raise ConfigError(
            "--k-snapshot not given: --strategy=partial needs the experts per MoE layer that a "
            f"snapshot holds. Give 1 to {num_experts}."
        )
    k_snapshot = options.k_snapshot
    k_persist = k_snapshot if options.k_persist is None else options.k_persist
    if not 1 <= k_persist <= k_snapshot <= num_experts:
        raise ConfigError(
            f"--k-persist={k_persist} and --k-snapshot={k_snapshot} must satisfy 1 <= k-persist <= "
            f"k-snapshot <= num-experts={num_experts}: storage is fed from what snapshots hold. Lower "
            "--k-persist or raise --k-snapshot, up to the experts of a layer."
        )
    return k_snapshot, k_persist


def _describe(plan: PartialPlan) -> str:
    return "\n".join([describe_model(plan.model), *_adaptive_advice(plan)])


def _adaptive_advice(plan: PartialPlan) -> list[str]:
    """Return what adaptive sharding would do for the heaviest rank."""
    if plan.layout.is_optimizer_distributed or plan.layout.sharding is Sharding.ADAPTIVE:
        return []
    lines = []
    for target, k in plan.k_by_target.items():
        now = plan.workload(k).bottleneck_bytes
        saved = reduction(plan.workload(k, Sharding.ADAPTIVE).bottleneck_bytes, now)
        if saved >= 0.001:
            lines.append(
                f"{target}: --sharding adaptive makes the heaviest rank {saved:.1%} lighter"
            )
    return lines


def _size_table(plan: PartialPlan) -> str:
    """Return sizes at both levels alongside those of full checkpoints, with this sharding and without."""
    num_experts = plan.shape.num_experts
    full = plan.workload(num_experts)
    checkpoints = [(name, k, plan.workload(k)) for name, k in plan.k_by_target.items()]
    checkpoints.append(("full", num_experts, full))
    if not plan.layout.is_optimizer_distributed:
        baseline = plan.workload(num_experts, Sharding.NONE)
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
            _megabytes(workload.total_bytes),
            f"{workload.total_bytes / full.total_bytes:.1%}",
            _megabytes(workload.bottleneck_bytes),
            workload.bottleneck_rank,
            f"{workload.bottleneck_bytes * plan.num_ranks / workload.total_bytes:.2f}",
            f"{reduction(workload.bottleneck_bytes, full.bottleneck_bytes):.1%}",
        )
        for name, k, workload in checkpoints
    ]
    return _table(rows, headers)


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
        "rank" if plan.num_ranks <= _MAX_RANK_ROWS else "over ranks",
        *(f"{target}, {what}, MB" for target in targets for what in ("mean", "most")),
    ]
    if plan.num_ranks <= _MAX_RANK_ROWS:
        rows = [
            (rank, *(_megabytes(value) for value in values))
            for rank, values in enumerate(zip(*columns, strict=True))
        ]
        return _table(rows, headers)
    spread: Mapping[str, Callable[[Sequence[float]], float]] = {
        "least": min,
        "mean": lambda column: sum(column) / len(column),
        "most": max,
    }
    return _table(
        [(name, *(_megabytes(f(column)) for column in columns)) for name, f in spread.items()],
        headers,
    )


def _memory(plan: PartialPlan) -> str:
    """Return host memory, also if k may become all experts, alongside that of dense snapshots."""
    dense_bytes = plan.workload(plan.shape.num_experts).bottleneck_bytes
    k = plan.k_by_target["snapshot"]
    shares = {
        f"k {k}": plan.model.memory_share(k),
        "k auto, or Dynamic-K": plan.model.memory_share(None),
        "dense": MemoryShare(region_bytes=dense_bytes),
    }
    return memory_table(
        shares,
        dense_bytes / plan.model.byte_model.optimizer,
        persists=plan.persists,
        replication_factor=plan.replication_factor,
        num_ranks=min(plan.ranks_per_node, plan.num_ranks),
    )


def _limits(plan: PartialPlan) -> list[str]:
    """Return what bandwidths allow, if they were given."""
    schedule, lines = plan.schedule, []
    if schedule.iteration_s is None or schedule.hidden_s is None:
        return []
    if schedule.bandwidth:
        k = plan.k_by_target["snapshot"]
        copy_s = plan.workload(k).bottleneck_bytes / schedule.bandwidth
        largest = largest_hidden_k(
            plan.workload,
            plan.shape.num_experts,
            bandwidth_bytes_per_s=schedule.bandwidth,
            hidden_s=schedule.hidden_s,
        )
        automatic = plan.model.automatic_k(schedule.bandwidth * schedule.hidden_s)
        stall_s = max(0.0, copy_s - schedule.hidden_s)
        lines.append(
            f"snapshot: {copy_s:.3f} s, hidden behind {schedule.hidden_s:.3f} s of forward and "
            f"backward; stall {stall_s:.3f} s"
        )
        lines.append(
            f"largest k-snapshot that stays hidden: {largest}"
            if largest
            else "largest k-snapshot that stays hidden: none, not even 1"
        )
        if automatic != max(1, largest):
            lines.append(
                f"auto takes {automatic}: it allows for one rank having every selected expert that its "
                "expert-parallel rank holds"
            )
    if schedule.storage_bandwidth:
        most = plan.workload(plan.k_by_target["persist"]).bottleneck_bytes
        lines.append(
            persist_line(
                most,
                bandwidth=schedule.storage_bandwidth,
                period_s=schedule.iteration_s,
                planned=schedule.interval * schedule.persist_interval,
                unit="iterations",
            )
        )
    return ["\n".join(lines)] if lines else []


def _losses(plan: PartialPlan) -> list[str]:
    """Return what a fault loses with sequential selection and uniform routing."""
    schedule, num_experts = plan.schedule, plan.shape.num_experts
    k_snapshot, k_persist = plan.k_by_target.values()
    rows = []
    for name, k, interval in (
        ("memory (no node lost)", k_snapshot, schedule.interval),
        ("storage (all nodes lost)", k_persist, schedule.interval * schedule.persist_interval),
    ):
        # Tokens of an iteration as the unit, and so iterations as the unit of what is lost.
        row = [name, f"{expected_plt(num_experts, k, interval, 1, 1):.2f}"]
        if schedule.train_iters:
            row.append(f"{expected_plt(num_experts, k, interval, 1, schedule.train_iters):.4%}")
        rows.append(row)
    headers = ["a fault that recovers from", "loses tokens of iterations", "PLT"]
    return [_table(rows, headers[: len(rows[0])])]


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, "github", disable_numparse=True)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"
