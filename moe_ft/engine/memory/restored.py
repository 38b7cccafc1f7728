"""Restored state in a rank's regions, until the first new window is complete and replaces it.

After the loss of a node, the state of its new ranks is in the memory of one other node only, and so is the
state of the ranks whose replicas it kept. A second loss before the next window is complete must not be the
end, and a long window takes a while. So state that was read from a peer is kept here too, and sent to peers
that lack it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from moe_ft.engine.links.peers import OutgoingReplica
from moe_ft.engine.memory.layout import lay_out_again
from moe_ft.engine.memory.parity import end_of
from moe_ft.engine.memory.region_stores import FetchedVersion, WindowStore
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import SnapshotError
from moe_ft.format.encoding import encode
from moe_ft.format.identity import Family, Start
from moe_ft.format.index import Index, IndexHead


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedWindow:
    """A window as it was read from somewhere else: all its units lie in its region, here by offset."""

    index: Index
    contents: Mapping[int, memoryview]


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """Recovered state of this rank, as the engine takes it over: what to keep, and what peers lack.

    Attributes:
        persisted_index: this rank's index in the newest complete checkpoint on storage, relative to the
            persist directory; empty if there is none, None if storage could not be read.
        family: of the versions that regions keep until a new window is complete, as format/identity.py has
            it: of those that were put back, or the newest before breakpoints.
        replay_from: the first iteration that a stage may have to run again until then.
        needs_breakpoint: whether the recovery rests on breakpoints, which must be kept as long.
        is_on_storage: whether storage has this state as one snapshot of everything.
        window: what was read, unless all of it lies in a region of this rank, or storage has it too.
        is_moved: whether another layout wrote it. No rank has its own state anywhere then, and the first
            window is due at once.
        peers_without: peers of this rank that do not have it; none if storage has.
    """

    indexes: frozenset[Path]
    rotating: Mapping[str, FetchedVersion]
    persisted_index: str | None
    family: Family
    is_on_storage: bool = False
    window: FetchedWindow | None = None
    peers_without: frozenset[int] = frozenset()
    needs_breakpoint: bool = False
    is_moved: bool = False
    replay_from: int = 0

    @property
    def start(self) -> Start:
        """The start that wrote what regions keep."""
        return self.family[-1]

    @property
    def iteration(self) -> int:
        """The iteration of what regions keep."""
        return self.family[0]


def keep_restored(store: WindowStore, restored: Handover) -> list[Region]:
    """Return the regions that the restored state rests on, which are kept; that of the state is first."""
    found = [region for region in store.regions if region.iteration is not None]
    found.sort(key=lambda region: _family_of(region) != restored.family)  # stable
    if restored.window is not None:
        # Refill the region even if it already holds this state: its copy may be damaged.
        is_here = bool(found) and _family_of(found[0]) == restored.family
        fill = partial(_fill, window=restored.window)
        region = store.refill(found.pop(0) if is_here else None, fill)
        found = [each for each in found if each.iteration is not None and each is not region]
        if region is not None:
            found.insert(0, region)
    found += [
        region
        for region in store.regions
        if region.index_path in restored.indexes and region not in found
    ]
    kept = found[: len(store.regions) - 1]  # one must be free to be filled
    store.keep_recovered(kept, restored.rotating)
    return kept


def _family_of(region: Region) -> Family:
    index = region.index(IndexHead)
    return index.identity.family(index.iteration, index.window)


def _fill(region: Region, window: FetchedWindow) -> bool:
    """Copy a window into a region as it lay in its own; return False if that cannot be done."""
    index = window.index
    if index.file_bytes != region.num_bytes:
        return False
    try:
        header = lay_out_again(index).header
        region.begin(header)
        for offset, content in window.contents.items():
            region.mapping[offset : offset + len(content)] = content
        named = msgspec.structs.replace(index, file=region.data_path.name)
        region.commit(encode(named), index.iteration)
    except (SnapshotError, OSError):  # laid out by another version, or no room for the index
        return False
    return True


def replica_to_send(kept: Sequence[Region], restored: Handover) -> OutgoingReplica | None:
    """Return what peers get that lack the restored state; None if none does, or no region holds all of it."""
    if not restored.peers_without or not kept or _family_of(kept[0]) != restored.family:
        return None
    region = kept[0]
    index = region.index(Index)
    if any(unit.file for unit in index.units.values()):
        return None  # it is in more than the region
    return OutgoingReplica(
        region=region,
        pool=None,
        index=index,
        start_byte=0,
        end_byte=end_of(index),
        keep_iteration=None,
        peers=restored.peers_without,
    )
