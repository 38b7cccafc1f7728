"""Regions and slots of one rank as extents: what a window may fill, and what is kept of it.

The rule is moe_ft/store/extents.py; this file says what each reason keeps. A slot is reused when no index
that counts needs it any longer.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from moe_ft.engine.memory.pool import FetchedVersion, Pool
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import SnapshotError
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.store.extents import Extent, Reason, SizeClass, Store


class WindowStore:
    """Regions and slots of one rank, and who keeps them. Owned by the training thread.

    The copy worker fills what was taken for the window under way, of which there is one at most.

    Attributes:
        regions: all of them.
        newest: versions of units in the slots that all ranks have agreed on, by name.
    """

    def __init__(self, regions: Sequence[Region], pool: Pool | None) -> None:
        self.regions, self._pool = regions, pool
        self._homes = {
            region: Extent(SizeClass.WINDOW, place) for place, region in enumerate(regions)
        }
        self._store = Store(
            {SizeClass.WINDOW: len(regions), SizeClass.UNIT: pool.num_slots if pool else 0},
            lambda home: regions[home.number].invalidate(),
        )
        self.newest: dict[str, UnitEntry] = {}

    def _slots(self, entries: Iterable[UnitEntry]) -> set[Extent]:
        pool = self._pool
        return {
            Extent(SizeClass.UNIT, pool.slot_at(entry.offset))
            for entry in entries
            if pool is not None and pool.has_place(entry)
        }

    def find(self) -> None:
        """Note what regions hold that another start has filled."""
        found: list[tuple[tuple[bool, int], Region, set[Extent]]] = []
        for region in self.regions:
            try:
                index = region.index(Index)
            except OSError:
                self._store.commit(self._homes[region])  # nothing can use it, if there is one
                continue
            age = region.iteration is not None, index.iteration  # what is recovered is filled last
            found.append((age, region, self._slots(index.units.values())))
        for _, region, slots in sorted(found, key=lambda each: each[0]):
            self._store.commit(self._homes[region], slots)

    def take_region(self) -> Region:
        """Return a region to fill, whose index is gone; raises SnapshotError if all are needed."""
        (extent,) = self._store.take(SizeClass.WINDOW)
        return self.regions[extent.number]

    def take_slots(self, count: int) -> list[int]:
        """Return where slots begin that are to be filled, in bytes; see `Store.take`."""
        if not count:
            return []
        assert self._pool is not None
        taken = self._store.take(SizeClass.UNIT, count)
        return [self._pool.offset_of(each.number) for each in taken]

    def carried(self, without: Collection[str]) -> dict[str, UnitEntry]:
        """Return the newest versions of units that the next snapshot does not hold."""
        return {name: entry for name, entry in self.newest.items() if name not in without}

    def has_room(self, num_slots: int, upcoming: Collection[str]) -> bool:
        """Return whether there will be a region and slots for the window after the one under way.

        Args:
            upcoming: the units in slots that the window under way holds.
        """
        names: set[Extent] = set()
        if self._store.filling:
            names = {*self._store.filling, *self._slots(self.carried(upcoming).values())}
        return self._store.has_room(SizeClass.WINDOW, 1, names) and self._store.has_room(
            SizeClass.UNIT, num_slots, names
        )

    def complete(self, region: Region, entries: Mapping[str, UnitEntry]) -> None:
        """Keep a window that all ranks have, whose index names these versions, in place of all before."""
        self.newest = dict(entries)
        self._commit(region)
        self._store.keep(Reason.COMPLETE, self._store.named(self._homes[region]))
        self._store.keep(Reason.RECOVERED, ())

    def give_up(self, region: Region) -> None:
        """Keep nothing of the window under way, which some rank does not have."""
        if region.iteration is not None:
            self._commit(region)
        self._store.give_up(self._store.filling)

    def _commit(self, region: Region) -> None:
        names = self._store.filling | self._slots(self.newest.values())
        self._store.commit(self._homes[region], names)

    def keep_persisting(self, region: Region, names: Collection[str]) -> list[str]:
        """Keep a region and the newest versions of units while they are written; return those that exist.

        Other slots that its index names may be filled meanwhile; then it goes when the writer is done.
        """
        persisting = {name: self.newest[name] for name in names if name in self.newest}
        kept = {self._homes[region], *self._slots(persisting.values())}
        self._store.keep(Reason.PERSISTING, kept)
        return sorted(persisting)

    def end_persisting(self) -> None:
        """Note that nothing is written any more."""
        self._store.keep(Reason.PERSISTING, ())

    def refill(self, damaged: Region | None, fill: Callable[[Region], bool]) -> Region | None:
        """Fill a region with what was recovered, after removing the index of one that may be damaged.

        Returns None if it could not be filled.
        """
        if damaged is not None:
            self._store.drop(self._homes[damaged])
        region = self.take_region()
        is_filled = fill(region)
        self.give_up(region)
        return region if is_filled else None

    def keep_recovered(
        self, regions: Sequence[Region], restored: Mapping[str, FetchedVersion]
    ) -> None:
        """Keep what a recovery rests on until a window is complete, and have the pool hold its versions.

        Those that the pool holds stay where they are, and those that lay at the same place in a replica
        get that place: the replica's index then agrees with this pool.
        """
        homes, pool = {self._homes[region] for region in regions}, self._pool
        self.newest = {name: each.entry for name, each in restored.items() if each.is_in_pool}
        self._keep_recovered(homes)
        others = [(name, each) for name, each in restored.items() if not each.is_in_pool]
        for name, version in sorted(
            others, key=lambda each: pool is None or each[1].entry.file != pool.name
        ):
            if pool is not None:
                self.newest[name] = self._copy_in(pool, version.entry, version.content)
                self._keep_recovered(homes)
        self._store.give_up(self._store.filling)

    def _keep_recovered(self, homes: set[Extent]) -> None:
        self._store.keep(Reason.RECOVERED, homes | self._slots(self.newest.values()))

    def _copy_in(self, pool: Pool, entry: UnitEntry, content: memoryview) -> UnitEntry:
        if entry.num_bytes > pool.slot_bytes:
            raise SnapshotError(
                f"a version of {entry.num_bytes} bytes does not fit a slot of {pool.slot_bytes}"
            )
        (slot,) = self._store.take(SizeClass.UNIT, 1, preferred=self._slots([entry]))
        offset = pool.offset_of(slot.number)
        pool.mapping[offset : offset + entry.num_bytes] = content
        return msgspec.structs.replace(entry, file=pool.name, offset=offset)
