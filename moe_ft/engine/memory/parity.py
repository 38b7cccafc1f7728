"""Parity that a rank keeps of the other ranks of its group, in files next to its regions.

A version is made of the states of all of them in one window: each adds the stripe of its region that is this
rank's, with XOR, and the version counts when all have. Which version may be overwritten is decided by
moe_ft/store/extents.py, as for replicas. planning/parity.py has the groups, and recovery/rebuild.py makes a
lost rank's state again.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import override

import numpy as np

from moe_ft.engine.memory.regions import IndexedFile
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import Body, decodable, encode
from moe_ft.format.identity import Family
from moe_ft.format.index import Index
from moe_ft.format.records import Count, Length
from moe_ft.planning.parity import NUM_VERSIONS, ParityGroup
from moe_ft.store.extents import Extent, Reason, SizeClass, Store

PARITY_NAME = r"parity_\d+\.(xor|json)"
_INCOMPLETE = "this window's parity is incomplete: the next one is whole again"


@decodable
class ParityHead(Body, frozen=True):
    """The part of an index of parity that identifies it; decoding skips the rest. See `ParityIndex`."""

    holder: Count
    group: ParityGroup
    iteration: Count
    window: Length

    @property
    def family(self) -> Family:
        """Family of the states."""
        return self.identity.family(self.iteration, self.window)


@decodable
class ParityIndex(ParityHead, frozen=True, forbid_unknown_fields=True):
    """Description of one version of parity.

    Attributes:
        holder: rank that keeps it.
        group: as it was when this was made.
        iteration, window: of the states.
        sources: index of each other rank of the group, ascending; what it names lies in that rank's region.
    """

    sources: tuple[Index, ...]

    def source(self, rank: int) -> Index:
        """Return the index of a rank of the group."""
        return next(each for each in self.sources if each.rank == rank)

    @override
    def check(self, where: str) -> None:
        super().check(where)
        others, ranks = self.group.others(self.holder), self.group.ranks
        if [each.rank for each in self.sources] != [*others] or len(others) != len(ranks) - 1:
            raise CorruptStateError(f"{where} is not made of what its group has")
        for each in self.sources:
            each.check(where)
            if each.identity.family(each.iteration, each.window) != self.family:
                raise CorruptStateError(f"{where} is made of different states")


def end_of(index: Index) -> int:
    """Return the byte after the last one that an index names in its own file."""
    ends = (unit.offset + unit.num_bytes for _, unit in index.entries() if not unit.file)
    return max(ends, default=index.header_bytes)


class ParityFile(IndexedFile):
    """One version of parity. Owned by the threads of peers' connections while it is made."""

    def head(self) -> ParityHead | None:
        """Return what identifies the version; None without one that can be read."""
        try:
            return self.index(ParityHead)
        except OSError:
            return None

    def add(self, at: int, content: memoryview) -> None:
        """Add bytes with XOR."""
        with memoryview(self.mapping)[at : at + len(content)] as here:
            target = np.frombuffer(here, np.uint8)
            np.bitwise_xor(target, np.frombuffer(content, np.uint8), out=target)
            del target


def parity_files(directory: Path, group: ParityGroup) -> tuple[ParityFile, ...]:
    """Return the files of a rank of a group."""
    return tuple(
        ParityFile(directory / f"parity_{number}.xor", group.stripe_bytes)
        for number in range(NUM_VERSIONS)
    )


def other_file(path: PurePath) -> PurePath:
    """Return the data file next to a version that has this index, which may be overwritten."""
    number = int(path.stem.removeprefix("parity_"))
    return path.with_name(f"parity_{(number + 1) % NUM_VERSIONS}.xor")


@dataclass(kw_only=True, slots=True, eq=False)
class ParityVersion:
    """A version that is being made, or the newest one that is whole.

    Attributes:
        window: first iteration, minus the number of snapshots, and writer: the greater, the later. At the end
            of training the last window may begin again, with one snapshot.
        sources: index of each rank that has added something, the newest.
        is_broken: whether something was added only in part, so that it will never be whole.
    """

    window: Family
    home: Extent
    file: ParityFile
    sources: dict[int, Index] = field(default_factory=dict)
    is_broken: bool = False


class ParityStore:
    """Versions of parity, in files that are open. Used by the threads of all connections."""

    def __init__(self, files: Sequence[ParityFile], holder: int, group: ParityGroup) -> None:
        self._files = files
        self.holder = holder
        self.group = group
        self._lock = threading.Lock()
        self._newest: ParityVersion | None = None
        self._is_closed = False
        self._store = Store(
            {SizeClass.WINDOW: len(files)}, lambda home: files[home.number].invalidate()
        )
        there = [
            (head.family, number) for number, each in enumerate(files) if (head := each.head())
        ]
        for _, number in sorted(there):
            self._store.commit(Extent(SizeClass.WINDOW, number))

    def begin(
        self, index: Index, start_byte: int, keep_iteration: int | None
    ) -> ParityVersion | None:
        """Return the version to which a rank adds a snapshot; None if it is in there already.

        Args:
            index: of the rank's window up to that snapshot.
            start_byte: of the region, 0 for the whole window up to there.
            keep_iteration: the end of the newest complete window, which must not be overwritten.

        Raises:
            CorruptStateError: if it does not follow what the rank has added, or will never be whole.
            SnapshotError: if there is no room besides what must be kept.
        """
        first = index.iteration - index.num_snapshots + 1
        window = index.identity.family(first, index.window)
        with self._lock:
            if self._is_closed:
                raise CorruptStateError("this rank has ended")
            version = self._newest
            if version is None or version.window != window:
                version = self._begin(window, keep_iteration)
            before = version.sources.get(index.rank)
            if before is not None and (before.units, before.compute) == (
                index.units,
                index.compute,
            ):
                return None  # its sender has not heard that it was added
            if version.is_broken:
                raise CorruptStateError(_INCOMPLETE)
            num_before = 0 if before is None else before.num_snapshots
            if num_before != (index.num_snapshots - 1 if start_byte else 0):
                version.is_broken = True
                raise CorruptStateError(
                    f"rank {index.rank} sends snapshot {index.num_snapshots} of a window of which parity has "
                    f"{num_before}"
                )
            return version

    def _begin(self, window: Family, keep_iteration: int | None) -> ParityVersion:
        """Begin a version, and give up the one that is under way."""
        if self._newest is not None and window < self._newest.window:
            raise CorruptStateError(_INCOMPLETE)  # the others have begun a later window
        self._store.give_up(self._store.filling)
        kept = [
            n for n, each in enumerate(self._files) if None is not each.iteration == keep_iteration
        ]
        self._store.keep(Reason.SENDER, [Extent(SizeClass.WINDOW, number) for number in kept])
        (home,) = self._store.take(SizeClass.WINDOW)
        file = self._files[home.number]
        file.invalidate()
        np.frombuffer(file.view, np.uint8)[:] = 0
        self._newest = ParityVersion(window=window, home=home, file=file)
        return self._newest

    def close(self) -> None:
        """Let nothing be added or made whole any more: the files may go."""
        with self._lock:
            self._is_closed = True
            self._newest = None

    def add(self, version: ParityVersion, at: int, content: memoryview) -> None:
        """Add a piece of a stripe; raises ConnectionError if another version is being made meanwhile."""
        with self._lock:
            if version is not self._newest:
                raise ConnectionError("a newer window has begun")
            version.file.add(at, content)

    def finish(self, version: ParityVersion, index: Index) -> None:
        """Note that a rank has added a snapshot; the last one of all makes the version count.

        Raises:
            CorruptStateError: if the version is broken, or given up.
            OSError: if there is no room for its index.
        """
        with self._lock:
            if version.is_broken or version is not self._newest:
                raise CorruptStateError(_INCOMPLETE)
            version.sources[index.rank] = index
            sources = [*map(version.sources.get, self.group.others(self.holder))]
            whole = tuple(each for each in sources if each is not None and each.is_whole)
            if len(whole) < len(sources):
                return
            made = ParityIndex(
                format=index.format,
                identity=index.identity,
                holder=self.holder,
                group=self.group,
                iteration=index.iteration,
                window=index.window,
                sources=whole,
            )
            version.file.commit(encode(made), index.iteration)
            self._store.commit(version.home)
