"""Parity that a rank keeps of the other ranks of its group, in files next to its regions.

A version is made of the states of all of them in one window: each adds the stripe of its region that is this
rank's, with XOR, and the version counts when all have. planning/parity.py has the groups, and
recovery/rebuild.py makes a lost rank's state again.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import override

import numpy as np

from moe_ft.engine.memory.regions import IndexedFile
from moe_ft.errors import CorruptStateError, SnapshotError
from moe_ft.format.encoding import Body, decodable, encode
from moe_ft.format.identity import Start
from moe_ft.format.index import Index
from moe_ft.format.records import Count, Length
from moe_ft.planning.parity import NUM_VERSIONS, ParityGroup
from moe_ft.planning.recovery import Family, family_of

PARITY_NAME = r"parity_\d+\.(xor|json)"


@decodable
class ParityIndex(Body, frozen=True, forbid_unknown_fields=True):
    """Description of one version of parity.

    Attributes:
        holder: rank that keeps it.
        ranks, stripe_bytes: of its group.
        iteration, window: of the states.
        sources: index of each other rank of the group, ascending; what it names lies in that rank's region.
    """

    holder: Count
    ranks: tuple[Count, ...]
    stripe_bytes: Count
    iteration: Count
    window: Length
    sources: tuple[Index, ...]

    def source(self, rank: int) -> Index:
        """Return the index of a rank of the group."""
        return next(each for each in self.sources if each.rank == rank)

    @property
    def group(self) -> ParityGroup:
        """The group, as it was when this was made."""
        return ParityGroup(ranks=self.ranks, stripe_bytes=self.stripe_bytes)

    @property
    def family(self) -> Family:
        """Family of the states."""
        return family_of(self.iteration, self.window, self.identity.history)

    @override
    def check(self, where: str) -> None:
        super().check(where)
        others = [each for each in self.ranks if each != self.holder]
        if [each.rank for each in self.sources] != others or len(others) != len(self.ranks) - 1:
            raise CorruptStateError(f"{where} is not made of what its group has")
        for each in self.sources:
            each.check(where)
            if _family_of(each) != self.family:
                raise CorruptStateError(f"{where} is made of different states")


@decodable
class ParityHead(Body, frozen=True):
    """The part of it that identifies it; decoding skips the rest. See `ParityIndex`."""

    holder: Count
    ranks: tuple[Count, ...]
    stripe_bytes: Count
    iteration: Count
    window: Length


def _family_of(index: Index) -> Family:
    return family_of(index.iteration, index.window, index.identity.history)


def end_of(index: Index) -> int:
    """Return the byte after the last one that an index names in its own file."""
    ends = (unit.offset + unit.num_bytes for _, unit in index.entries() if not unit.file)
    return max(ends, default=index.header_bytes)


class ParityFile(IndexedFile):
    """One version of parity. Owned by the threads of peers' connections while it is made."""

    def is_of(self, start: Start, iteration: int, group: ParityGroup | None) -> bool:
        """Return whether it is whole, of states of an iteration that a start wrote, and of a group."""
        found = read_parity(self)
        return (
            found is not None
            and (found.identity.start, found.iteration) == (start, iteration)
            and found.group == group
        )

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


_Window = tuple[Start, int, int]  # its writer, its first iteration, and its snapshots


@dataclass(kw_only=True, slots=True, eq=False)
class Version:
    """A version that is being made.

    Attributes:
        sources: index of each rank that has added something, the newest.
        is_broken: whether something was added only in part, so that it will never be whole.
    """

    window: _Window
    file: ParityFile
    sources: dict[int, Index] = field(default_factory=dict)
    is_broken: bool = False


class ParityStore:
    """Versions of parity, in files that are open. Used by the threads of all connections."""

    def __init__(self, files: Sequence[ParityFile], holder: int, group: ParityGroup) -> None:
        self._files, self._holder, self.group = files, holder, group
        self._lock = threading.Lock()
        # Besides the window under way what was recovered, which ranks send before.
        self._making: dict[_Window, Version] = {}
        self._whole = {file: found for file in files if (found := read_parity(file)) is not None}

    def begin(self, index: Index, start_byte: int, keep_iteration: int | None) -> Version | None:
        """Return the version to which a rank adds a snapshot; None if it is in there already.

        Args:
            index: of the rank's window up to that snapshot.
            start_byte: of the region, 0 for the whole window up to there.
            keep_iteration: the end of the newest complete window, which must not be overwritten.

        Raises:
            CorruptStateError: if it does not follow what the rank has added, or the version is broken.
            SnapshotError: if there is no room besides what must be kept.
        """
        first = index.iteration - index.num_snapshots + 1
        window = index.identity.start, first, index.window
        with self._lock:
            for whole in self._whole.values():
                if any(_is_same(each, index) for each in whole.sources):
                    return None
            if window not in self._making:
                self._making[window] = Version(window=window, file=self._clear(keep_iteration))
            version = self._making[window]
            before = version.sources.get(index.rank)
            if before is not None and _is_same(before, index):
                return None  # its sender has not heard that it was added
            if version.is_broken:
                raise CorruptStateError(
                    "this window's parity is incomplete: the next one is whole again"
                )
            num_before = 0 if before is None else before.num_snapshots
            if num_before != (index.num_snapshots - 1 if start_byte else 0):
                version.is_broken = True
                raise CorruptStateError(
                    f"rank {index.rank} sends snapshot {index.num_snapshots} of a window of which parity has "
                    f"{num_before}"
                )
            return version

    def _clear(self, keep_iteration: int | None) -> ParityFile:
        free = [
            each
            for each in self._files
            if each.iteration is None or each.iteration != keep_iteration
        ]
        if not free:
            raise SnapshotError(f"all parity is of iteration {keep_iteration}, which must be kept")
        under_way = [each.file for each in self._making.values()]

        def worth(file: ParityFile) -> tuple[bool, int, bool]:
            whole = self._whole.get(file)
            return whole is not None, whole.iteration if whole else 0, file in under_way

        file = min(free, key=worth)
        for window in [each.window for each in self._making.values() if each.file is file]:
            del self._making[window]
        file.invalidate()
        self._whole.pop(file, None)
        np.frombuffer(memoryview(file.mapping), np.uint8)[:] = 0
        return file

    def add(self, version: Version, at: int, content: memoryview) -> None:
        """Add a piece of a stripe; raises ConnectionError if another version is being made meanwhile."""
        with self._lock:
            if version is not self._making.get(version.window):
                raise ConnectionError("a newer window has begun")
            version.file.add(at, content)

    def finish(self, version: Version, index: Index) -> None:
        """Note that a rank has added a snapshot; the last one of all makes the version count.

        Raises:
            CorruptStateError: if the version is broken, or given up.
            OSError: if there is no room for its index.
        """
        with self._lock:
            if version.is_broken or version is not self._making.get(version.window):
                raise CorruptStateError(
                    "this window's parity is incomplete: the next one is whole again"
                )
            version.sources[index.rank] = index
            others = self.group.others(self._holder)
            if any(
                each not in version.sources or not version.sources[each].is_whole for each in others
            ):
                return
            whole = ParityIndex(
                format=index.format,
                identity=index.identity,
                holder=self._holder,
                ranks=self.group.ranks,
                stripe_bytes=self.group.stripe_bytes,
                iteration=index.iteration,
                window=index.window,
                sources=tuple(version.sources[each] for each in others),
            )
            version.file.commit(encode(whole), index.iteration)
            self._whole[version.file] = whole
            del self._making[version.window]


def read_parity(file: ParityFile) -> ParityIndex | None:
    """Return the index of a version; None without one that can be read."""
    try:
        return file.index(ParityIndex)
    except OSError:
        return None


def _is_same(known: Index, sent: Index) -> bool:
    """Return whether two indexes are of the same rank's state, byte for byte."""
    one, other = ((_family_of(each), each.rank, each.header_checksum) for each in (known, sent))
    return one == other and [(name, unit.checksum) for name, unit in known.entries()] == [
        (name, unit.checksum) for name, unit in sent.entries()
    ]
