"""Lines and tables that the plans of several strategies have."""

import math
from collections.abc import Callable, Mapping

from moe_ft.planning.costs import Costs, ettr
from moe_ft.planning.host_memory import MemoryShare
from moe_ft.planning.interval import smallest_interval
from moe_ft.planning.planned_job import (
    OPTIMIZER_BYTES,
    WEIGHT_BYTES,
    PlannedJob,
    PlannedModel,
)
from moe_ft.planning.slot_tables import balanced, imbalance, skewed, stock
from moe_ft.tables import table
from moe_ft.units import UnitKind

_SKEWS = (1, 2, 4, 8)


def megabytes(num_bytes: float) -> str:
    """Return bytes in MB, without the unit."""
    return f"{num_bytes / 1e6:,.1f}"


def reduction(num_bytes: float, reference_bytes: float) -> float:
    """Return by which fraction something is smaller than a reference; negative if it is larger."""
    return 1 - num_bytes / reference_bytes


def describe_model(model: PlannedModel) -> str:
    """Return how many parameters a model has, and how many of them are in experts."""
    if not model.num_moe_layers:
        return f"{_count(model.num_parameters)} parameters, no experts"
    num_experts = model.num_moe_layers * model.num_experts
    return (
        f"{_count(model.num_parameters)} parameters, of which "
        f"{_count(num_experts * model.expert_parameters)} in {model.num_experts} experts of each of "
        f"{model.num_moe_layers} MoE layers ({_count(model.expert_parameters)} each)"
    )


def describe_layout(job: PlannedJob) -> str:
    """Return the numbers of ranks."""
    tensor = f"tp {job.tp}, " if job.tp > 1 else ""
    return f"{tensor}pp {job.num_stages}, dp {job.dp}, ep {job.ep}"


def describe_ranks(job: PlannedJob) -> str:
    """Return the model and who saves what of it, for snapshots of everything at FULL."""
    owners = ""
    if job.model.num_moe_layers:
        holders = job.num_expert_owners
        owners = f"{holders} {'rank holds' if holders == 1 else 'ranks hold'} each expert; "
        if job.config.elastic.expert_slots:
            owners = f"each rank holds 1/{job.ep} of the state of every expert; "
    division = (
        "each rank saves its slices of the distributed optimizer"
        if job.is_optimizer_distributed
        else f"optimizer on every rank, sharding {job.config.strategy.sharding}"
    )
    return (
        f"{describe_model(job.model)}\n{describe_layout(job)}: {owners}{division}; "
        f"{job.heaviest.full_bytes / job.heaviest.num_elements:.3g} bytes of a parameter saved"
    )


def persist_line(
    job: PlannedJob, num_bytes: int, *, period_s: float, planned: float, unit: str = "iterations"
) -> list[str]:
    """Return how long a write takes and whether the next checkpoint comes late enough for it.

    Args:
        job: says whether checkpoints go to storage, and how fast.
        num_bytes: that the rank with the most writes.
        planned: interval between writes, in units.
    """
    bandwidth = job.measured.storage_bandwidth
    if bandwidth is None or not job.config.storage.persist_interval:
        return []
    least = smallest_interval(num_bytes, bandwidth_bytes_per_s=bandwidth, iteration_s=period_s)
    verdict = "is enough" if planned >= least else "is too short: persists will be skipped"
    return [
        f"persist: {num_bytes / bandwidth:.3f} s; smallest interval {least} {unit}; the one planned, "
        f"{planned}, {verdict}"
    ]


def whole_line(job: PlannedJob, num_bytes: int) -> list[str]:
    """Return what whole states on storage cost, if they are asked for (--moe-ft-persist-dense-interval).

    Args:
        num_bytes: of the whole state of the rank with the most.
    """
    if not job.config.storage.persists_dense:
        return []
    measured, costs = job.measured, []
    if measured.bandwidth is not None:
        stall_s = max(0.0, num_bytes / measured.bandwidth - measured.hidden_s)
        costs.append(f"stall {stall_s:.3f} s")
    if measured.storage_bandwidth is not None:
        costs.append(f"written in {num_bytes / measured.storage_bandwidth:.3f} s")
    every = job.config.storage.persist_dense_interval
    return [
        f"whole state on storage every {every} iterations: "
        + "; ".join([f"{megabytes(num_bytes)} MB of the rank with the most", *costs])
    ]


def boundary_line(job: PlannedJob, longest_window: int) -> list[str]:
    """Return what the boundary log takes, if there is one."""
    traffic, num_bytes = job.traffic, job.boundary_bytes(longest_window)
    if traffic is None or not num_bytes:
        return []
    stages = range(traffic.num_stages)
    most = max(stages, key=traffic.num_sends)
    iterations = num_bytes // traffic.slot_bytes(most)
    return [
        f"boundary log: {megabytes(traffic.sent_bytes(most))} MB of an iteration in "
        f"{traffic.num_sends(most)} tensors, {iterations} iterations, {megabytes(num_bytes)} MB of the rank "
        "with the most, besides the host memory above"
    ]


def recovery_table(costs: Costs, read_bytes: float) -> str:
    """Return what the parts of a recovery take on average.

    Args:
        read_bytes: of the rank that reads the most.
    """
    kind = costs.fastest
    recovery, replays = costs.recoveries[kind], costs.window - 1
    ready_s = recovery.notice_s + recovery.processes_s + recovery.groups_s
    num_redone = costs.mean_redone - replays
    rows = [
        (f"{kind}", "", ready_s),
        ("restore", f"{megabytes(read_bytes)} MB", recovery.state_s),
        ("conversion", f"{replays} {'replay' if replays == 1 else 'replays'}", recovery.replay_s),
        ("work to redo", f"{num_redone:.1f} iterations", costs.redo_s(kind)),
        ("E[R]", "", costs.failure_s(kind)),
    ]
    cells = [(name, what, f"{seconds:.2f}") for name, what, seconds in rows]
    return table(cells, ("recovery", "", "s"))


def ettr_line(costs: Costs, mtbf_s: float | None) -> list[str]:
    """Return the share of the time that is training, if the time between failures is known."""
    if mtbf_s is None:
        return []
    ratio = ettr(costs.overhead, costs.failure_s(costs.fastest), mtbf_s)
    return [
        f"a failure every {mtbf_s:g} s: {ratio:.4f} of the time is training (ETTR), with an overhead of "
        f"{costs.overhead:.2%}"
    ]


def failure_lines(
    job: PlannedJob, cost: Callable[[PlannedJob], Costs], read_bytes: int
) -> list[str]:
    """Return what a failure costs, if the time between failures is known."""
    if job.measured.mtbf_s is None:
        return []
    costs = cost(job)
    return [recovery_table(costs, read_bytes), *ettr_line(costs, job.measured.mtbf_s)]


def memory_table(job: PlannedJob, shares: Mapping[str, MemoryShare]) -> str:
    """Return the host memory of the rank that needs the most, of a node of such ranks, and by parameter.

    Args:
        shares: by column, the rank's own state in one form.
    """
    factor, num_ranks = job.replication_factor, min(job.ranks_per_node, job.num_ranks)
    num_parameters = job.heaviest.num_elements
    own = [share.own_bytes(persists=job.persists) for share in shares.values()]
    kept = [factor * share.replica_bytes(job.replica_regions) for share in shares.values()]
    state = [sum(each) for each in zip(own, kept, strict=True)]
    beside = [
        share.beside_bytes(
            persists=job.persists, replication_factor=factor, replica_regions=job.replica_regions
        )
        for share in shares.values()
    ]
    both = [sum(each) for each in zip(state, beside, strict=True)]
    # Rounded up, so that a tmpfs of this size is enough.
    node = [math.ceil(num_ranks * each / 1e5) * 1e5 for each in both]
    rows = [
        ("a rank's own, MB", *map(megabytes, own)),
        (f"{_kept_name(job)} that it keeps ({factor}), MB", *map(megabytes, kept)),
        ("headers, indexes and notes of both, MB", *map(megabytes, beside)),
        ("a rank, MB", *map(megabytes, both)),
        (f"a node of {num_ranks}, at most, MB", *map(megabytes, node)),
        ("bytes per parameter, own", *(f"{each / num_parameters:.1f}" for each in own)),
        ("bytes per parameter, all", *(f"{each / num_parameters:.1f}" for each in state)),
    ]
    return table(rows, ("host memory", *shares))


def _kept_name(job: PlannedJob) -> str:
    return "replicas" if job.config.memory.parity_nodes is None else "parity"


def _count(number: int) -> str:
    return f"{number / 1e9:.3f}e9" if number >= 1e9 else f"{number / 1e6:.1f}e6"


def sent_bytes(job: PlannedJob, num_moe_layers: int) -> tuple[int, int]:
    """Return the bytes of gradients and of weights of its slots that a rank sends to others in an iteration.

    Tables change nothing in it, and neither is optimizer state. Padding is not counted.
    """
    expert, rank = next(
        (each, rank)
        for stage in job.stages
        for rank in stage.ranks
        for each in rank.sizes
        if each.kind is UnitKind.EXPERT
    )
    sizes = rank.sizes[expert]
    held = num_moe_layers * job.config.elastic.expert_slots * job.model.expert_parameters
    sent = held * (job.ep - 1) // job.ep
    return sent * job.reduced_bytes, sent * round(sizes.compute / sizes.elements)


def slot_lines(job: PlannedJob) -> list[str]:
    """Return what slots give and cost: load of the ranks, memory and messages where there are most layers."""
    settings, model, num_ranks = job.config.elastic, job.model, job.ep
    if not settings.expert_slots or not model.num_moe_layers:
        return []
    rows = []
    for ratio in _SKEWS:
        load = skewed(model.num_experts, ratio, is_one_hot=False)
        once = stock(model.num_experts, math.gcd(model.num_experts, num_ranks))
        found = balanced(load, num_ranks, settings.expert_slots, settings.min_replicas)
        rows.append((f"{ratio}:1", *(f"{imbalance(each, load):.2f}" for each in (once, found))))
    num_layers = max(stage.num_moe_layers for stage in job.stages)
    slots = num_layers * settings.expert_slots * model.expert_parameters
    homes = num_layers * model.num_experts * model.expert_parameters / num_ranks
    gradients, weights = map(megabytes, sent_bytes(job, num_layers))
    return [
        f"{settings.expert_slots} slots on each of {num_ranks} ranks of a stage, for {model.num_experts} "
        "experts of a layer: tokens of the busiest rank over the mean, if the tokens of the experts fall "
        "in a geometric row",
        table(rows, ("most to least", "each expert once", "slots")),
        f"a rank has {megabytes(WEIGHT_BYTES * slots)} MB of weights and gradients in slots and "
        f"{megabytes((WEIGHT_BYTES + OPTIMIZER_BYTES) * homes)} MB of state in homes; in each iteration it "
        f"sends {gradients} MB of gradients and {weights} MB of weights, whatever the tables are, and no "
        "state of the optimizer",
    ]
