"""What a recovery leaves in a rank's regions, until the first new window is complete and replaces it.

After the loss of a node its new ranks' state is in the memory of one other node, as is the state of the ranks
whose replicas it kept. A second loss before the next window is complete must not be the end, and a sparse
window takes a while: so what was read from a peer is kept here too, and peers that lack it get it.
"""

from collections.abc import Sequence

import msgspec

from moe_ft.engine.context import RestoredState, RestoredWindow
from moe_ft.engine.layout import lay_out_again
from moe_ft.engine.memory import RankMemory
from moe_ft.engine.peers import Replica
from moe_ft.engine.regions import Region, Role
from moe_ft.errors import SnapshotError
from moe_ft.formats import Index, decode, encode


def keep_restored(memory: RankMemory, restored: RestoredState) -> list[Region]:
    """Return the regions that the recovered state rests on, so that they are kept.

    Args:
        memory: of this rank, open.
        restored: what a recovery put back.

    Raises:
        OSError: if the memory directory is full.
    """
    regions = memory.regions
    if restored.window is not None and all(region.iteration is None for region in regions):
        _fill(regions[0], restored.window)
    wanted = [region for region in regions if region.iteration is not None]
    wanted += [
        region
        for region in regions
        if region.index_path in restored.indexes and region not in wanted
    ]
    kept = wanted[: len(regions) - 1]  # one must be free to be filled
    for region in kept:
        region.advance(Role.RECOVERY)
    return kept


def _fill(region: Region, window: RestoredWindow) -> None:
    """Make a region what the one was that a window was read from, if regions are still laid out alike."""
    index = window.index
    if index.file_bytes != region.num_bytes:
        return
    try:
        header = lay_out_again(index).header
    except SnapshotError:
        return
    region.invalidate()
    region.mapping[: len(header)] = header
    for offset, content in window.contents.items():
        region.mapping[offset : offset + len(content)] = content
    named = msgspec.structs.replace(index, file=region.data_path.name)
    region.commit(encode(named), index.iteration)


def replica_to_send(kept: Sequence[Region], restored: RestoredState) -> Replica | None:
    """Return what peers must get that lack what was recovered, None if there is nothing.

    Args:
        kept: of `keep_restored`.
        restored: what a recovery put back.
    """
    if not restored.peers_without or not kept:
        return None
    region = kept[0]
    index = decode(region.index_path.read_bytes(), Index, str(region.index_path))
    if any(unit.file for unit in index.units.values()):
        return None  # it is in more than the region
    ends = (unit.offset + unit.num_bytes for _, unit in index.entries())
    return Replica(
        region=region,
        pool=None,
        index=index,
        start_byte=0,
        end_byte=max(ends, default=index.header_bytes),
        keep_iteration=None,
        peers=restored.peers_without,
    )
