"""Topology of a job: the node and stage of each rank. Plain values, the same on every rank."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """One rank, as other ranks see it.

    Attributes:
        rank: global rank.
        node: its node id.
        stage: its pipeline rank.
        pid: its process id, on its node.
        address: host and port at which it receives replicas and serves its node's memory; None if it
            does not listen.
        region_bytes: size of one of its regions.
        slot_bytes, num_slots: of its pool; 0 if every snapshot holds every unit.
        breakpoint_bytes: of the region of its breakpoint; 0 without one.
        boundary_slot_bytes, num_boundary_slots: of its boundary log; 0 without one.
        index_bytes, boundary_index_bytes: that the index of a region takes at most, and that of such a slot.
        agent: name of torchrun's agent that has started it; empty without one.
        domain: failure domain of its node, such as a rack; empty if domains are not known.
    """

    rank: int
    node: str
    stage: int
    pid: int
    address: tuple[str, int] | None
    region_bytes: int
    slot_bytes: int = 0
    num_slots: int = 0
    breakpoint_bytes: int = 0
    boundary_slot_bytes: int = 0
    num_boundary_slots: int = 0
    index_bytes: int = 0
    boundary_index_bytes: int = 0
    agent: str = ""
    domain: str = ""

    def memory_bytes(self, num_regions: int) -> int:
        """Return the bytes that this many regions and the pool take, with an index that is being replaced."""
        regions = num_regions * (self.region_bytes + self.index_bytes) + self.index_bytes
        return regions + self.slot_bytes * self.num_slots

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the boundary log, of which there are no replicas."""
        return (self.boundary_slot_bytes + self.boundary_index_bytes) * self.num_boundary_slots

    @property
    def note_bytes(self) -> int:
        """Bytes of small files that are no indexes of regions: notes, and the index of a breakpoint."""
        return self.index_bytes * (2 if self.breakpoint_bytes else 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """All ranks of a job, ordered by global rank."""

    ranks: tuple[RankInfo, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node ids, in the order of their lowest ranks."""
        return tuple(dict.fromkeys(info.node for info in self.ranks))

    @property
    def domains(self) -> tuple[str, ...]:
        """The failure domains, in the order of their lowest ranks; none if they are not known."""
        return tuple(dict.fromkeys(info.domain for info in self.ranks if info.domain))

    def on_node(self, node: str) -> tuple[RankInfo, ...]:
        """Return the ranks of one node, ascending."""
        return tuple(info for info in self.ranks if info.node == node)

    def lowest_on_node(self, node: str) -> RankInfo:
        """Return the rank that does the work that is needed once per node."""
        return self.on_node(node)[0]
