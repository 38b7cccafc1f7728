"""Regions and slots as extents: a rank's own, which windows fill, and those that it keeps for another rank.

The rule is moe_ft/store/extents.py; this file says what each reason keeps. A slot is reused when no index
that counts needs it any longer.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import override

import msgspec

from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.errors import CorruptStateError, SnapshotError
from moe_ft.format.encoding import encode
from moe_ft.format.entries import EntryPlace, UnitEntry
from moe_ft.format.identity import Family
from moe_ft.format.index import Index, IndexHead, IndexPlaces
from moe_ft.store.extents import Extent, Reason, SizeClass, Store

Units = Mapping[str, UnitEntry | EntryPlace]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FetchedVersion:
    """A unit version that a recovery puts back."""

    entry: UnitEntry
    content: memoryview
    is_in_pool: bool


class RegionStore:
    """Regions and slots as extents; the index of a region is at home there."""

    def __init__(self, regions: Sequence[Region], pool: UnitPool | None) -> None:
        self.regions = regions
        self.pool = pool
        self._store = Store(
            {SizeClass.WINDOW: len(regions), SizeClass.UNIT: pool.num_slots if pool else 0},
            lambda home: regions[home.number].invalidate(),
        )

    def find(self) -> None:
        """Note what regions hold that another start has filled: the least valuable is overwritten first."""
        for region in sorted(self.regions, key=_worth):
            units: Units = {}
            retained: Units = {}
            with suppress(OSError):  # nothing can use it, if there is one
                places = region.index(IndexPlaces)
                units = places.units if self.pool else {}
                retained = places.retained if self.pool else {}
            self._note(region, units, retained)

    def _note(self, region: Region, units: Units, retained: Units) -> None:
        names = {*self._slots(units), *self._slots(retained)}
        self._store.commit(self._home(region), names)

    def _home(self, region: Region) -> Extent:
        return Extent(SizeClass.WINDOW, self.regions.index(region))

    def _slots(self, units: Units) -> dict[Extent, tuple[str, str]]:
        """Return what lies in slots, by slot: the unit, and the checksum of its version."""
        pool = self.pool
        return {
            Extent(SizeClass.UNIT, pool.slot_at(unit.offset)): (name, unit.checksum)
            for name, unit in units.items()
            if pool is not None and pool.has_place(unit)
        }

    def take_region(self) -> Region:
        """Return a region to fill, whose index is gone; raises SnapshotError if all are needed."""
        (extent,) = self._store.take(SizeClass.WINDOW)
        return self.regions[extent.number]

    def take_slots(self, count: int) -> list[int]:
        """Return where slots begin that are to be filled, in bytes; see `Store.take`."""
        taken = self._store.take(SizeClass.UNIT, count)
        return [self.pool.offset_of(each.number) for each in taken if self.pool]


class WindowStore(RegionStore):
    """Regions and slots of one rank, and who keeps them. Owned by the training thread.

    The copy worker fills what was taken for the window under way, of which there is one at most.

    Attributes:
        newest: versions of units in the slots that all ranks have agreed on, by name.
    """

    def __init__(self, regions: Sequence[Region], pool: UnitPool | None) -> None:
        super().__init__(regions, pool)
        self.newest: dict[str, UnitEntry] = {}
        self._chosen: Mapping[str, UnitEntry] | None = None  # by the strategy, for peers

    @property
    def at_peers(self) -> Mapping[str, UnitEntry]:
        """Versions of units that peers have, or get whatever they lack: the newest, if none were chosen."""
        return self.newest if self._chosen is None else self._chosen

    def carried(self, without: Collection[str]) -> dict[str, UnitEntry]:
        """Return the newest versions of units that the next snapshot does not hold."""
        return {name: entry for name, entry in self.newest.items() if name not in without}

    def has_room(self, num_slots: int, upcoming: Collection[str], retained: Units) -> bool:
        """Return whether there will be a region and slots for the window after the one under way.

        Args:
            upcoming: the units in slots that the window under way holds.
            retained: older versions of units that its index names, because peers have them.
        """
        names: set[Extent] = set()
        if self._store.filling:
            names = {*self._store.filling, *self._slots(self.carried(upcoming))}
            names |= self._slots(retained).keys()
        return self._store.has_room(SizeClass.WINDOW, 1, names) and self._store.has_room(
            SizeClass.UNIT, num_slots, names
        )

    def complete(
        self,
        region: Region,
        entries: Mapping[str, UnitEntry],
        retained: Units,
        at_peers: Mapping[str, UnitEntry] | None,
    ) -> None:
        """Keep a window that all ranks have in place of all before.

        Args:
            entries, retained: newest versions of units that its index names, and older ones.
            at_peers: versions that peers have now; None if those are the newest.
        """
        self.newest = dict(entries)
        self._chosen = at_peers
        self._commit(region, retained)
        self._store.keep(Reason.COMPLETE, self._store.named(self._home(region)))
        self._store.keep(Reason.RECOVERED, ())

    def give_up(self, region: Region) -> None:
        """Keep nothing of the window under way, which some rank does not have."""
        if region.iteration is not None:
            self._commit(region, self._chosen or {})
        self._store.give_up(self._store.filling)

    def _commit(self, region: Region, retained: Units) -> None:
        names = {*self._store.filling, *self._slots(self.newest), *self._slots(retained)}
        self._store.commit(self._home(region), names)

    def keep_persisting(self, region: Region, names: Collection[str]) -> list[str]:
        """Keep a region and the newest versions of units while they are written; return those that exist.

        Other slots that its index names may be filled meanwhile; then it goes when the writer is done.
        """
        persisting = {name: self.newest[name] for name in names if name in self.newest}
        self._store.keep(Reason.PERSISTING, {self._home(region), *self._slots(persisting)})
        return sorted(persisting)

    def end_persisting(self) -> None:
        """Note that nothing is written any more."""
        self._store.keep(Reason.PERSISTING, ())

    def refill(self, damaged: Region | None, fill: Callable[[Region], bool]) -> Region | None:
        """Fill a region with what was recovered, after removing the index of one that may be damaged.

        Returns None if it could not be filled.
        """
        if damaged is not None:
            self._store.drop(self._home(damaged))
        region = self.take_region()
        is_filled = fill(region)
        self.give_up(region)
        return region if is_filled else None

    def keep_recovered(
        self, regions: Iterable[Region], restored: Mapping[str, FetchedVersion]
    ) -> None:
        """Keep what a recovery rests on until a window is complete, and have the pool hold its versions."""
        homes, pool = {self._home(region) for region in regions}, self.pool
        self.newest = {name: each.entry for name, each in restored.items() if each.is_in_pool}
        self._store.keep(Reason.RECOVERED, homes | self._slots(self.newest).keys())
        for name, each in restored.items():
            if pool is not None and not each.is_in_pool:
                self.newest[name] = self._copy_in(pool, each.entry, each.content)
        self._store.keep(Reason.RECOVERED, homes | self._slots(self.newest).keys())
        self._store.give_up(self._store.filling)

    def _copy_in(self, pool: UnitPool, entry: UnitEntry, content: memoryview) -> UnitEntry:
        if entry.num_bytes > pool.slot_bytes:
            raise SnapshotError(
                f"a version of {entry.num_bytes} bytes does not fit a slot of {pool.slot_bytes}"
            )
        (offset,) = self.take_slots(1)
        pool.mapping[offset : offset + entry.num_bytes] = content
        return msgspec.structs.replace(entry, file=pool.name, offset=offset)


class ReplicaStore(RegionStore):
    """Replicas of one rank, in memory that is open. Owned by one connection's thread at a time.

    The rank that sends them says which iteration is kept; its units get slots here.
    """

    def __init__(self, regions: Sequence[Region], pool: UnitPool | None) -> None:
        self._held: dict[Extent, tuple[str, str]] = {}  # units in slots, and their checksums
        super().__init__(regions, pool)
        self.find()

    @override
    def _note(self, region: Region, units: Units, retained: Units) -> None:
        self._held |= self._slots(units)
        super()._note(region, units, retained)

    def begin(
        self, index: Index, sent: Collection[str], keep_iteration: int | None, *, continues: bool
    ) -> tuple[Region, Index]:
        """Return the region that a replica goes into, and its index with the places of its units here.

        What names the memory that it fills is gone then.

        Args:
            sent: units of the sender's pool that come with it, or that a step makes here.
            keep_iteration: the last iteration of the window that must not be overwritten.
            continues: whether it adds a snapshot to the region that has those before.

        Raises:
            CorruptStateError: if no region has the snapshots before, or a unit has no place.
            SnapshotError: if there is no room besides what must be kept.
        """
        self._store.give_up(self._store.filling)  # of one that did not arrive
        pooled = {name: unit for name, unit in index.units.items() if unit.file}
        here = {held: extent for extent, held in self._held.items()}
        places = {
            name: here[name, unit.checksum]
            for name, unit in pooled.items()
            if (name, unit.checksum) in here
        }
        most_bytes = self.pool.slot_bytes if self.pool else -1
        for name, unit in pooled.items():
            if unit.num_bytes > most_bytes or (name not in places and name not in sent):
                raise CorruptStateError(f"unit {name} has no place in the pool")
        self._keep(keep_iteration, places.values())
        going_on = self._continued(index) if continues else None
        new = [name for name in pooled if name not in places]
        for name, extent in zip(new, self._store.take(SizeClass.UNIT, len(new)), strict=True):
            self._held.pop(extent, None)
            places[name] = extent
        units = {name: self._placed(pooled[name], places[name]) for name in pooled}
        index = msgspec.structs.replace(index, units={**index.units, **units})
        return going_on or self.take_region(), index

    def _placed(self, unit: UnitEntry, extent: Extent) -> UnitEntry:
        assert self.pool is not None
        offset = self.pool.offset_of(extent.number)
        return msgspec.structs.replace(unit, file=self.pool.name, offset=offset)

    def _keep(self, iteration: int | None, carried: Iterable[Extent]) -> None:
        kept = [each for each in self.regions if None is not each.iteration == iteration]
        if len(kept) == len(self.regions) > 1:
            # By different families of snapshots: a recovery prefers the best.
            kept.remove(min(kept, key=_worth))
        names = [self._store.named(self._home(region)) for region in kept]
        self._store.keep(Reason.SENDER, frozenset(carried).union(*names))

    def _continued(self, index: Index) -> Region:
        for region in self.regions:
            if region.iteration == index.iteration - 1 and _goes_on(region, index):
                return region
        raise CorruptStateError(f"there is no window that iteration {index.iteration} continues")

    def base(self, iteration: int, target: Region) -> tuple[Region, Index]:
        """Return the region with the state from which a step makes that of the target, and its index.

        Raises:
            CorruptStateError: if no region has it.
        """
        for region in self.regions:
            if region is not target and region.iteration == iteration:
                return region, region.index(Index)
        raise CorruptStateError(f"iteration {iteration}, on which an update builds, is not here")

    def is_filled(self, unit: UnitEntry) -> bool:
        """Return whether a slot is being filled; what lies in any other one must stay."""
        extents = self._slots({"": unit})
        return not self._store.filling.isdisjoint(extents)

    def commit(self, region: Region, index: Index) -> None:
        """Make what arrived a replica; raises OSError if its index has no room."""
        named = msgspec.structs.replace(index, file=region.data_path.name)
        region.commit(encode(named), index.iteration)
        self._note(region, index.units, {})

    def drop(self, region: Region) -> None:
        """Give up a region in which something corrupt has arrived."""
        self._store.drop(self._home(region))


def _worth(region: Region) -> tuple[bool, int, Family | tuple[()]]:
    """Return how much a recovery would prefer what a region holds: first what this start has recovered."""
    try:
        index = region.index(IndexHead)
    except OSError:
        return False, 1, ()
    if not index.is_whole:
        return False, 0, ()  # it would still look like the beginning of something
    return region.iteration is not None, 2, index.identity.family(index.iteration, index.window)


def _goes_on(region: Region, index: Index) -> bool:
    try:
        found = region.index(IndexHead)
    except OSError:
        return False
    before = (index.identity, index.window, index.num_snapshots - 1, index.header_checksum)
    return before == (found.identity, found.window, found.num_snapshots, found.header_checksum)
