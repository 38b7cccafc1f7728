"""Placement of replicas: the peers of each rank, and the memory that replicas take on each node."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from itertools import islice

from moe_ft.errors import ConfigError, PlanError
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

    A rank and its peers are all on different nodes. The peers are the next ranks of the same stage on the
    ring of ranks; if a node has several of them, the least loaded is chosen. If the stage is not on enough
    nodes, the least loaded ranks of other stages are chosen.

    Args:
        topology: node, stage and bytes of each rank.
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
    placing = _Placing(topology)
    return [placing.peers_of(info, replication_factor) for info in topology.ranks]


class _Placing:
    """Bytes that ranks keep for others so far, in the orders in which peers are looked for.

    A rank looks at few others: what it passes over is on its own node, or on those of its peers.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks = topology.ranks
        self._load = [0] * len(self._ranks)
        # Ascending ranks of a stage, and of a stage on a node.
        self._stage: dict[int, list[int]] = {}
        self._local: dict[tuple[int, str], list[int]] = {}
        for info in self._ranks:
            self._stage.setdefault(info.stage, []).append(info.rank)
            self._local.setdefault((info.stage, info.node), []).append(info.rank)
        self._num_nodes = Counter(stage for stage, _ in self._local)
        # Ascending ranks by load, and the loads that there are, ascending.
        self._with_load = {0: list(range(len(self._ranks)))}
        self._loads = [0]

    def peers_of(self, own: RankInfo, factor: int) -> tuple[int, ...]:
        """Choose the peers of one rank, adding its bytes to their loads."""
        peers: list[int] = []
        nodes = {own.node}
        ring = _ring(self._stage[own.stage], own.rank)
        while len(peers) < factor:
            if len(nodes) < self._num_nodes[own.stage]:
                first = next(each for each in ring if self._ranks[each].node not in nodes)
                choices = self._local[own.stage, self._ranks[first].node]
                # The first on the ring, if equal.
                peer = min(_ring(choices, own.rank), key=self._load.__getitem__)
            else:
                peer = self._least_loaded(own.rank, nodes)
            peers.append(peer)
            nodes.add(self._ranks[peer].node)
            self._add(peer, own.memory_bytes(1))
        return tuple(peers)

    def _least_loaded(self, rank: int, nodes: Set[str]) -> int:
        """Return the least loaded rank that is on none of these nodes: the first on the ring, if equal."""
        in_order = (each for load in self._loads for each in _ring(self._with_load[load], rank))
        return next(each for each in in_order if self._ranks[each].node not in nodes)

    def _add(self, rank: int, num_bytes: int) -> None:
        load = self._load[rank]
        same = self._with_load[load]
        del same[bisect_left(same, rank)]
        if not same:
            del self._with_load[load], self._loads[bisect_left(self._loads, load)]
        load = self._load[rank] = load + num_bytes
        if load not in self._with_load:
            insort(self._loads, load)
        insort(self._with_load.setdefault(load, []), rank)


def _ring(ranks: Sequence[int], rank: int) -> Iterator[int]:
    """Yield ascending ranks, beginning after one of them or after where it would be."""
    after = bisect_right(ranks, rank)
    yield from islice(ranks, after, None)
    yield from islice(ranks, after)


def sources_of(peers: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    """Return the ranks whose replicas a rank keeps, ascending."""
    return tuple(source for source, chosen in enumerate(peers) if rank in chosen)


def plan_node_memory(
    topology: Topology,
    peers: Sequence[tuple[int, ...]],
    num_regions: int,
    num_replica_regions: int,
) -> dict[str, int]:
    """Return the bytes of host memory that the memory and peer tiers take on each node.

    Args:
        topology: node, and bytes of regions, pools, breakpoints and boundary logs, of each rank.
        num_regions: regions of each rank for its own state, in addition to a pool.
        num_replica_regions: regions that a peer keeps for each rank it serves, also in addition to a pool.
    """
    total = dict.fromkeys(topology.nodes, 0)
    for info in topology.ranks:
        total[info.node] += info.memory_bytes(num_regions)
        total[info.node] += info.breakpoint_bytes + info.boundary_bytes
        for peer in peers[info.rank]:
            total[topology.ranks[peer].node] += info.memory_bytes(num_replica_regions)
    return total
