"""The plan of partial experts (MoC-System): bytes by rank, what hides behind training, what a fault loses."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tabulate import tabulate

from moe_ft.errors import ConfigError
from moe_ft.plan_command.flags import (
    Schedule,
    read_byte_model,
    read_layout,
    read_schedule,
    read_shape,
)
from moe_ft.planning.lost_tokens import expected_plt
from moe_ft.planning.model_size import ByteModel, ModelShape
from moe_ft.planning.partial_size import (
    SavingLayout,
    Sharding,
    Workload,
    is_imbalanced,
    largest_hidden_k,
    plan_workload,
    reduction,
    smallest_interval,
)

_MAX_RANK_ROWS = 16


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
        "--master-always-full",
        action="store_true",
        help="save the master weights of all experts, as the measurements of MoC-System imply",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartialPlan:
    """What was asked about partial experts, checked."""

    shape: ModelShape
    layout: SavingLayout
    byte_model: ByteModel
    schedule: Schedule
    k_by_target: Mapping[str, int]  # "snapshot", "persist"

    def workload(self, k: int, sharding: Sharding | None = None) -> Workload:
        """Return what every rank saves."""
        layout = self.layout if sharding is None else replace(self.layout, sharding=sharding)
        return plan_workload(self.shape, k, self.byte_model, layout)


def render_partial(options: argparse.Namespace) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: if the flags do not fit together.
    """
    shape = read_shape(options)
    layout = read_layout(options, shape)
    byte_model = replace(read_byte_model(options), master_always_full=options.master_always_full)
    k_snapshot, k_persist = _check_k(options, shape.num_experts)
    plan = PartialPlan(
        shape=shape,
        layout=layout,
        byte_model=byte_model,
        schedule=read_schedule(options),
        k_by_target={"snapshot": k_snapshot, "persist": k_persist},
    )
    parts = [_describe(plan), _size_table(plan), _rank_table(plan), *_limits(plan), *_losses(plan)]
    return "\n\n".join(parts)


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
    shape, layout = plan.shape, plan.layout
    lines = [
        f"{_count(shape.num_parameters)} parameters, of which {_count(shape.num_expert_parameters)} "
        f"in {shape.num_experts} experts of each of {shape.num_moe_layers} MoE layers "
        f"({_count(shape.expert_parameters)} each)",
        f"dp {layout.dp}, ep {layout.ep}: {layout.num_groups} "
        f"{'rank holds' if layout.num_groups == 1 else 'ranks hold'} each expert; "
        f"sharding {layout.sharding}; optimizer "
        f"{'distributed' if layout.is_optimizer_distributed else 'on every rank'}",
    ]
    if layout.sharding is Sharding.EQUAL:
        for target, k in plan.k_by_target.items():
            if is_imbalanced(shape, k, layout):
                lines.append(
                    f"{target}: {k} x {shape.num_moe_layers} experts are not the same number for "
                    "every rank; --sharding adaptive evens that out"
                )
    return "\n".join(lines)


def _size_table(plan: PartialPlan) -> str:
    """Return sizes at both levels beside those of full checkpoints, with this sharding and without."""
    num_experts = plan.shape.num_experts
    full, baseline = plan.workload(num_experts), plan.workload(num_experts, Sharding.NONE)
    checkpoints = [(name, k, plan.workload(k)) for name, k in plan.k_by_target.items()]
    checkpoints += [("full", num_experts, full), ("full, sharding none", num_experts, baseline)]
    headers = (
        "checkpoint",
        "k",
        "total, MB",
        "of full",
        "bottleneck, MB",
        "its rank",
        "less than full, sharding none",
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
            f"{reduction(workload.bottleneck_bytes, baseline.bottleneck_bytes):.1%}",
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
        "rank" if plan.layout.dp <= _MAX_RANK_ROWS else "over ranks",
        *(f"{target}, {what}, MB" for target in targets for what in ("mean", "most")),
    ]
    if plan.layout.dp <= _MAX_RANK_ROWS:
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


def _limits(plan: PartialPlan) -> list[str]:
    """Return what bandwidths allow, if they were given."""
    schedule, lines = plan.schedule, []
    if schedule.iteration_s is None or schedule.hidden_s is None:
        return []
    if schedule.bandwidth:
        k = plan.k_by_target["snapshot"]
        copy_s = plan.workload(k).bottleneck_bytes / schedule.bandwidth
        largest = largest_hidden_k(
            plan.shape,
            plan.byte_model,
            plan.layout,
            bandwidth_bytes_per_s=schedule.bandwidth,
            hidden_s=schedule.hidden_s,
        )
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
    if schedule.storage_bandwidth:
        most = plan.workload(plan.k_by_target["persist"]).bottleneck_bytes
        interval = smallest_interval(
            most,
            bandwidth_bytes_per_s=schedule.storage_bandwidth,
            iteration_s=schedule.iteration_s,
        )
        taken = schedule.interval * schedule.persist_interval
        verdict = "is enough" if taken >= interval else "is too short: persists will be skipped"
        lines.append(
            f"persist: {most / schedule.storage_bandwidth:.3f} s; smallest interval "
            f"{interval} iterations; the one planned, {taken}, {verdict}"
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


def _count(number: int) -> str:
    return f"{number / 1e9:.3f}e9" if number >= 1e9 else f"{number / 1e6:.1f}e6"
