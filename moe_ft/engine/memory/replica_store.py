"""Replicas of one rank in the memory of another: which may be overwritten, and what they hold.

The rule is moe_ft/store/extents.py. The rank that sends them says which iteration is kept, and in which slots
its units go; engine/links/server.py receives them.
"""

from collections.abc import Collection

import msgspec

from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import encode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index, IndexHead
from moe_ft.planning.recovery import Family, family_of
from moe_ft.store.extents import Extent, Reason, SizeClass, Store


class ReplicaStore:
    """Memory for the replicas of one rank, which is open. Owned by one connection's thread at a time."""

    def __init__(self, memory: ReplicaMemory) -> None:
        self.pool = memory.pool
        self._regions = memory.regions
        self._store = Store(
            {
                SizeClass.WINDOW: len(memory.regions),
                SizeClass.UNIT: memory.pool.num_slots if memory.pool else 0,
            },
            lambda home: memory.regions[home.number].invalidate(),
        )
        self._held: dict[Extent, str] = {}  # checksums of the versions in slots
        for region in sorted(memory.regions, key=_worth):  # the least valuable is overwritten first
            try:
                self._note(region, region.index(Index))
            except OSError:
                self._store.commit(self._home(region))  # nothing can use it, if there is one

    @property
    def region_bytes(self) -> int:
        """Bytes of each region."""
        return self._regions[0].num_bytes

    def _home(self, region: Region) -> Extent:
        return Extent(SizeClass.WINDOW, self._regions.index(region))

    def _slots(self, units: Collection[UnitEntry]) -> dict[Extent, str]:
        """Return the checksums of the versions that lie in slots, by slot."""
        pool = self.pool
        return {
            Extent(SizeClass.UNIT, pool.slot_at(unit.offset)): unit.checksum
            for unit in units
            if pool is not None and pool.has_place(unit)
        }

    def begin(
        self,
        index: Index,
        slots: Collection[UnitEntry],
        keep_iteration: int | None,
        *,
        continues: bool,
    ) -> Region:
        """Return the region that a replica goes into; what names the memory that it fills is gone then.

        Args:
            index: of the replica.
            slots: the units that come with it, which have a place in the pool.
            keep_iteration: the last iteration of the window that must not be overwritten.
            continues: whether it adds a snapshot to the region that has those before.

        Raises:
            CorruptStateError: if no region has the snapshots before.
            SnapshotError: if what must be kept would be overwritten.
        """
        self._store.give_up(self._store.filling)  # of one that did not arrive
        self._keep(keep_iteration)
        going_on = self._continued(index) if continues else None
        changed = [
            extent
            for extent, found in self._slots(slots).items()
            if self._held.get(extent) != found
        ]
        self._store.fill(changed)
        for extent in changed:
            self._held.pop(extent, None)
        if going_on is not None:
            return going_on
        (home,) = self._store.take(SizeClass.WINDOW)
        return self._regions[home.number]

    def _keep(self, iteration: int | None) -> None:
        kept = [each for each in self._regions if None is not each.iteration == iteration]
        if len(kept) == len(self._regions) > 1:
            # By different families of snapshots: a recovery prefers the best.
            kept.remove(min(kept, key=_worth))
        names = [self._store.named(self._home(region)) for region in kept]
        self._store.keep(Reason.SENDER, frozenset().union(*names))

    def _continued(self, index: Index) -> Region:
        for region in self._regions:
            if region.iteration == index.iteration - 1 and _goes_on(region, index):
                return region
        raise CorruptStateError(f"there is no window that iteration {index.iteration} continues")

    def commit(self, region: Region, index: Index) -> None:
        """Make what arrived a replica; raises OSError if its index has no room."""
        named = msgspec.structs.replace(index, file=region.data_path.name)
        region.commit(encode(named), index.iteration)
        self._note(region, index)

    def _note(self, region: Region, index: Index) -> None:
        slots = self._slots(index.units.values())
        self._held |= slots
        self._store.commit(self._home(region), slots)

    def drop(self, region: Region) -> None:
        """Give up a region in which something corrupt has arrived."""
        self._store.drop(self._home(region))


def _worth(region: Region) -> tuple[int, Family | tuple[()]]:
    """Return how much a recovery would prefer what a region holds to what others do."""
    try:
        index = region.index(IndexHead)
    except OSError:
        return 1, ()
    if not index.is_whole:
        return 0, ()  # it would still look like the beginning of something
    return 2, family_of(index.iteration, index.window, index.identity.history)


def _goes_on(region: Region, index: Index) -> bool:
    try:
        found = region.index(IndexHead)
    except OSError:
        return False
    before = (index.identity, index.window, index.num_snapshots - 1, index.header_checksum)
    return before == (found.identity, found.window, found.num_snapshots, found.header_checksum)
