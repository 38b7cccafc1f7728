"""Placement of replicas: the peers of each rank, and the memory that replicas take on each node."""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence, Set
from dataclasses import dataclass

from moe_ft.config.config import MemoryConfig
from moe_ft.errors import ConfigError, PlanError
from moe_ft.planning.host_memory import Regions, num_replica_regions, regions_at_peers
from moe_ft.planning.parity import ParityGroup
from moe_ft.topology import RankInfo, Topology

DEFAULT_FACTOR = 2


def default_replication_factor(num_nodes: int) -> int:
    """Return 0 on one node, 1 on two, else 2; a replica on the node that it protects is useless."""
    return min(DEFAULT_FACTOR, num_nodes - 1)


def planned_replicas(given: int | None, world_size: int, ranks_per_node: int) -> int:
    """Return the replicas of each rank in a job of full nodes.

    Args:
        given: the replication factor, None for automatic.

    Raises:
        ConfigError: if there are fewer nodes than that takes.
    """
    num_nodes = math.ceil(world_size / ranks_per_node)
    if given is None:
        return default_replication_factor(num_nodes)
    if given >= num_nodes:
        raise ConfigError(
            f"--moe-ft-replication-factor={given} must be less than the {num_nodes} nodes that {world_size} "
            f"ranks are on with --ranks-per-node={ranks_per_node}: replicas go to other nodes. Lower one of "
            "the two."
        )
    return given


def place_replicas(topology: Topology, replication_factor: int) -> list[tuple[int, ...]]:
    """Choose the peers that keep each rank's replicas.

    A rank and its peers are all on different nodes, and in different failure domains as long as there are
    further ones. The peers are the next ranks of the same stage on the ring of ranks; if a node, or a domain,
    has several of them, the least loaded is chosen. If the stage is in too few places, or in other domains
    has only ranks that keep more than others, the least loaded ranks of other stages are chosen.

    Args:
        topology: node, domain, stage and bytes of each rank.
        replication_factor: replicas of each rank's state, 0 or more.

    Returns:
        ``[rank]`` global ranks of the peers, ``replication_factor`` of them.

    Raises:
        PlanError: if there are not enough nodes.
    """
    num_nodes = len(topology.nodes)
    if not 0 <= replication_factor < num_nodes:
        raise PlanError(
            f"{replication_factor} replicas need {replication_factor + 1} nodes, there are {num_nodes}"
        )
    placing = _PeerPlacing(topology)
    return [placing.peers_of(info, replication_factor) for info in topology.ranks]


class _Loaded:
    """Ascending ranks by the bytes that they keep for others, and these numbers of bytes, ascending."""

    def __init__(self) -> None:
        self._ranks: dict[int, list[int]] = {0: []}
        self._loads = [0]

    def append(self, rank: int) -> None:
        """Add a rank that is higher than all others, and keeps nothing yet."""
        self._ranks[0].append(rank)

    def least(self, after: int, places: "_ReplicaPlaces", taken: Set[str]) -> int:
        """Return the least loaded rank that is in none of these places: the first on the ring, if equal."""
        found = (places.next(self._ranks[load], after, taken) for load in self._loads)
        return next(each for each in found if each is not None)

    def move(self, rank: int, load: int, to: int) -> None:
        """Move a rank from one load to another."""
        same = self._ranks[load]
        del same[bisect_left(same, rank)]
        if not same:
            del self._ranks[load], self._loads[bisect_left(self._loads, load)]
        if to not in self._ranks:
            insort(self._loads, to)
        insort(self._ranks.setdefault(to, []), rank)


class _ReplicaPlaces:
    """Nodes, or failure domains, of the ranks.

    Attributes:
        names: ``[rank]`` the place.
        local: ranks of a stage in a place.
    """

    def __init__(self, ranks: Sequence[RankInfo], names: Sequence[str]) -> None:
        self.names = names
        self.local: dict[tuple[int, str], _Loaded] = {}
        for info, name in zip(ranks, names, strict=True):
            self.local.setdefault((info.stage, name), _Loaded()).append(info.rank)
        self.num = len({*names})
        self._ends = [len(names)] * len(names)  # of the run of ranks in one place that a rank is in
        for rank in reversed(range(len(names) - 1)):
            is_same = names[rank] == names[rank + 1]
            self._ends[rank] = self._ends[rank + 1] if is_same else rank + 1

    def next(self, ranks: Sequence[int], after: int, taken: Set[str]) -> int | None:
        """Return the first of ascending ranks after one on their ring that is in none of these places."""
        middle = bisect_right(ranks, after)
        for at, end in ((middle, len(ranks)), (0, middle)):
            while at < end:
                if self.names[ranks[at]] not in taken:
                    return ranks[at]
                at = bisect_left(ranks, self._ends[ranks[at]], at)
        return None


class _PeerPlacing:
    """Bytes that ranks keep for others so far, in the orders in which peers are looked for.

    A rank looks at few others: what it passes over is in its own places, or in those of its peers, and a run
    of ranks in one place is passed over at once.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks = ranks = topology.ranks
        nodes = _ReplicaPlaces(ranks, [info.node for info in ranks])
        domains = _ReplicaPlaces(ranks, [info.domain or info.node for info in ranks])
        self._kinds = (domains, nodes) if topology.domains else (nodes,)
        self._load = [0] * len(ranks)
        self._stage: dict[int, list[int]] = {}  # ascending ranks
        self._everyone = _Loaded()
        for info in ranks:
            self._stage.setdefault(info.stage, []).append(info.rank)
            self._everyone.append(info.rank)

    def peers_of(self, own: RankInfo, factor: int) -> tuple[int, ...]:
        """Choose the peers of one rank, adding its bytes to their loads."""
        peers: list[int] = []
        while len(peers) < factor:
            peers.append(self._peer(own, peers))
            self._add(peers[-1], own.memory_bytes(1))
        return tuple(peers)

    def _peer(self, own: RankInfo, peers: Sequence[int]) -> int:
        for places in self._kinds:
            taken = {places.names[each] for each in (own.rank, *peers)}
            if len(taken) < places.num:
                break
        least = self._everyone.least(own.rank, places, taken)
        first = places.next(self._stage[own.stage], own.rank, taken)
        if first is None:
            return least
        near = places.local[own.stage, places.names[first]].least(own.rank, places, taken)
        # A domain may have so few ranks of a stage that they would keep far more than others.
        is_loaded = places is not self._kinds[-1] and self._load[near] > self._load[least]
        return least if is_loaded else near

    def _add(self, rank: int, num_bytes: int) -> None:
        load, stage = self._load[rank], self._ranks[rank].stage
        self._load[rank] = load + num_bytes
        of_places = [each.local[stage, each.names[rank]] for each in self._kinds]
        for loaded in (self._everyone, *of_places):
            loaded.move(rank, load, load + num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Survival:
    """Losses after which memory still has a copy of every rank's state.

    Attributes:
        num_nodes: any so many nodes at once.
        num_sending: as many while a snapshot is on its way to peers; None if that makes no difference.
        domain: any one failure domain, with all of its nodes; None if domains are not known.
    """

    num_nodes: int
    domain: bool | None = None
    num_sending: int | None = None

    @property
    def nodes(self) -> str:
        """The nodes in words."""
        if self.num_sending is None:
            return _nodes(self.num_nodes)
        return f"{_nodes(self.num_nodes)} (while a snapshot is sent, {_nodes(self.num_sending)})"

    def describe(self) -> str:
        """Return it in words for people."""
        if self.domain is None:
            return f"{self.nodes}; failure domains are not known (--moe-ft-failure-domain)"
        return f"{self.nodes}; {'any one' if self.domain else 'no'} failure domain"


def _nodes(number: int) -> str:
    return {0: "no node", 1: "any one node"}.get(number, f"any {number} nodes at once")


def find_survival(
    topology: Topology, peers: Sequence[tuple[int, ...]], replica_regions: Regions
) -> Survival:
    """Return what the replicas of a job cover; see `plan_node_memory`."""
    has_pool = any(info.num_slots for info in topology.ranks)
    num_nodes = min(map(len, peers))
    is_halved = num_replica_regions(replica_regions, has_pool=has_pool) == 1 < num_nodes
    domains = [info.domain for info in topology.ranks]
    pairs = list(zip(domains, peers, strict=True))
    is_covered = all(any(domains[peer] != own for peer in chosen) for own, chosen in pairs)
    return Survival(
        num_nodes=num_nodes,
        domain=is_covered if topology.domains else None,
        num_sending=num_nodes // 2 if is_halved else None,
    )


def describe_domains(
    topology: Topology, peers: Sequence[tuple[int, ...]], memory: MemoryConfig
) -> str:
    """Return where replicas go, and what that covers, of a job whose failure domains are known."""
    num_nodes, num_domains = len(topology.nodes), len(topology.domains)
    factor = min(map(len, peers))
    nodes, domains = ("s" * (number > 1) for number in (num_nodes, num_domains))
    where = f"{num_nodes} node{nodes} in {num_domains} failure domain{domains}"
    others = "to other domains"
    if num_domains == 1:
        others = "to other nodes of it"
    elif factor >= num_domains:
        others = f"{num_domains - 1} of {factor} to other domains, then to other nodes"
    placed = f"replicas go {others}" if factor else "no replicas"
    found = find_survival(topology, peers, regions_at_peers(memory, factor)).describe()
    return f"{where}: {placed}; memory survives the loss of {found}"


def describe_parity(topology: Topology, groups: Sequence[ParityGroup]) -> str:
    """Return which nodes keep parity together, and what that covers."""
    sizes = sorted({len(group.ranks) for group in groups})
    nodes = " or ".join(map(str, sizes))
    return (
        f"groups of {nodes} nodes keep parity; memory survives the loss of one node of each group, and of "
        f"{survival_of(topology, groups).describe()}"
    )


def survival_of(topology: Topology, groups: Sequence[ParityGroup]) -> Survival:
    """Return the losses after which every rank's state can be made again."""
    of_group = ([topology.ranks[rank].domain for rank in group.ranks] for group in groups)
    is_covered = all(len({*each}) == len(each) for each in of_group)
    return Survival(num_nodes=1, domain=is_covered if topology.domains else None)


def sources_of(peers: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """Return the ranks whose replicas a rank keeps, ascending."""
    return tuple(source for source, chosen in enumerate(peers) if rank in chosen)


def plan_node_memory(
    topology: Topology,
    peers: Sequence[tuple[int, ...]],
    num_regions: int,
    replica_regions: Regions,
) -> dict[str, int]:
    """Return the bytes of host memory that the memory and peer tiers take on each node.

    Args:
        topology: node, and bytes of regions, pools, breakpoints and boundary logs, of each rank.
        num_regions: regions of each rank for its own state, in addition to a pool.
        replica_regions: regions that a peer keeps for each rank it serves, see `num_replica_regions`.
    """
    total = dict.fromkeys(topology.nodes, 0)
    for info in topology.ranks:
        total[info.node] += info.memory_bytes(num_regions)
        total[info.node] += info.breakpoint_bytes + info.boundary_bytes + info.note_bytes
        at_peer = num_replica_regions(replica_regions, has_pool=info.num_slots > 0)
        for peer in peers[info.rank]:
            total[topology.ranks[peer].node] += info.memory_bytes(math.ceil(at_peer))
    return total
