"""The plan of sparse windows (MoEvement): the window, its snapshots, the cost of a failure.

size.py calculates them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.job_costs import (
    Saved,
    costs_of,
    known_machine,
    needed_machine,
    places,
    storage_flags,
)
from moe_ft.planning.machine import Machine
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import (
    describe_layout,
    describe_model,
    ettr_line,
    megabytes,
    memory_table,
    persist_line,
    recovery_table,
    reduction,
    whole_line,
)
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.positions import StageOrder
from moe_ft.strategies.sparse.size import (
    WindowSize,
    choose_length,
    frozen_s,
    measure_window,
    order_stage,
    position_work,
    region_bytes,
    work_to_redo,
)
from moe_ft.strategies.sparse.strategy import MEMORY_MARGIN
from moe_ft.strategies.sparse.windows import PositionSizes
from moe_ft.tables import table

_NUM_ORDERS = 4
_MOST_SNAPSHOT_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePlan:
    """The job and what follows from the options of the strategy.

    Attributes:
        window: None for automatic.
        machine: None if no bandwidth was given.
        is_grouped: whether the experts of a layer on a rank freeze together.
    """

    job: PlannedJob
    options: SparseConfig
    window: int | None
    machine: Machine | None
    is_grouped: bool

    @property
    def num_orders(self) -> int:
        """Orders of the experts that are tried: with one owner of each it makes no difference."""
        has_experts = self.job.model.num_moe_layers > 0
        return _NUM_ORDERS if has_experts and self.job.num_expert_owners > 1 else 1

    def _orders(self, seed: int) -> list[StageOrder]:
        num_experts = self.job.model.num_experts
        return [
            order_stage(stage, num_experts, seed, is_grouped=self.is_grouped)
            for stage in self.job.stages
        ]

    def stages(self, seed: int = 0) -> list[PositionSizes]:
        """Return ``[stage]`` what ranks save in an order of popularity; training begins with that of 0."""
        return [order.sizes for order in self._orders(seed)]

    def works(self, seed: int = 0) -> list[npt.NDArray[np.float64]]:
        """Return ``[stage][position]`` the work that freezes there, in the same order."""
        share = self.job.model.active_share
        return [
            position_work(order, stage.elements, share, is_grouped=self.is_grouped)
            for order, stage in zip(self._orders(seed), self.job.stages, strict=True)
        ]

    def choose_window(self) -> tuple[WindowSize, int]:
        """Return the window, and the order of popularity whose largest snapshot is the largest.

        Which experts will be popular has nothing to do with who owns them: orders are drawn.
        """
        orders = [self.stages(seed) for seed in range(self.num_orders)]
        length = self.window
        if length is None:
            if self.machine is None:
                raise ConfigError(
                    "--moe-ft-window=auto needs --iteration-s and --bandwidth: it is the shortest window "
                    "whose snapshots can be copied in an iteration. Give them before the --, or a number "
                    "with --moe-ft-window."
                )
            budget = self.machine.budget_bytes
            length = max(
                choose_length(stages, budget, self.options.max_window) for stages in orders
            )
        windows = [measure_window(stages, length) for stages in orders]
        seed = max(range(self.num_orders), key=lambda number: windows[number].largest_bytes)
        return windows[seed], seed

    def reserve(self) -> int:
        """Return the bytes of a region of the rank that needs the most."""
        return region_bytes(
            self.stages(),
            self.window or self.options.max_window,
            MEMORY_MARGIN,
            shortest=self.window or 1,
        )


def render(job: PlannedJob, options: SparseConfig) -> str:
    """Return the plan as text.

    Raises:
        ConfigError: if flags do not fit together.
    """
    if known_machine(job) is not None or job.measured.mtbf_s is not None:
        needed_machine(job)
    plan = _plan(job, options)
    window, order = plan.choose_window()
    parts = [
        _describe(plan),
        "\n".join((_describe_window(plan, window), *_warn_of_length(plan))),
        _snapshot_table(window),
        _memory(plan, window),
        *_storage(plan, window),
        *whole_line(job, window.dense_bytes),
        *_recovery(plan, window, order),
    ]
    return "\n\n".join(parts)


def costs(job: PlannedJob, options: SparseConfig) -> Costs:
    """Return what sparse windows cost a job. What frozen units save is left out."""
    needed_machine(job)
    plan = _plan(job, options)
    return _costs(plan, plan.choose_window()[0])


def choices(job: PlannedJob, options: SparseConfig) -> Mapping[str, Sequence[str]]:
    """Return flags with the shortest window that fits an iteration."""
    machine, plan = needed_machine(job), _plan(job, options)
    window = plan.choose_window()[0]
    period = window.length + machine.lag_iterations(window.snapshots)
    write_s = window.window_bytes / (job.measured.storage_bandwidth or math.inf)
    flags = [f"--moe-ft-window={window.length}"]
    return {
        place: [*flags, *storage_flags(job, period, write_s, at_peers=at_peers)]
        for place, at_peers in [*places(job).items()][:1]
    }


def _costs(plan: SparsePlan, window: WindowSize) -> Costs:
    saved = Saved(
        snapshots=window.snapshots,
        interval=1,
        persisted_bytes=window.window_bytes,
        read_bytes=window.window_bytes,
        whole_bytes=window.dense_bytes,
        share=_share(plan, plan.reserve()),
        longest_window=plan.window or plan.options.max_window,
    )
    return costs_of(plan.job, "sparse", saved)


def footprint(job: PlannedJob, options: SparseConfig) -> Footprint:
    """Return the room that checkpoints take, at most: as much as is reserved."""
    plan = _plan(job, options)
    reserved = plan.reserve()
    return Footprint(
        share=_share(plan, reserved),
        checkpoint_bytes=job.num_ranks * reserved,
        num_older=int(job.config.storage.keeps_whole),
    )


def _plan(job: PlannedJob, options: SparseConfig) -> SparsePlan:
    return SparsePlan(
        job=job,
        options=options,
        window=options.window_snapshots,
        machine=known_machine(job),
        is_grouped=job.model.is_grouped,
    )


def _share(plan: SparsePlan, region_bytes: int) -> MemoryShare:
    return MemoryShare(
        region_bytes=region_bytes,
        breakpoint_bytes=plan.job.breakpoint_bytes,
        index_bytes=plan.job.index_bytes(plan.window or plan.options.max_window),
    )


def _describe(plan: SparsePlan) -> str:
    job, rank = plan.job, plan.job.heaviest
    optimizer = "distributed" if job.is_optimizer_distributed else "on every rank"
    compute = sum(each.compute for each in rank.sizes.values()) / rank.num_elements
    lines = [
        describe_model(job.model),
        f"{describe_layout(job)}; sharding {job.config.strategy.sharding}; optimizer {optimizer}; "
        f"{rank.full_bytes / rank.num_elements:.3g} bytes per parameter at FULL, {compute:.3g} at COMPUTE",
    ]
    if plan.is_grouped:
        lines.append(
            "grouped GEMM: a rank's experts of a layer freeze together, so they are saved together"
        )
    if plan.num_orders > 1:
        lines.append(
            f"who owns which expert matters: of {plan.num_orders} orders of popularity, drawn at random, the "
            "one with the largest snapshot"
        )
    return "\n".join(lines)


def _describe_window(plan: SparsePlan, window: WindowSize) -> str:
    """Return the length of the window and its reason, whether it fits, and the cost if it does not."""
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
        f"budget of a snapshot: {megabytes(budget)} MB can be {way} in an iteration; the largest has "
        f"{megabytes(window.largest_bytes)} MB and {'fits' if fits else 'does NOT fit'}",
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
        f"warning: --moe-ft-window={plan.window} is more than the {num_units} units that a rank holds: "
        "snapshots without a unit save nothing and make every recovery longer. Give at most "
        f"{num_units}, or auto."
    ]


def _snapshot_table(window: WindowSize) -> str:
    """Return the snapshots of the ranks that save the most, and a dense one."""
    rows: list[tuple[str, float]] = [
        ("first", window.snapshots[0]),
        ("largest", window.largest_bytes),
        ("mean", window.mean_bytes),
    ]
    if 1 < window.length <= _MOST_SNAPSHOT_ROWS:
        rows += [(f"{number}", size) for number, size in enumerate(window.snapshots, 1)]
    dense = window.dense_bytes
    cells = [(name, megabytes(size), f"{reduction(size, dense):.1%}") for name, size in rows]
    headers = ("snapshot, heaviest rank", "MB", "less than dense")
    return table([*cells, ("dense", megabytes(dense), "")], headers)


def _memory(plan: SparsePlan, window: WindowSize) -> str:
    """Return the host memory of the rank that needs the most."""
    regions = {
        f"windows of {window.length}": window.window_bytes,
        "reserved": plan.reserve(),
        "dense": window.dense_bytes,
    }
    shares = {name: _share(plan, size) for name, size in regions.items()}
    return memory_table(plan.job, shares)


def _storage(plan: SparsePlan, window: WindowSize) -> list[str]:
    """Return how often windows can go to storage, if a bandwidth was given."""
    job, machine = plan.job, plan.machine
    lag = machine.lag_iterations(window.snapshots) if machine else 0
    period_s = (job.measured.iteration_s or 0.0) * (window.length + lag)
    return persist_line(
        job, window.window_bytes, period_s=period_s, planned=job.persist_interval, unit="windows"
    )


def _recovery(plan: SparsePlan, window: WindowSize, order: int) -> list[str]:
    """Return what a failure costs and, if failures are known, what is left of the training time."""
    machine = plan.machine
    if machine is None:
        return []
    costs = _costs(plan, window)
    lag = machine.lag_iterations(window.snapshots)
    least, mean, most = work_to_redo(window.length, lag)
    saved_s = frozen_s(window, machine.iteration_s, plan.works(order))
    lines = [
        f"iterations that run again, conversion included: {least} to {most}, {mean:.1f} on average; "
        f"frozen units save {saved_s:.3f} s of the conversion at best"
        f"{_other_saving(plan, machine, window.length)}",
        *ettr_line(costs, plan.job.measured.mtbf_s),
    ]
    return [recovery_table(costs, window.window_bytes), "\n".join(lines)]


def _other_saving(plan: SparsePlan, machine: Machine, length: int) -> str:
    """Return what frozen units save if experts freeze the other way, where that makes a difference."""
    if plan.job.model.num_experts in (0, plan.job.ep) or plan.job.config.elastic.expert_slots:
        return ""
    other = replace(plan, is_grouped=not plan.is_grouped, window=length)
    window, order = other.choose_window()
    saved_s = frozen_s(window, machine.iteration_s, other.works(order))
    way = "with" if other.is_grouped else "without"
    return (
        f", {saved_s:.3f} s {way} grouped GEMM (largest snapshot "
        f"{megabytes(window.largest_bytes)} MB)"
    )
