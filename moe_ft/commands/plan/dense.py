"""The plan of dense checkpoints: bytes by rank, the wait for a snapshot, host memory."""

import argparse

from moe_ft.commands.plan.flags import Schedule, read_replication, read_schedule, refuse_foreign
from moe_ft.commands.plan.memory import memory_table
from moe_ft.commands.plan.persist import persist_line
from moe_ft.commands.plan.saved_model import describe_model, read_model
from moe_ft.planning.host_memory import MemoryShare

_ALL = "a snapshot holds everything"

# Flags of other strategies: name, the value it has if it was left out, the reason.
_FOREIGN = (
    ("k_snapshot", None, _ALL),
    ("k_persist", None, _ALL),
    ("partial_covers", "both", _ALL),
    ("master_always_full", False, _ALL),
    ("window", "auto", _ALL),
    ("max_window", 8, _ALL),
    ("network_bandwidth", None, "what sending replicas takes is not planned"),
    ("moe_router_topk", 2, "nothing is run again"),
    ("mtbf_s", None, "what a recovery takes is not planned"),
    ("restart_s", 0.0, "what a recovery takes is not planned"),
    ("weight_bytes", None, "snapshots hold master weights and moments, not the weights of forward"),
)


def render_dense(options: argparse.Namespace) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: if the flags do not fit together.
    """
    refuse_foreign(options, "dense", _FOREIGN)
    model = read_model(options, least_moe_layers=0)
    schedule = read_schedule(options)
    workload = model.plan_workload(model.shape.num_experts)
    most = workload.bottleneck_bytes
    num_ranks = model.layout.dp * len(model.stages)
    size = (
        f"snapshot: {workload.total_bytes / 1e6:,.1f} MB in all, {most / 1e6:,.1f} MB of rank "
        f"{workload.bottleneck_rank}, which has the most"
    )
    memory = memory_table(
        {"dense": MemoryShare(region_bytes=most)},
        most / model.byte_model.optimizer,
        persists=options.storage or schedule.storage_bandwidth is not None,
        replication_factor=read_replication(options),
        num_ranks=min(options.ranks_per_node, num_ranks),
    )
    lines = "\n".join([size, *_limits(schedule, most)])
    return "\n\n".join([describe_model(model), lines, memory])


def _limits(schedule: Schedule, most_bytes: int) -> list[str]:
    """Return what bandwidths allow, if they were given."""
    lines = []
    if schedule.iteration_s is None or schedule.hidden_s is None:
        return []
    if schedule.bandwidth:
        copy_s = most_bytes / schedule.bandwidth
        stall_s = max(0.0, copy_s - schedule.hidden_s)
        overhead = stall_s / (schedule.interval * schedule.iteration_s)
        lines.append(
            f"copied in {copy_s:.3f} s, alongside {schedule.hidden_s:.3f} s of forward and backward; stall "
            f"{stall_s:.3f} s, {overhead:.1%} of the time with --interval {schedule.interval}"
        )
    if schedule.storage_bandwidth:
        lines.append(
            persist_line(
                most_bytes,
                bandwidth=schedule.storage_bandwidth,
                period_s=schedule.iteration_s,
                planned=schedule.interval * schedule.persist_interval,
                unit="iterations",
            )
        )
    return lines
