"""The job that a doctor examines: its settings, and the room it needs where that can be planned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ft.cluster.options import LEAVING_S
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.doctor.rows import CheckRow, failed, passed, refused, warned
from moe_ft.errors import ConfigError, PlanError
from moe_ft.failure_domains import find_domains
from moe_ft.planning.host_memory import Footprint, num_replica_regions, regions_at_peers
from moe_ft.planning.parity import place_parity
from moe_ft.planning.placement import (
    Survival,
    default_replication_factor,
    describe_parity,
    find_survival,
    place_replicas,
    survival_of,
)
from moe_ft.topology import RankInfo, Topology

_Peers = Sequence[tuple[int, ...]]  # ``[rank]`` the ranks that keep its state
_FAILURES, _SPARES, _ALL = "failures", "spare nodes", "all nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExaminedJob:
    """A training job that is about to start.

    Attributes:
        is_given: whether its command line is known; `rows` say what is wrong with that.
        restarts, backend, grace_s: of the launcher, see `Launch`.
        ranks: of the job and of a node; None if they are not known.
        footprint: None if it cannot be planned.
    """

    config: MoeFtConfig = MoeFtConfig()
    is_given: bool = False
    rows: Sequence[CheckRow] = ()
    restarts: bool = False
    backend: str | None = None
    grace_s: float | None = None
    ranks: tuple[int, int] | None = None
    num_stages: int = 1
    footprint: Footprint | None = None

    def replication_factor(self, num_nodes: int) -> int:
        """Return the copies of a rank's state on other nodes."""
        given = self.config.memory.num_replicas
        return default_replication_factor(num_nodes) if given is None else given

    @property
    def kept_by_peers(self) -> str:
        """Word for what peers keep of a rank."""
        return "replicas" if self.config.memory.parity_nodes is None else "stripes of parity"

    @property
    def num_nodes(self) -> int:
        """Nodes that the job needs, 1 if that is not known."""
        return 1 if self.ranks is None else math.ceil(self.ranks[0] / self.ranks[1])

    @property
    def node_bytes(self) -> int | None:
        """Host memory of a node; None if it is not planned."""
        if self.footprint is None or self.ranks is None:
            return None
        factor = self.replication_factor(self.num_nodes)
        return self.ranks[1] * self.footprint.share.total_bytes(
            persists=self.config.storage.persists,
            replication_factor=factor,
            replica_regions=regions_at_peers(self.config.memory, factor, self.num_nodes),
        )

    @property
    def boundary_bytes(self) -> int:
        """Bytes of a rank's boundary log, 0 if they are not planned."""
        return 0 if self.footprint is None else self.footprint.share.boundary_bytes

    @property
    def sent_bytes(self) -> int | None:
        """Most bytes that a node sends to its peers after a snapshot; None if they are not planned."""
        if self.footprint is None or self.ranks is None:
            return None
        per_rank = self.replication_factor(self.num_nodes) * self.footprint.share.region_bytes
        return self.ranks[1] * per_rank

    @property
    def checkpoint_bytes(self) -> int | None:
        """Bytes that a node writes of a checkpoint; None if they are not planned."""
        if self.footprint is None:
            return None
        return math.ceil(self.footprint.checkpoint_bytes / self.num_nodes)

    @property
    def saving_s(self) -> float | None:
        """Seconds that a planned end leaves to bring a checkpoint to storage; None if nothing says it."""
        return None if self.grace_s is None else max(0.0, self.grace_s - LEAVING_S)

    def spare_row(self, num_nodes: int) -> CheckRow:
        """Return the row on nodes beyond those that train.

        Args:
            num_nodes: that have answered.
        """
        spares, trains = max(0, num_nodes - self.num_nodes), f"{self.num_nodes} nodes train"
        if self.config.recovery.repair == "off":
            return passed(
                _SPARES,
                _ALL,
                f"{spares}, {trains}: without --moe-ft-repair auto the loss of a node restarts all",
            )
        if not spares:
            return warned(
                _SPARES,
                _ALL,
                f"none, {trains}: the loss of a node ends the job, and what has started it starts it again",
                "Start more nodes than train to have one replaced in place (docs/agent.md).",
            )
        most = min(spares, self.replication_factor(self.num_nodes))
        found = f"{spares}, {trains}: of all but the first, {spares} can be lost in turn, {most} at once"
        return passed(_SPARES, _ALL, found)

    @property
    def num_stored(self) -> int:
        """Most checkpoints on storage at a time."""
        keep = self.config.storage.keep
        return keep + 2 if self.footprint is None else self.footprint.num_stored(keep)

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of all of them; None if they are not planned."""
        if self.footprint is None:
            return None
        return self.num_stored * self.footprint.checkpoint_bytes


def place_on_nodes(job: ExaminedJob, nodes: Sequence[str]) -> tuple[dict[str, list[str]], CheckRow]:
    """Place what peers keep as the start of a job would: copies, or parity.

    Args:
        nodes: of each rank that has answered, by rank. If they run fewer ranks than training will, each node
            counts as a whole one.

    Returns:
        The nodes to which each node would send state, and the row on failures that memory survives.
    """
    memory, problem = job.config.memory, None
    domains = dict.fromkeys(nodes, "")
    try:
        if memory.failure_domain is not None:
            domains = find_domains(memory.failure_domain, domains)
    except ConfigError as error:
        problem = refused(_FAILURES, _ALL, error)
    per_stage = max(1, len(nodes) // job.num_stages)
    ranks = tuple(
        RankInfo(
            rank=rank,
            node=node,
            stage=rank // per_stage,
            pid=0,
            address=None,
            region_bytes=1,
            domain=domains[node],
        )
        for rank, node in enumerate(nodes)
    )
    topology = Topology(ranks=ranks)
    place = _place_copies if memory.parity_nodes is None else _place_parity
    peers, row = place(job, topology)
    found: dict[str, list[str]] = {node: [] for node in topology.nodes}
    for info, chosen in zip(ranks, peers, strict=True):
        own = found[info.node]
        own += [ranks[peer].node for peer in chosen if ranks[peer].node not in own]
    return found, problem or row


def _place_copies(job: ExaminedJob, topology: Topology) -> tuple[_Peers, CheckRow]:
    factor = min(job.replication_factor(len(topology.nodes)), len(topology.nodes) - 1)
    has_pool = job.footprint is not None and job.footprint.share.pool_bytes > 0
    regions = num_replica_regions(regions_at_peers(job.config.memory, factor), has_pool=has_pool)
    peers = place_replicas(topology, factor)
    survival = find_survival(topology, peers, regions)
    text = f"memory survives the loss of {survival.describe()}"
    if not survival.num_nodes:
        is_one = len(topology.nodes) == 1
        more = "several nodes" if is_one else f"{flag_of('replication_factor')} 1"
        return peers, warned(_FAILURES, _ALL, text, f"Use {more}: copies go to other nodes.")
    return peers, _row_of(survival, text)


def _place_parity(job: ExaminedJob, topology: Topology) -> tuple[_Peers, CheckRow]:
    size = job.config.memory.parity_nodes
    assert size is not None
    try:
        groups = place_parity(topology, size)
    except PlanError as error:
        text = f"{flag_of('replicas')}={job.config.memory.replicas}: {error}"
        # A start refuses it only with all of its nodes.
        if job.ranks is None or len(topology.nodes) < job.num_nodes:
            row = warned(_FAILURES, _ALL, text, "Start doctor on all nodes of the job.")
        else:
            remedy = f"Use nodes with as many ranks each, or give {flag_of('replicas')} copies."
            row = failed(_FAILURES, _ALL, text, remedy)
        return [()] * len(topology.ranks), row
    peers = [each.others(rank) for rank, each in enumerate(groups)]
    return peers, _row_of(survival_of(topology, groups), describe_parity(topology, groups))


def _row_of(survival: Survival, text: str) -> CheckRow:
    if survival.domain is False:
        return warned(_FAILURES, _ALL, text, "Take nodes of several failure domains.")
    return passed(_FAILURES, _ALL, text)
