"""The pool: slots for versions of units that only some snapshots hold, in addition to a rank's regions.

It keeps the newest version of each unit, however long ago it was saved. A slot is reused when no index that
counts needs it any longer. The pool has no index of its own: those of the regions point into it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import override

import msgspec

from moe_ft.arithmetic import round_up
from moe_ft.engine.memory.layout import declare, encode_header
from moe_ft.engine.memory.regions import MappedFile, Region, Role
from moe_ft.errors import SnapshotError
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.format.packings import ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FetchedVersion:
    """A unit version that a recovery puts back."""

    entry: UnitEntry
    content: memoryview
    is_in_pool: bool


class Pool(MappedFile):
    """Slots of equal size in one file, which is a valid safetensors file.

    Slots that a snapshot fills belong to the copy worker until it is complete, all others to the training
    thread. The slots of a replica belong to the threads of its connections.

    Its name holds its geometry: a start with other settings makes another one and can still read this.
    """

    def __init__(self, directory: Path, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = round_up(slot_bytes, ALIGNMENT_BYTES)
        self.num_slots = num_slots
        self._header = _header(self.slot_bytes, num_slots)
        name = f"pool_{num_slots}x{self.slot_bytes}.safetensors"
        super().__init__(directory / name, len(self._header) + num_slots * self.slot_bytes)

    @property
    def name(self) -> str:
        """The file's name, as unit entries have it."""
        return self.data_path.name

    @override
    def open(self) -> None:
        super().open()
        self.mapping[: len(self._header)] = self._header

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins, in bytes from the start of the file."""
        return len(self._header) + slot * self.slot_bytes

    def slot_at(self, offset: int) -> int:
        """Return the slot that begins at an offset."""
        return (offset - len(self._header)) // self.slot_bytes

    def has_place(self, unit: UnitEntry) -> bool:
        """Return whether a unit version is said to be in one of the slots."""
        slot = self.slot_at(unit.offset)
        return (
            unit.file == self.name
            and 0 <= slot < self.num_slots
            and unit.offset == self.offset_of(slot)
            and unit.num_bytes <= self.slot_bytes
        )

    def find_free(self, count: int, used: Collection[int]) -> list[int]:
        """Return slots that are not used; raises SnapshotError if the pool is too small for so many."""
        free = [slot for slot in range(self.num_slots) if slot not in used][:count]
        if len(free) < count:
            raise SnapshotError(
                f"{self.name}: {count} slots are needed, {len(free)} of {self.num_slots} are free"
            )
        return free


def _header(slot_bytes: int, num_slots: int) -> bytes:
    slots = {
        f"slot/{slot}": declare("U8", [slot_bytes], slot * slot_bytes, (slot + 1) * slot_bytes)
        for slot in range(num_slots)
    }
    return encode_header(slots)


class PoolVersions:
    """Versions of units in the slots, and the slots that may be used again. Owned by the training thread.

    The newest version of each unit that all ranks have agreed on is needed, and so are those that are being
    written to storage. The snapshot under way has found its slots already.
    """

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self.newest: dict[str, UnitEntry] = {}
        self._persisting: dict[str, UnitEntry] = {}
        self._named: dict[Path, frozenset[int]] = {}
        self._newest_slots: frozenset[int] = frozenset()
        self._retained: frozenset[int] = frozenset()

    @property
    def is_in_use(self) -> bool:
        """True if there is a pool."""
        return self._pool is not None

    def _slots(self, entries: Iterable[UnitEntry]) -> frozenset[int]:
        assert self._pool is not None
        return frozenset(self._pool.slot_at(entry.offset) for entry in entries)

    def find_free(self, count: int) -> list[int]:
        """Return slots for the versions of the next snapshot; see `Pool.find_free`."""
        if self._pool is None or count == 0:
            return []
        used = self._newest_slots | self._slots(self._persisting.values())
        if self._pool.num_slots - len(used | self._retained) >= count:
            used |= self._retained
        return self._pool.find_free(count, used)

    def has_room(self, count: int, upcoming: Collection[str]) -> bool:
        """Return whether `find_free` will find slots for the snapshot after that of the upcoming units."""
        if self._pool is None:
            return True
        persisting = self._slots(self._persisting.values())
        replaced = self._slots(self.newest[name] for name in upcoming if name in self.newest)
        used = persisting | self._newest_slots
        used_then = persisting | (self._newest_slots - replaced)
        most = max(len(used), len(used_then) + len(upcoming))
        return self._pool.num_slots - most >= count

    def carried(self, without: Collection[str]) -> dict[str, UnitEntry]:
        """Return the newest versions of units that the next snapshot does not hold."""
        return {name: entry for name, entry in self.newest.items() if name not in without}

    def settle(self, index_path: Path, entries: Mapping[str, UnitEntry]) -> None:
        """All ranks have a snapshot, whose index names these versions."""
        if self._pool is not None:
            self.newest = dict(entries)
            self._retained = frozenset()
            self._named[index_path] = self._newest_slots = self._slots(entries.values())

    def keep_persisting(self, names: Collection[str]) -> list[str]:
        """Keep the newest versions of units while they are written; return those that have one."""
        self._persisting = {name: self.newest[name] for name in names if name in self.newest}
        return sorted(self._persisting)

    def end_persisting(self) -> None:
        """Nothing is written any more."""
        self._persisting = {}

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins."""
        assert self._pool is not None
        return self._pool.offset_of(slot)

    def outdate(self, filled: Region, regions: Iterable[Region], slots: Collection[int]) -> None:
        """Remove the indexes of free regions that name a version in slots that are about to be filled.

        Where that is not known, they may. The region that is about to be filled names nothing any more.
        """
        self._named.pop(filled.index_path, None)
        for region in regions:
            named = self._named.get(region.index_path)
            if (
                slots
                and region.role is Role.FREE
                and (named is None or not named.isdisjoint(slots))
            ):
                region.invalidate()

    def adopt(self, restored: Mapping[str, FetchedVersion]) -> None:
        """Have the pool hold the versions that a recovery put back, wherever they came from.

        Those that the pool holds stay where they are, and those that lay at the same place in a replica
        get that place: the replica's index then agrees with this pool.
        """
        pool = self._pool
        if pool is None:
            return
        ordered = sorted(
            restored.items(),
            key=lambda each: (not each[1].is_in_pool, each[1].entry.file != pool.name),
        )
        for name, version in ordered:
            entry = version.entry
            if not version.is_in_pool:
                entry = self._copy_in(pool, entry, version.content)
            self.newest[name] = entry
            self._newest_slots |= {pool.slot_at(entry.offset)}

    def retain(self, indexes: Iterable[Index]) -> None:
        """Keep what indexes name until the next snapshot is complete: a recovery rests on them."""
        if self._pool is not None:
            self._retained = self._slots(
                unit
                for index in indexes
                for unit in index.units.values()
                if self._pool.has_place(unit)
            )

    def _copy_in(self, pool: Pool, entry: UnitEntry, content: memoryview) -> UnitEntry:
        if entry.num_bytes > pool.slot_bytes:
            raise SnapshotError(
                f"a version of {entry.num_bytes} bytes does not fit a slot of {pool.slot_bytes}"
            )
        used = self._newest_slots | self._retained
        is_free = pool.has_place(entry) and pool.slot_at(entry.offset) not in used
        slot = pool.slot_at(entry.offset) if is_free else self.find_free(1)[0]
        offset = pool.offset_of(slot)
        pool.mapping[offset : offset + entry.num_bytes] = content
        return msgspec.structs.replace(entry, file=pool.name, offset=offset)
