"""Lost ranks without a spare, as `plan` tells of them: iterations of those who share their micro-batches.

schedules.py has the schedules, spares.py what a spare costs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moe_ft.arithmetic import ceil_div
from moe_ft.planning.cells import Replica, cell_sizes
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import megabytes
from moe_ft.planning.schedules import Pipelines, Role, Schedule, Way, plan_schedule
from moe_ft.tables import table

_WAYS = {
    Way.PEERS: "peers run all micro-batches of its ranks",
    Way.EXPERTS: "its processes compute their experts, and peers the rest of their micro-batches",
    Way.GUESTS: "its processes and their hosts run fewer micro-batches each, and peers the others",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Ranks in Megatron's order: tensor parallel, context parallel, data parallel, pipeline stages.

    A role of a schedule is that of a *lane*: ranks that divide the tensors and sequences of one pipeline.

    Attributes:
        dp: lanes of a stage, which are data-parallel ranks without those of context parallelism.
        ep, expert_tp: ranks that divide the experts of a layer, and each of them; 1 without experts.
    """

    num_stages: int
    tp: int
    cp: int
    dp: int
    ep: int = 1
    expert_tp: int = 1

    @property
    def lane_size(self) -> int:
        """Ranks of a lane."""
        return self.tp * self.cp

    @property
    def group_size(self) -> int:
        """Ranks that wait for each other in a pass: those of a lane, and lanes that divide the experts."""
        return math.lcm(self.lane_size, self.expert_tp * self.ep)

    @property
    def num_groups(self) -> int:
        """Groups of a stage, each of which has all its weights."""
        return self.lane_size * self.dp // self.group_size

    def pipelines(self, num_micro_batches: int) -> Pipelines:
        """Return the pipelines of lanes, with so many micro-batches each."""
        return Pipelines(
            num_stages=self.num_stages,
            num_pipelines=self.dp,
            num_micro_batches=num_micro_batches,
            group_size=self.group_size // self.lane_size,
        )

    def role_of(self, rank: int) -> Role:
        """Return the lane of a rank, and its stage."""
        stage, lane = divmod(rank // self.lane_size, self.dp)
        return lane, stage

    def ranks_of(self, role: Role) -> range:
        """Return the ranks of a lane of a stage."""
        lane, stage = role
        first = (stage * self.dp + lane) * self.lane_size
        return range(first, first + self.lane_size)

    def hosts_of(self, host_ranks: Mapping[int, int]) -> dict[Role, Role]:
        """Return, by role of a guest, that of its host: of the first rank, where those of a lane differ.

        A lane of which only some ranks are guests is one too, perhaps its own host.

        Args:
            host_ranks: by rank without a device of its own, the rank whose device it shares.
        """
        roles: dict[Role, Role] = {}
        for guest in sorted(host_ranks):
            roles.setdefault(self.role_of(guest), self.role_of(host_ranks[guest]))
        return roles


def expert_part(
    *,
    hidden: int,
    seq_length: int,
    expert_hidden: int,
    topk: int,
    ffn_hidden: int = 0,
    shared_hidden: int = 0,
    moe_share: float = 1.0,
    is_gated: bool = False,
) -> float:
    """Return the part of the time of a stage that its experts take, by multiplications of matrices.

    Args:
        expert_hidden, ffn_hidden, shared_hidden: inner size of an expert, of other layers, and of
            the expert that all tokens go to.
        moe_share: of the layers, those with experts.
        is_gated: whether an expert has three matrices, not two.
    """
    attention = 4 * hidden + seq_length  # a token sees half of a sequence, in two products
    num_matrices = 3 if is_gated else 2
    experts = moe_share * num_matrices * topk * expert_hidden
    rest = moe_share * num_matrices * shared_hidden
    rest += (1 - moe_share) * num_matrices * ffn_hidden
    return experts / (attention + experts + rest)


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
    """Iterations after the loss of some ranks, as parts of a healthy one.

    Counts of a model without communication, in which a forward pass takes as long as the gradients of the
    inputs, and those of the weights.
    """

    def __init__(
        self,
        layout: Layout,
        hosts: Mapping[Role, Role],
        batch: tuple[int, int],
        expert_part: float = 0.5,
    ) -> None:
        """Take the layout, and what `share_cells` takes.

        Args:
            batch: global and micro-batch size.
        """
        self._batch = batch
        self._layout = layout
        self._expert_part = expert_part
        whole = layout.pipelines(len(cell_sizes(*batch, layout.dp)))
        size, self._num_micro_batches = whole.group_size, whole.num_micro_batches
        self._hit = {lane // size for lane, _ in hosts}
        hit = sorted(self._hit | {lane // size for lane, _ in hosts.values()})
        # There is a peer for each micro-batch of them. Others run as if nothing had happened.
        num_groups = min(layout.num_groups, len(hit) * size * (self._num_micro_batches + 1) + 1)
        self.pipelines = replace(whole, num_pipelines=num_groups * size)

        def moved(role: Role) -> Role:
            group, place = divmod(role[0], size)
            return hit.index(group) * size + place, role[1]

        self._hosts = {moved(guest): moved(host) for guest, host in hosts.items()}
        self._healthy = self._stock(self._num_micro_batches)

    def _stock(self, num_micro_batches: int) -> float:
        return (num_micro_batches + self._layout.num_stages - 1) * 3.0

    def ratio(self, schedule: Schedule) -> float:
        """Return the duration of a schedule as part of a healthy iteration."""
        return schedule.duration / self._healthy

    @property
    def crowded(self) -> Schedule:
        """The schedule of guests that run their own micro-batches."""
        return plan_schedule(self.pipelines, self._hosts, ways=(Way.CROWD,))

    def shared(self, *, is_split: bool = False, more: int | None = None) -> Schedule:
        """Return the shortest schedule of peers that share the micro-batches of guests.

        Args:
            is_split: whether gradients of weights are put off.
            more: micro-batches that a rank can hold beyond 1F1B; None: as many as there are stages.
        """
        return plan_schedule(
            self.pipelines,
            self._hosts,
            expert_part=self._expert_part,
            is_split=is_split,
            most_more_held=self._layout.num_stages if more is None else more,
        )

    def why(self, schedule: Schedule) -> str:
        """Return which way of sharing the planner has chosen, and why."""
        way, num_groups = schedule.shares.way, self._layout.num_groups
        if schedule.duration >= self.crowded.duration:
            return "share gains nothing over crowd"
        if any(
            (pipeline, stage) in self._hosts for (_, stage), pipeline in schedule.runners.items()
        ):
            way = Way.GUESTS
        reason = ""
        if way is not Way.PEERS:
            reason = f"its {num_groups - 1} other groups alone would take longer"
            if num_groups == 1:
                reason = "experts of a stage live on one rank only"
            reason = f", as {reason}"
        return f"share: {_WAYS[way]}{reason}"

    @cached_property
    def split(self) -> float:
        """A healthy iteration whose gradients of weights are put off."""
        alone = replace(self.pipelines, num_pipelines=1, group_size=1)
        more = self._layout.num_stages
        return self.ratio(plan_schedule(alone, is_split=True, most_more_held=more))

    @property
    def dropped(self) -> float:
        """An iteration without the pipelines of groups that lack a rank, if others have their samples."""
        layout = self._layout
        left = layout.dp * (layout.num_groups - len(self._hit)) // layout.num_groups
        if not left:
            return math.inf
        global_batch_size, micro_batch_size = self._batch
        return self._stock(ceil_div(global_batch_size, micro_batch_size * left)) / self._healthy

    def shrunk(self, num_ranks: int) -> float:
        """Return an iteration of as many whole models as fit on the ranks that are left, if one does."""
        layout = self._layout
        replica = Replica(
            num_ranks=layout.num_stages * layout.group_size,
            num_readers=layout.dp // layout.num_groups,
            batch=self._batch,
        )
        if num_ranks < replica.fewest_ranks():
            return math.inf
        return self._stock(len(replica.fit(num_ranks)[0])) / self._healthy


def lost_node_lines(job: PlannedJob) -> list[str]:
    """Return what a lost node costs a job while no spare is there."""
    layout = layout_of(job)
    if layout.dp == 1 or job.num_nodes < 2 or job.global_batch_size is None:
        return []
    batch = job.global_batch_size, job.micro_batch_size
    answers = {
        where: Degraded(layout, hosts, batch, job.expert_part)
        for where, hosts in _hosts_of(layout, job).items()
    }
    shares = {where: found.shared() for where, found in answers.items()}
    where = max(shares, key=lambda each: shares[each].duration)
    found, shared = answers[where], shares[where]
    schedules = {
        "crowd: a node that trains runs its ranks": found.crowded,
        "share: peers run their micro-batches": shared,
        "share, gradients of weights put off": found.shared(is_split=True),
    }
    ratios = {way: (found.ratio(each), str(each.more_held)) for way, each in schedules.items()}
    ratios["its pipelines are dropped"] = found.dropped, ""
    ratios["a restart on the ranks that are left"] = (
        found.shrunk(job.num_ranks - job.ranks_per_node),
        "",
    )
    worse = ", the worse place" if len(shares) > 1 else ""
    iteration_s = job.measured.iteration_s
    rows = [
        (way, f"{ratio:.2f}", "" if iteration_s is None else f"{ratio * iteration_s:.3f}", more)
        for way, (ratio, more) in ratios.items()
        if ratio < math.inf
    ]
    rows.append(("a restart that waits for a node", "none until then", "", ""))
    titles = ("a lost node without a spare", "iteration, healthy = 1", "s")
    lines = [
        f"- {found.why(shared)}",
        f"- counted with its ranks on the next node of {where}{worse}",
        f"- putting off gradients makes a healthy iteration {found.split:.2f} too",
        f"- a device with two ranks has {megabytes(job.state_bytes)} MB of weights, gradients and optimizer "
        "more",
        "counted, without communication",
    ]
    return ["\n".join([table(rows, (*titles, "micro-batches more at once")), *lines])]


def _hosts_of(layout: Layout, job: PlannedJob) -> dict[str, dict[Role, Role]]:
    """Return the hosts of a lost node's roles: the next node that has its stages, and one that has none."""
    per_node = job.ranks_per_node
    lost = job.num_nodes // 2
    ranks = range(lost * per_node, min((lost + 1) * per_node, job.num_ranks))
    found = dict[str, dict[Role, Role]]()
    for step in range(1, job.num_nodes):
        first = (lost + step) % job.num_nodes * per_node
        node = range(first, min(first + per_node, job.num_ranks))
        hosts = layout.hosts_of({rank: node[rank % per_node % len(node)] for rank in ranks})
        stages = {stage for _, stage in hosts} & {stage for _, stage in hosts.values()}
        found.setdefault("the same stage" if stages else "another stage", hosts)
    return found
