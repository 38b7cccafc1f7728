"""Parity in place of replicas: groups of ranks on different nodes, any one of which can get its state back.

The region of each rank is cut into as many stripes as its group has other ranks. Each of them keeps the XOR
of one stripe of every other rank, so that it gives up one stripe of memory for each version, and the bytes
that a rank sends are those of one replica.

Source: Patterson, Gibson, Katz: A case for redundant arrays of inexpensive disks, SIGMOD 1988, level 5.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moe_ft.arithmetic import ceil_div, round_up
from moe_ft.errors import PlanError
from moe_ft.format.identity import Family
from moe_ft.planning.recovery import Version
from moe_ft.topology import Topology

NUM_VERSIONS = 2  # the newest that is whole, and the one that is being made
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityGroup:
    """Ranks on different nodes, ascending. Each keeps the XOR of one stripe of every other one.

    Attributes:
        stripe_bytes: of each rank's region; the last stripes of a small region are empty.
    """

    ranks: tuple[int, ...]
    stripe_bytes: int

    def stripe(self, source: int, holder: int) -> tuple[int, int]:
        """Return the range of a rank's region that another one keeps, in bytes: its start and its end."""
        place = [each for each in self.ranks if each != source].index(holder)
        return place * self.stripe_bytes, (place + 1) * self.stripe_bytes

    def memory_bytes(self, index_bytes: int) -> int:
        """Return the bytes that one rank keeps, with the indexes of the others, one set being replaced."""
        indexes = (NUM_VERSIONS + 1) * (len(self.ranks) - 1) * index_bytes
        return NUM_VERSIONS * self.stripe_bytes + indexes

    def others(self, *ranks: int) -> tuple[int, ...]:
        """Return the ranks of the group but for these."""
        return tuple(each for each in self.ranks if each not in ranks)


def group_of_regions(ranks: Sequence[int], region_bytes: Sequence[int]) -> ParityGroup:
    """Return a group of ranks whose regions have so many bytes."""
    stripe_bytes = ceil_div(max(region_bytes), len(ranks) - 1)
    return ParityGroup(ranks=tuple(sorted(ranks)), stripe_bytes=round_up(stripe_bytes, _PAGE_BYTES))


def smallest_group(num_nodes: int, size: int) -> int:
    """Return the nodes of the smallest group of a job; see `node_groups`."""
    return num_nodes // ceil_div(num_nodes, size)


def node_groups(nodes: Sequence[str], size: int, domains: Mapping[str, str]) -> list[list[str]]:
    """Divide nodes into as few groups of at most `size` as there must be, as equal as they can be.

    Args:
        domains: failure domains by node, whose nodes go to different groups as far as there are enough.

    Raises:
        PlanError: if there is only one node, or a group would have one.
    """
    num_groups = ceil_div(len(nodes), size)
    if smallest_group(len(nodes), size) < 2:
        raise PlanError(
            f"parity over {size} nodes needs groups of 2 at least, and the job has {len(nodes)}"
        )
    order = sorted(nodes, key=lambda node: domains.get(node, ""))  # stable
    return [order[first::num_groups] for first in range(num_groups)]


def place_parity(topology: Topology, size: int) -> tuple[ParityGroup, ...]:
    """Return ``[rank]`` the group of each rank: one rank of each node of a group of nodes.

    Args:
        size: most nodes of a group.

    Raises:
        PlanError: as `node_groups`, or if the nodes of a group have different numbers of ranks.
    """
    domains = {info.node: info.domain for info in topology.ranks}
    on_node: dict[str, list[int]] = defaultdict(list)
    for info in topology.ranks:
        on_node[info.node].append(info.rank)
    found: dict[int, ParityGroup] = {}
    for nodes in node_groups(topology.nodes, size, domains):
        if len({len(on_node[node]) for node in nodes}) > 1:
            counts = ", ".join(f"{node} has {len(on_node[node])}" for node in nodes)
            raise PlanError(f"parity needs as many ranks on each node of a group: {counts}")
        for ranks in zip(*(on_node[node] for node in nodes), strict=True):
            sizes = [topology.ranks[rank].region_bytes for rank in ranks]
            found |= dict.fromkeys(ranks, group_of_regions(ranks, sizes))
    return tuple(found[info.rank] for info in topology.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundParity:
    """A whole version of parity.

    Attributes:
        path: of its index, in the memory directory of the node.
        family: of the states that it is made of.
    """

    holder: int
    group: ParityGroup
    node: str
    path: str
    family: Family


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuilding:
    """A rank whose state is made again.

    Attributes:
        parities: of all other ranks of its group.
        held: by rank, the states of these in their own memory, from the same window.
    """

    rank: int
    parities: tuple[FoundParity, ...]
    held: Mapping[int, Version]


def plan_rebuilding(
    num_ranks: int, held: Iterable[Version], parities: Sequence[FoundParity]
) -> list[Rebuilding]:
    """Return the ranks whose state must be made again, so that all have the newest that they can have.

    None are returned where all have it, or where two ranks of a group lack it.

    Args:
        held: whole windows of ranks in their own memory.
    """
    by_family: dict[Family, dict[int, Version]] = defaultdict(dict)
    for each in held:
        by_family[each.family][each.rank] = each
    for family in sorted(by_family, key=lambda each: (each[2], each), reverse=True):
        here = by_family[family]
        found = [
            _rebuilding(rank, here, [each for each in parities if each.family == family])
            for rank in range(num_ranks)
            if rank not in here
        ]
        if None not in found:
            return [each for each in found if each is not None]
    return []


def _rebuilding(
    rank: int, held: Mapping[int, Version], parities: Sequence[FoundParity]
) -> Rebuilding | None:
    # After a restart on other nodes the groups are others, and an older one's parity may still be there.
    for group in {each.group for each in parities if rank in each.group.ranks}:
        others = group.others(rank)
        found = {each.holder: each for each in parities if each.group == group}
        if all(each in found and each in held for each in others):
            return Rebuilding(
                rank=rank,
                parities=tuple(found[each] for each in others),
                held={each: held[each] for each in others},
            )
    return None
