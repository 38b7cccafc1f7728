"""Lost ranks without a spare, as `plan` tells of them: what peers can play, what it costs, what survives.

schedules.py has the schedules of peers that play roles, slot_tables.py the tables of Lazarus.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_ft.arithmetic import ceil_div
from moe_ft.errors import PlanError
from moe_ft.planning.cells import Replica, cell_sizes
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import megabytes
from moe_ft.planning.schedules import (
    Pipelines,
    Role,
    Schedule,
    plan_schedule,
)
from moe_ft.planning.slot_tables import (
    MOST_EXACT,
    Table,
    allocate,
    overlapping,
    recovery_probability,
    sample_recovery,
)
from moe_ft.tables import table

_NUM_SAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks in Megatron's order: tensor parallel, context parallel, data parallel, pipeline stages.

    Attributes:
        dp: data-parallel ranks, without those of context parallelism.
        ep, expert_tp: ranks that divide the experts of a layer, and each of them; 1 without experts.
    """

    num_stages: int
    tp: int
    cp: int
    dp: int
    ep: int = 1
    expert_tp: int = 1

    @property
    def group_size(self) -> int:
        """Ranks that are lost together: those that divide tensors and sequences, or meet in an all-to-all."""
        return math.lcm(self.tp * self.cp, self.expert_tp * self.ep)

    @property
    def num_groups(self) -> int:
        """Groups of a stage, each of which can play the roles of others."""
        return self.tp * self.cp * self.dp // self.group_size

    @property
    def refusal(self) -> str | None:
        """The reason why nobody can play a lost rank's role, None if peers can."""
        if self.cp > 1:
            return "jobs with context parallelism have then ended in other weights, and it is not known why"
        if self.num_groups > 1:
            return None
        if self.dp == 1:
            return "a stage has only one data-parallel rank: nobody else has its weights"
        return (
            f"every expert of a stage is in one group of {self.ep} expert-parallel ranks: nobody else has "
            "the lost rank's"
        )

    def ranks_of(self, role: Role) -> range:
        """Return the ranks of the group that has a role."""
        pipeline, stage = role
        first = (stage * self.num_groups + pipeline) * self.group_size
        return range(first, first + self.group_size)

    def roles_of(self, dead: Iterable[int]) -> frozenset[Role]:
        """Return the roles that dead ranks leave to peers: those of their groups.

        Raises:
            PlanError: if nobody can play them.
        """
        ranks_of_stage = self.tp * self.cp * self.dp
        roles = frozenset(
            (rank % ranks_of_stage // self.group_size, rank // ranks_of_stage) for rank in dead
        )
        if roles and self.refusal:
            raise PlanError(self.refusal)
        for stage in {stage for _, stage in roles}:
            if all((group, stage) in roles for group in range(self.num_groups)):
                raise PlanError(f"stage {stage} has no live group: nobody can play its roles")
        return roles


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleMemory:
    """Bytes of device memory that a peer needs for each role that it plays besides its own.

    Attributes:
        gradients: of another buffer, with an fp32 gradient of each parameter of the rank.
        shard: of the lost rank's part of masters and moments.
    """

    gradients: int
    shard: int

    def total(self, num_roles: int = 1) -> int:
        """Return the bytes for so many roles, without activations."""
        return num_roles * (self.gradients + self.shard)


def role_memory(job: PlannedJob) -> RoleMemory:
    """Return the memory of a role where it takes the most."""
    found = (
        RoleMemory(
            gradients=4 * sum(stage.elements[unit] for unit in rank.sizes) // job.tp,
            shard=12 * rank.num_elements,
        )
        for stage in job.stages
        for rank in stage.ranks
    )
    return max(found, key=RoleMemory.total)


def layout_of(job: PlannedJob) -> Layout:
    """Return the layout of a planned job."""
    experts = (job.ep, job.expert_tp) if job.model.num_moe_layers else (1, 1)
    return Layout(
        num_stages=job.num_stages,
        tp=job.tp,
        cp=job.cp,
        dp=job.dp // job.cp,
        ep=experts[0],
        expert_tp=experts[1],
    )


class Degraded:
    """Iterations after the loss of some roles, as parts of a healthy one.

    Counts of a model without communication, in which a forward pass takes as long as the gradients of the
    inputs, and those of the weights.
    """

    def __init__(
        self, layout: Layout, dead: Set[Role], global_batch_size: int, micro_batch_size: int
    ) -> None:
        self._batch = (global_batch_size, micro_batch_size)
        self._layout = layout
        num_micro_batches = len(cell_sizes(*self._batch, layout.dp))
        hit = sorted({group for group, _ in dead})
        # There is a peer for each micro-batch of them. Others run as if nothing had happened.
        size = min(layout.num_groups, len(hit) * (num_micro_batches + 1) + 1)
        self.pipelines = Pipelines(
            num_stages=layout.num_stages, num_pipelines=size, num_micro_batches=num_micro_batches
        )
        self._dead = frozenset((hit.index(group), stage) for group, stage in dead)
        self._healthy = self._stock(num_micro_batches)

    def _stock(self, num_micro_batches: int) -> float:
        return (num_micro_batches + self._layout.num_stages - 1) * 3.0

    def ratio(self, schedule: Schedule) -> float:
        """Return the duration of a schedule as part of a healthy iteration."""
        return schedule.duration / self._healthy

    @property
    def idle(self) -> float:
        """Part of a healthy iteration in which a rank waits: the bubble."""
        return (self._layout.num_stages - 1) / (
            self._layout.num_stages - 1 + self.pipelines.num_micro_batches
        )

    def rerouted(self, *, is_split: bool, more: int, is_whole: bool = False) -> Schedule:
        """Return the schedule of peers that play the lost roles.

        Args:
            is_split: whether gradients of weights are put off.
            more: micro-batches that a rank can hold beyond 1F1B.
            is_whole: whether one peer plays a role.
        """
        return plan_schedule(
            self.pipelines, self._dead, is_split=is_split, is_whole=is_whole, most_more_held=more
        )

    @cached_property
    def split(self) -> float:
        """A healthy iteration whose gradients of weights are put off."""
        alone = Pipelines(
            num_stages=self._layout.num_stages,
            num_pipelines=1,
            num_micro_batches=self.pipelines.num_micro_batches,
        )
        return self.ratio(
            plan_schedule(alone, is_split=True, most_more_held=self._layout.num_stages)
        )

    @property
    def dropped(self) -> float:
        """An iteration without the pipelines that lack a stage, their samples on the others."""
        lost = max(Counter(stage for _, stage in self._dead).values())
        left = self._layout.dp * (self._layout.num_groups - lost) // self._layout.num_groups
        global_batch_size, micro_batch_size = self._batch
        return self._stock(ceil_div(global_batch_size, micro_batch_size * left)) / self._healthy

    def shrunk(self, num_ranks: int) -> float:
        """Return an iteration of as many whole models as fit on the ranks that are left.

        Raises:
            PlanError: if none does.
        """
        layout = self._layout
        replica = Replica(
            num_ranks=layout.num_stages * layout.group_size,
            num_readers=layout.dp // layout.num_groups,
            batch=self._batch,
        )
        return self._stock(len(replica.fit(num_ranks)[0])) / self._healthy


def rerouting_lines(job: PlannedJob) -> list[str]:
    """Return what a lost node costs a job with pipeline and data parallelism while no spare is there."""
    layout = layout_of(job)
    if layout.num_stages == 1 or layout.dp == 1:
        return []
    if layout.refusal:
        return [
            f"without a spare a lost rank stops the job, peers cannot stand in: {layout.refusal}"
        ]
    if job.global_batch_size is None:
        return []
    nodes = _playable_nodes(layout, job)
    lost = nodes[len(nodes) // 2] if nodes else [job.num_ranks // 2]
    name = "a lost node without a spare" if nodes else "a lost rank without a spare"
    found = Degraded(layout, layout.roles_of(lost), job.global_batch_size, job.micro_batch_size)
    whole = found.rerouted(is_split=False, more=0, is_whole=True)
    late = found.rerouted(is_split=True, more=layout.num_stages)
    ways = {
        "one peer plays each of its roles": whole,
        "peers share its micro-batches": found.rerouted(is_split=False, more=layout.num_stages),
        "the same, gradients of weights put off": late,
    }
    ratios = {way: (found.ratio(each), str(each.more_held)) for way, each in ways.items()}
    ratios["its pipelines are dropped"] = found.dropped, ""
    shrunk = found.shrunk(job.num_ranks - len(lost))
    ratios["a restart on the ranks that are left"] = shrunk, ""
    iteration_s = job.measured.iteration_s
    rows = [
        (way, f"{ratio:.2f}", "" if iteration_s is None else f"{ratio * iteration_s:.3f}", more)
        for way, (ratio, more) in ratios.items()
    ]
    rows.append(("a restart that waits for a node", "none until then", "", ""))
    titles = (name, "iteration, healthy = 1", "s", "micro-batches more at once")
    return [
        "\n".join([table(rows, titles), *_caveats(layout, found, whole, late)]),
        _table_of_deaths(job, layout, nodes),
    ]


def _table_of_deaths(job: PlannedJob, layout: Layout, nodes: list[range]) -> str:
    """Return losses, whether peers can stand in, and the memory that a peer needs for it."""
    num_groups, num_others = layout.num_groups, job.num_nodes - len(nodes)
    whole = (
        "" if layout.group_size == 1 else f", and the others of its group of {layout.group_size}"
    )
    num_roles = {f"a rank{whole}, in one stage or in each": 1}
    if num_groups > 2:
        num_roles[f"{num_groups - 1} of the {num_groups} groups of a stage"] = num_groups - 1
    if nodes:
        lost = max(max(Counter(s for _, s in layout.roles_of(n)).values()) for n in nodes)
        at_once = ceil_div(lost, num_groups - lost)
        num_roles[f"any one of {len(nodes)} of the {job.num_nodes} nodes"] = at_once
    if num_others:
        num_roles[f"any one of {num_others} nodes: all ranks of a stage"] = 0
    num_roles[f"all {num_groups} groups of a stage: nobody else has its weights"] = 0
    memory = role_memory(job)
    rows = [
        (lost, "yes", megabytes(memory.total(num))) if num else (lost, "no", "")
        for lost, num in num_roles.items()
    ]
    return "\n".join(
        [
            table(rows, ("lost at once", "peers can stand in", "a peer needs, MB")),
            f"that is {megabytes(memory.gradients)} MB of gradients for each role, and its shard of "
            f"{megabytes(memory.shard)} MB; activations of micro-batches are in the table above",
        ]
    )


def _playable_nodes(layout: Layout, job: PlannedJob) -> list[range]:
    """Return the ranks of each node whose loss peers can make up for."""
    found = []
    for first in range(0, job.num_ranks, job.ranks_per_node):
        ranks = range(first, min(first + job.ranks_per_node, job.num_ranks))
        with suppress(PlanError):
            layout.roles_of(ranks)
            found.append(ranks)
    return found


def _caveats(layout: Layout, found: Degraded, whole: Schedule, late: Schedule) -> Iterator[str]:
    new = sum(sender[0] != receiver[0] for sender, receiver in whole.messages())
    only = ", and a stage has only one peer" if layout.num_groups == 2 else ""
    tight = found.ratio(found.rerouted(is_split=True, more=0))
    yield f"- the gain is the bubble, {found.idle:.0%} of a healthy iteration{only}"
    yield f"- putting off gradients makes a healthy iteration {found.split:.2f} too: that is no resilience"
    yield (
        f"- for that a rank holds activations of up to {max(late.most_held.values())} micro-batches; "
        f"with the {layout.num_stages} of 1F1B it is {tight:.2f}"
    )
    yield (
        "moe_ft itself restarts or repairs; other ways are counted, without communication. With peers "
        f"{new} pairs of ranks exchange messages that did not before"
    )


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
