"""The job that a doctor examines: its settings, and the room it needs where that can be planned."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ft.cluster.options import LEAVING_S
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.doctor.rows import Row, passed, refused, warned
from moe_ft.errors import ConfigError
from moe_ft.failure_domains import find_domains
from moe_ft.planning.host_memory import Footprint, Regions, num_replica_regions, regions_at_peers
from moe_ft.planning.placement import (
    default_replication_factor,
    find_survival,
    place_replicas,
)
from moe_ft.topology import RankInfo, Topology

_FAILURES, _SPARES, _ALL = "failures", "spare nodes", "all nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job that is about to start.

    Attributes:
        is_given: whether its command line is known; `rows` say what is wrong with that.
        restarts, backend, grace_s: of the launcher, see `Launch`.
        ranks: of the job and of a node; None if they are not known.
        footprint: None if it cannot be planned.
    """

    config: MoeFtConfig = MoeFtConfig()
    is_given: bool = False
    rows: Sequence[Row] = ()
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

    def spare_row(self, num_nodes: int) -> Row:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Replicas of a job whose ranks are on the nodes that have answered.

    Attributes:
        peers: ``[rank]`` the ranks that keep its replicas.
        replica_regions: that each of these keeps of the rank.
        problem: why the failure domains of the nodes are not known, if they were asked for.
    """

    topology: Topology
    peers: Sequence[tuple[int, ...]]
    replica_regions: Regions
    problem: ConfigError | None = None

    def nodes(self) -> dict[str, list[str]]:
        """Return the nodes to which each node would send replicas."""
        ranks = self.topology.ranks
        found: dict[str, list[str]] = {node: [] for node in self.topology.nodes}
        for info, chosen in zip(ranks, self.peers, strict=True):
            own = found[info.node]
            own += [ranks[peer].node for peer in chosen if ranks[peer].node not in own]
        return found

    def row(self) -> Row:
        """Return the row on failures that memory survives."""
        if self.problem is not None:
            return refused(_FAILURES, _ALL, self.problem)
        survival = find_survival(self.topology, self.peers, self.replica_regions)
        found = f"memory survives the loss of {survival.describe()}"
        if not survival.num_nodes:
            more = (
                "several nodes"
                if len(self.topology.nodes) == 1
                else f"{flag_of('replication_factor')} 1"
            )
            return warned(_FAILURES, _ALL, found, f"Use {more}: copies go to other nodes.")
        if survival.domain is False:
            return warned(_FAILURES, _ALL, found, "Take nodes of several failure domains.")
        return passed(_FAILURES, _ALL, found)


def place_on_nodes(job: Job, nodes: Sequence[str]) -> Placement:
    """Place the replicas of a job as its start would.

    Args:
        nodes: of each rank that has answered, by rank. If they run fewer ranks than training will, each node
            counts as a whole one.
    """
    given, problem = job.config.memory.failure_domain, None
    domains = dict.fromkeys(nodes, "")
    try:
        domains = domains if given is None else find_domains(given, domains)
    except ConfigError as error:
        problem = error
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
    factor = min(job.replication_factor(len(topology.nodes)), len(topology.nodes) - 1)
    has_pool = job.footprint is not None and job.footprint.share.pool_bytes > 0
    regions = num_replica_regions(regions_at_peers(job.config.memory, factor), has_pool=has_pool)
    return Placement(
        topology=topology,
        peers=place_replicas(topology, factor),
        replica_regions=regions,
        problem=problem,
    )
