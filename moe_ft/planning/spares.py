"""Lost nodes, as `plan` tells of them: what a spare costs, and what live replicas of experts survive.

slot_tables.py has the tables of Lazarus, lost_ranks.py what happens without a spare.
"""

import numpy as np

from moe_ft.arithmetic import ceil_div
from moe_ft.planning.lost_ranks import Layout, layout_of
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.slot_tables import (
    MOST_EXACT,
    Table,
    allocate,
    overlapping,
    recovery_probability,
    sample_recovery,
)

_NUM_SAMPLES = 10_000


def spare_lines(job: PlannedJob) -> list[str]:
    """Return what a spare node costs, and what it is good for."""
    if job.num_nodes < 2 or not job.replication_factor:
        return []
    measured, num_nodes = job.measured, job.num_nodes + 1
    in_place = "" if measured.repair_s is None else f" in {measured.repair_s:g} s"
    restart = f", {measured.restart_s:g} s" if measured.restart_s else ""
    at_once = f"any {job.replication_factor}" if job.replication_factor > 1 else "one"
    if job.replica_regions == 1 < job.replication_factor:
        at_once += f" (while a snapshot is sent, {job.replication_factor // 2})"
    return [
        f"a spare node is 1 of {num_nodes} nodes, {1 / num_nodes:.1%}. With --moe-ft-repair auto it replaces "
        f"a lost node, any but the first, in place{in_place}; {at_once} at a time, as many in turn as there "
        f"are spares. Without one that takes a restart{restart}, and the time until another node "
        "is there"
    ]


def live_replica_lines(job: PlannedJob) -> list[str]:
    """Return how likely live replicas of experts survive lost nodes, next to replicas of state.

    Source: Lazarus, whose replicas carry the state of their expert; replicas here do not, as every rank has a
    part of the state of all.
    """
    if not job.model.num_moe_layers or job.num_nodes < 2:
        return []
    layout, settings = layout_of(job), job.config.elastic
    rows: Table = tuple((piece,) for piece in range(layout.ep * layout.expert_tp))
    homes, placing = ", ", ""
    if settings.expert_slots:
        num_slots = job.ep * settings.expert_slots
        counts = allocate([1] * job.model.num_experts, num_slots, settings.min_replicas)
        # Replicas of an expert are on neighbours, which are here on different nodes.
        order = sorted(range(job.ep), key=lambda rank: rank % job.ranks_per_node)
        placed = dict(zip(order, overlapping(counts, job.ep), strict=True))
        rows = tuple(placed[rank] for rank in range(job.ep))
        homes = " none, as every rank has a part of the state of each expert; "
        placing = ", which places equally popular ones so"
    tables = _pieces_on_nodes(layout, job.ranks_per_node, rows)
    most = min(job.num_nodes - 1, max(2, job.replication_factor + 1))
    chances = [f"{_survives(tables, dead):.0%} of {dead}" for dead in range(1, most + 1)]
    state = f"any {job.replication_factor}" if job.replication_factor else "none"
    return [
        f"lost nodes that experts survive: {state} by replicas of state; by live replicas{homes}if each had "
        f"the whole state of its experts as in Lazarus{placing}, {', '.join(chances)}"
    ]


def _survives(tables: list[Table], dead: int) -> float:
    if len(tables[0]) <= MOST_EXACT:
        return recovery_probability(tables, dead)
    return sample_recovery(tables, dead, np.random.default_rng(0), _NUM_SAMPLES)


def _pieces_on_nodes(layout: Layout, ranks_per_node: int, rows: Table) -> list[Table]:
    """Return, of each stage, ``[node]`` the pieces of experts that its ranks have.

    Args:
        rows: the pieces of the ranks that divide all experts, or have slots for them.
    """
    ranks_of_stage = layout.tp * layout.cp * layout.dp
    num_nodes = ceil_div(ranks_of_stage * layout.num_stages, ranks_per_node)
    tables = []
    for stage in range(layout.num_stages):
        nodes: list[list[int]] = [[] for _ in range(num_nodes)]
        for rank in range(ranks_of_stage):
            nodes[(stage * ranks_of_stage + rank) // ranks_per_node].extend(rows[rank % len(rows)])
        tables.append(tuple(map(tuple, nodes)))
    return tables
