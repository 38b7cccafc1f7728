"""Media of a job's state: how a start finds what is in each, and opens it for a rank.

A further tier is a value (planning/tiers.py), a row here, and a file with what writes, finds and reads it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from moe_ft.engine.links.peers import PeerConnection
from moe_ft.planning.recovery import Source, Version
from moe_ft.planning.tiers import MEMORY, PEER, STORAGE, Tier
from moe_ft.recovery.claim import Claimed
from moe_ft.recovery.inventory import Inventory, look_at_memory, look_at_storage
from moe_ft.recovery.meet import Met
from moe_ft.recovery.readers import MemoryReader, PeerReader, Readers, StateReader, StorageReader
from moe_ft.recovery.site import Site


@dataclass(frozen=True, kw_only=True, slots=True)
class Medium:
    """Keeper of state, in one tier or in two: as ranks of its own node see it, and as others do.

    Attributes:
        find_on_node: returns what a node has. Called on one rank of each node.
        find_for_all: returns what is the same for all nodes. Called on rank 0.
        readers: by tier, opens a version. Called when a rank first reads it; raises OSError.
    """

    find_on_node: Callable[[Site], Inventory] = lambda site: Inventory()
    find_for_all: Callable[[Claimed], Inventory] = lambda claimed: Inventory()
    readers: Mapping[Tier, Callable[[Met, Claimed, Version], StateReader]]


def connect(met: Met, node: str) -> PeerConnection:
    """Return a connection to the server of another node."""
    address = met.site.topology.lowest_on_node(node).address
    assert address is not None
    return PeerConnection(address, met.token, met.config.memory.streams)


def _open_memory(met: Met, claimed: Claimed, version: Version) -> StateReader:
    pool = [claimed.memory.pool] if claimed.memory.pool is not None else []
    # Memory with another layout is kept as it is: nothing of it is used again.
    reusable = () if version.layout else (*claimed.memory.regions, *pool)
    return MemoryReader(met.site.node_dir / version.path, reusable)


def _open_peer(met: Met, _: Claimed, version: Version) -> StateReader:
    assert version.node is not None
    return PeerReader(connect(met, version.node), version)


def _open_storage(_: Met, claimed: Claimed, version: Version) -> StateReader:
    assert claimed.storage is not None
    return StorageReader.open(claimed.storage, version)


MEDIA = [
    Medium(
        find_on_node=lambda site: look_at_memory(site.node_dir, site.node, site.job_id),
        readers={MEMORY: _open_memory, PEER: _open_peer},
    ),
    Medium(
        find_for_all=lambda claimed: (
            Inventory() if claimed.storage is None else look_at_storage(claimed.storage)
        ),
        readers={STORAGE: _open_storage},
    ),
]


def find_on_node(site: Site) -> Inventory:
    """Return the state on a node, in all media."""
    return _merged(medium.find_on_node(site) for medium in MEDIA)


def find_for_all(claimed: Claimed) -> Inventory:
    """Return the state that is the same for all nodes, in all media."""
    return _merged(medium.find_for_all(claimed) for medium in MEDIA)


def _merged(found: Iterator[Inventory]) -> Inventory:
    merged = Inventory()
    for each in found:
        merged.merge(each)
    return merged


def open_readers(met: Met, claimed: Claimed) -> Readers:
    """Return readers of this rank's sources; each source is opened when it is first read."""
    openers = {tier: each for medium in MEDIA for tier, each in medium.readers.items()}

    def open_source(source: Source) -> StateReader:
        return openers[source.tier](met, claimed, source.version)

    return Readers(open_source)
