"""Extents of mapped files, the one rule of which of them may be filled, and the versions that targets have.

An extent may be filled if no reason keeps it and nobody fills it. Indexes that name it are removed first; an
index that lies in an extent that is kept is removed as soon as nothing keeps that.

This file decides and holds no bytes: engine/memory/regions.py maps them. Each owner of memory has a store of
its own: engine/memory/region_stores.py (windows and units, also those kept for other ranks),
engine/breakpoints.py, engine/boundary/log.py.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

from moe_ft.errors import SnapshotError


class SizeClass(Enum):
    """Kind of an extent: all of one kind have one size."""

    WINDOW = auto()  # a region
    UNIT = auto()  # a slot of the pool
    SENDS = auto()  # of one iteration, for the boundary log
    STATE = auto()  # a breakpoint


class Reason(Enum):
    """Reason to keep extents; each has one set of them at a time."""

    COMPLETE = auto()  # the newest window that all ranks have
    RECOVERED = auto()  # what a start has recovered, until a window is complete
    PERSISTING = auto()  # the writer reads them
    BREAKPOINT = auto()  # a recovery rests on it, until a window is complete
    REPLAY = auto()  # likewise, on logs of what was run again
    SENDER = auto()  # the owner of a replica has said so


# A window that all ranks complete is kept in place of these.
REPLACED = frozenset({Reason.COMPLETE, Reason.RECOVERED})


@dataclass(frozen=True, slots=True)
class Extent:
    """One of the extents of a size class, by its number."""

    size_class: SizeClass
    number: int


class Store:
    """Extents, the indexes that name them, and who keeps or fills them. Owned by one thread at a time.

    An index is known by its home: the extent that its file lies next to.
    """

    def __init__(
        self, counts: Mapping[SizeClass, int], remove: Callable[[Extent], None] = lambda home: None
    ) -> None:
        """Take the number of extents of each size class, and what removes the index of a home."""
        self._remove = remove
        self._extents = {
            each: [Extent(each, number) for number in range(count)]
            for each, count in counts.items()
        }
        self._names: dict[Extent, frozenset[Extent]] = {}  # by home, that of the oldest index first
        self._kept: dict[Reason, frozenset[Extent]] = {}
        self._outdated: set[Extent] = set()  # homes that are kept, of indexes that name what went
        self._filling: frozenset[Extent] = frozenset()

    @property
    def filling(self) -> frozenset[Extent]:
        """Extents that somebody fills."""
        return self._filling

    def named(self, home: Extent) -> frozenset[Extent]:
        """Return the extents that an index names; none if there is no index."""
        return self._names.get(home, frozenset())

    def is_kept(self, extent: Extent) -> bool:
        """Return whether a reason keeps an extent."""
        return any(extent in kept for kept in self._kept.values())

    def free(self, size_class: SizeClass) -> list[Extent]:
        """Return the extents that may be filled: those that no index names, then what the oldest name."""
        age = {
            extent: number
            for number, extents in enumerate(self._names.values(), 1)
            for extent in extents
        }
        free = [
            each
            for each in self._extents.get(size_class, ())
            if each not in self._filling and not self.is_kept(each)
        ]
        return sorted(free, key=lambda each: age.get(each, 0))

    def take(self, size_class: SizeClass, count: int = 1) -> list[Extent]:
        """Return extents to fill, and remove the indexes that name them.

        Raises:
            SnapshotError: if fewer may be filled.
        """
        free = self.free(size_class)
        if len(free) < count:
            raise SnapshotError(
                f"{count} extents of the class {size_class.name.lower()} are needed, {len(free)} of "
                f"{len(self._extents.get(size_class, ()))} may be filled"
            )
        chosen = frozenset(free[:count])
        self._filling |= chosen
        for home in [home for home, names in self._names.items() if names & chosen]:
            if self.is_kept(home):
                self._outdated.add(home)
            else:
                self.drop(home)
        return free[:count]

    def commit(self, home: Extent, others: Iterable[Extent] = ()) -> None:
        """Note that the index of a home was written, which names this extent and others."""
        self._names.pop(home, None)  # it is the newest now
        self._names[home] = frozenset({home, *others})
        self._outdated.discard(home)
        self._filling -= self._names[home]

    def keep(self, reason: Reason, extents: Iterable[Extent]) -> None:
        """Keep extents for a reason, in place of those that it has kept."""
        self._kept[reason] = frozenset(extents)
        for home in [each for each in self._outdated if not self.is_kept(each)]:
            self.drop(home)

    def give_up(self, extents: Iterable[Extent]) -> None:
        """Note that nobody fills extents any longer: they hold nothing."""
        self._filling -= frozenset(extents)

    def drop(self, home: Extent) -> None:
        """Remove an index, whatever keeps it; raises OSError if that cannot be done."""
        self._remove(home)
        self._names.pop(home, None)
        self._outdated.discard(home)

    def has_room(
        self, size_class: SizeClass, count: int = 1, upcoming: Collection[Extent] = ()
    ) -> bool:
        """Return whether so many may be filled once nobody fills any, however that ends.

        Args:
            upcoming: what the index will name for which extents are being filled. It is given up, or it is
                kept in place of what is complete or was recovered.
        """
        others = [kept for reason, kept in self._kept.items() if reason not in REPLACED]
        if_given_up = frozenset(chain.from_iterable(self._kept.values()))
        if_complete = frozenset(upcoming).union(*others)
        return all(
            sum(each not in used for each in self._extents.get(size_class, ())) >= count
            for used in (if_given_up, if_complete)
        )


class TargetVersions[Target: Hashable, Unit: Hashable, Version]:
    """Versions of units that each target is known to have, on which what it is sent builds.

    Owned by one thread.
    """

    def __init__(self) -> None:
        self._known: dict[Target, dict[Unit, Version]] = {}

    def lacking(self, target: Target, wanted: Mapping[Unit, Version]) -> list[Unit]:
        """Return the units of which a target may not have the version that is wanted, in their order."""
        known = self.known(target)
        return [unit for unit, version in wanted.items() if known.get(unit) != version]

    def known(self, target: Target) -> Mapping[Unit, Version]:
        """Return the versions that a target has; none if that is not known."""
        return self._known.get(target, {})

    def note(self, target: Target, versions: Mapping[Unit, Version]) -> None:
        """Note that a target has these versions; it may overwrite all others."""
        self._known[target] = dict(versions)

    def forget(self, target: Target) -> None:
        """Note that nobody knows any longer what a target has."""
        self._known.pop(target, None)
