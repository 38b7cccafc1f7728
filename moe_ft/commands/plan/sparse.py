"""The plan of sparse windows (MoEvement): the window, what its snapshots take, what a fault costs.

Its flags are sparse_flags.py; what is calculated, planning/sparse_size.py and sparse_cost.py.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from tabulate import tabulate

from moe_ft.commands.plan.memory import memory_table
from moe_ft.commands.plan.persist import persist_line
from moe_ft.commands.plan.sparse_flags import SparsePlan, read_plan
from moe_ft.planning.host_memory import MemoryShare
from moe_ft.strategies.partial.size import reduction
from moe_ft.strategies.sparse.cost import Machine, ettr, expect_recovery, work_to_redo
from moe_ft.strategies.sparse.size import (
    WindowSize,
)

_MOST_SNAPSHOT_ROWS = 16


def render_sparse(options: argparse.Namespace) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: if the flags do not fit together.
    """
    plan = read_plan(options)
    window, order = plan.choose_window()
    parts = [
        _describe(plan),
        "\n".join((_describe_window(plan, window), *_warn_of_length(plan))),
        _snapshot_table(window),
        _memory_table(plan, window),
        *_storage(plan, window),
        *_recovery(plan, window, order),
    ]
    return "\n\n".join(parts)


def _describe(plan: SparsePlan) -> str:
    shape, layout = plan.shape, plan.layout
    experts = (
        f", of which {_count(shape.num_expert_parameters)} in {shape.num_experts} experts of each of "
        f"{shape.num_moe_layers} MoE layers ({_count(shape.expert_parameters)} each)"
        if shape.num_moe_layers
        else ", no experts"
    )
    optimizer = "distributed" if layout.is_optimizer_distributed else "on every rank"
    grouped = (
        "\ngrouped GEMM: a rank's experts of a layer freeze together, so they are saved together"
        if plan.is_grouped
        else ""
    )
    drawn = (
        f"\nwho owns which expert matters: of {plan.num_orders} orders of popularity, drawn at random, the "
        "one with the largest snapshot"
        if plan.num_orders > 1
        else ""
    )
    return (
        f"{_count(shape.num_parameters)} parameters{experts}\n"
        f"pp {plan.num_stages}, dp {layout.dp}, ep {layout.ep}; sharding {layout.sharding}; optimizer "
        f"{optimizer}; {plan.byte_model.optimizer} bytes per parameter at FULL, "
        f"{plan.byte_model.weights} at COMPUTE{grouped}{drawn}"
    )


def _describe_window(plan: SparsePlan, window: WindowSize) -> str:
    """Return how long the window is and why, whether it fits, and what it costs if it does not."""
    machine, length = plan.machine, window.length
    if machine is None:
        return f"window {length}, as given"
    budget = machine.budget_bytes
    copied = machine.hidden_s * machine.bandwidth
    peers = "peer" if machine.replication_factor == 1 else "peers"
    way = (
        "copied to the host"
        if copied <= budget
        else f"sent to {machine.replication_factor} {peers}"
    )
    fits = window.largest_bytes <= budget
    if plan.window is not None:
        why = "as given"
    elif fits:
        why = "the shortest whose snapshots fit"
    else:
        why = "the longest that is allowed: none fits"
    lines = [
        f"window {length}, {why}",
        f"budget of a snapshot: {_megabytes(budget)} MB can be {way} in an iteration; the largest has "
        f"{_megabytes(window.largest_bytes)} MB and {'fits' if fits else 'does NOT fit'}",
    ]
    stalls_s = machine.stalls_s(window.snapshots)
    lines.append(
        f"stall: {sum(stalls_s) / length:.3f} s per iteration, {max(stalls_s):.3f} s at most; expected "
        f"overhead {machine.overhead(window.snapshots):.2%}"
    )
    if lag := machine.lag_iterations(window.snapshots):
        lines.append(
            f"replicas of a window's last snapshot are complete {lag} "
            f"{'iteration' if lag == 1 else 'iterations'} late: a window every {length + lag} iterations"
        )
    return "\n".join(lines)


def _warn_of_length(plan: SparsePlan) -> list[str]:
    """Return a warning if a window is longer than there is state to divide over its snapshots."""
    num_units = max(stage.num_positions for stage in plan.stages())
    if plan.window is None or plan.window <= num_units:
        return []
    return [
        f"warning: --window={plan.window} is more than the {num_units} units that a rank holds: snapshots "
        "without a unit save nothing and make every recovery longer. Give at most "
        f"{num_units}, or auto."
    ]


def _snapshot_table(window: WindowSize) -> str:
    """Return the snapshots of the ranks that save the most, beside a dense one."""
    rows: list[tuple[str, float]] = [
        ("first", window.snapshots[0]),
        ("largest", window.largest_bytes),
        ("mean", window.mean_bytes),
    ]
    if 1 < window.length <= _MOST_SNAPSHOT_ROWS:
        rows += [(f"{number}", size) for number, size in enumerate(window.snapshots, 1)]
    dense = window.dense_bytes
    cells = [(name, _megabytes(size), f"{reduction(size, dense):.1%}") for name, size in rows]
    headers = ("snapshot, heaviest rank", "MB", "less than dense")
    return _table([*cells, ("dense", _megabytes(dense), "")], headers)


def _memory_table(plan: SparsePlan, window: WindowSize) -> str:
    """Return the host memory of the rank that needs the most, and of a node of such ranks."""
    regions = {
        f"windows of {window.length}": window.window_bytes,
        "reserved": plan.reserve(),
        "dense": window.dense_bytes,
    }
    return memory_table(
        {name: MemoryShare(region_bytes=size) for name, size in regions.items()},
        window.dense_bytes / plan.byte_model.optimizer,
        persists=plan.persists,
        replication_factor=plan.replication_factor,
        num_ranks=min(plan.ranks_per_node, plan.layout.dp * plan.num_stages),
    )


def _storage(plan: SparsePlan, window: WindowSize) -> list[str]:
    """Return how often windows can go to storage, if a bandwidth was given."""
    schedule, machine = plan.schedule, plan.machine
    if schedule.storage_bandwidth is None or schedule.iteration_s is None:
        return []
    lag = machine.lag_iterations(window.snapshots) if machine else 0
    return [
        persist_line(
            window.window_bytes,
            bandwidth=schedule.storage_bandwidth,
            period_s=schedule.iteration_s * (window.length + lag),
            planned=schedule.persist_interval,
            unit="windows",
        )
    ]


def _recovery(plan: SparsePlan, window: WindowSize, order: int) -> list[str]:
    """Return what a failure costs and, if failures are known, what is left of the training time."""
    machine = plan.machine
    if machine is None:
        return []
    recovery = expect_recovery(window, machine, plan.works(order), plan.restart_s)
    least, mean, most = work_to_redo(window.length, machine.lag_iterations(window.snapshots))
    replays = window.length - 1
    rows = [
        ("restart", "", recovery.restart_s),
        ("restore", f"{_megabytes(window.window_bytes)} MB", recovery.restore_s),
        (
            "conversion",
            f"{replays} {'replay' if replays == 1 else 'replays'}",
            recovery.conversion_s,
        ),
        ("work to redo", f"{mean - replays:.1f} iterations", recovery.redo_s),
        ("E[R]", "", recovery.expected_s),
    ]
    cells = [(name, what, f"{seconds:.2f}") for name, what, seconds in rows]
    lines = [
        f"iterations that run again, conversion included: {least} to {most}, {mean:.1f} on average; "
        f"frozen units save {recovery.frozen_s:.3f} s of the conversion at best"
        f"{_other_saving(plan, machine, window.length)}"
    ]
    if plan.mtbf_s is not None:
        overhead = machine.overhead(window.snapshots)
        ratio = ettr(overhead, recovery.expected_s, plan.mtbf_s)
        lines.append(
            f"a failure every {plan.mtbf_s:g} s: {ratio:.4f} of the time is training (ETTR), with an "
            f"overhead of {overhead:.2%}"
        )
    return [_table(cells, ("recovery", "", "s")), "\n".join(lines)]


def _other_saving(plan: SparsePlan, machine: Machine, length: int) -> str:
    """Return what frozen units save if experts freeze the other way, where that makes a difference."""
    if plan.shape.num_experts == plan.layout.ep or not plan.shape.num_moe_layers:
        return ""
    other = replace(plan, is_grouped=not plan.is_grouped, window=length)
    window, order = other.choose_window()
    recovery = expect_recovery(window, machine, other.works(order), plan.restart_s)
    way = "with" if other.is_grouped else "without"
    return (
        f", {recovery.frozen_s:.3f} s {way} grouped GEMM (largest snapshot "
        f"{_megabytes(window.largest_bytes)} MB)"
    )


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers, "github", disable_numparse=True)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _count(number: int) -> str:
    return f"{number / 1e9:.3f}e9" if number >= 1e9 else f"{number / 1e6:.1f}e6"
