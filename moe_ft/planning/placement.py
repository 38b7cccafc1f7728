"""Placement of replicas: the peers of each rank, and the memory that replicas take on each node."""

from collections.abc import Sequence

from moe_ft.errors import PlanError
from moe_ft.topology import Topology

DEFAULT_FACTOR = 2


def default_replication_factor(num_nodes: int) -> int:
    """Return 0 on one node, 1 on two, else 2; a replica on the node that it protects is useless."""
    return min(DEFAULT_FACTOR, num_nodes - 1)


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
    load = [0] * len(topology.ranks)
    return [_peers_of(topology, rank, replication_factor, load) for rank in range(len(load))]


def _peers_of(topology: Topology, rank: int, factor: int, load: list[int]) -> tuple[int, ...]:
    """Choose the peers of one rank, adding its bytes to their loads."""
    ranks = topology.ranks
    own = ranks[rank]
    peers: list[int] = []
    nodes = {own.node}
    ring = [(rank + step) % len(ranks) for step in range(1, len(ranks))]
    same_stage = [other for other in ring if ranks[other].stage == own.stage]
    while len(peers) < factor:
        elsewhere = [other for other in same_stage if ranks[other].node not in nodes]
        if elsewhere:
            next_node = ranks[elsewhere[0]].node
            choices = [other for other in elsewhere if ranks[other].node == next_node]
        else:
            choices = [other for other in ring if ranks[other].node not in nodes]
        peer = min(choices, key=lambda other: load[other])  # the first on the ring, if equal
        peers.append(peer)
        nodes.add(ranks[peer].node)
        load[peer] += own.memory_bytes(1)
    return tuple(peers)


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
