"""Readers of state from any tier, memory, a peer's memory and storage, and units that are read with them.

Recovery, conversions, `diff` and `verify` read with them. What is wrong with bytes says format/index.py.
A unit version is verified against its index.
"""

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Self, override

from moe_ft.engine.links.messages import GetParts
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.memory.regions import MappedFile
from moe_ft.engine.persist.soundness import check_is_finite, read_index, read_index_file
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import open_private, open_regular, read_private
from moe_ft.files.progress import note_progress
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import decode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index, check_header, check_unit
from moe_ft.planning.recovery import Source, Version
from moe_ft.units import Level, UnitId

_PIECE_BYTES = 16 << 20
_MOST_KEPT_BYTES = 64 << 20


class StateReader:
    """Reads one rank's state at one place, by one thread. All methods raise OSError if it cannot be read.

    Attributes:
        index: what is there.
        where: begins messages; empty where the caller says it.
    """

    def __init__(self, index: Index, where: str) -> None:
        self.index = index
        self.where = where
        self._verified: set[str] = set()
        self._kept: tuple[str, memoryview] = ("", memoryview(b""))

    def read(self, file: str, offset: int, num_bytes: int) -> memoryview:
        """Return a range of a file that a unit names, as it is; an empty name is the index's own file."""
        raise NotImplementedError

    def read_parts(
        self, name: str, position: int | None, unit: UnitEntry, ranges: Sequence[tuple[int, int]]
    ) -> memoryview | None:
        """Return a unit of which only ranges are there, from a place that has verified all of it.

        Args:
            position: number of the snapshot that has it at COMPUTE; None for FULL.
            ranges: in bytes, from the start of the unit.

        Returns:
            None if nobody can verify it there: it must be read whole.
        """
        return None

    def read_header(self) -> memoryview:
        """Return the safetensors header of the index's own file."""
        return self.read("", 0, self.index.header_bytes)

    def read_part(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """Return a range of a unit at FULL, from its start; all of it is verified before.

        One unit at a time stays in memory, a large one only as far as it is asked for.
        """
        unit = self.index.units[name]
        if unit.num_bytes <= _MOST_KEPT_BYTES:
            if name != self._kept[0]:
                self._kept = ("", memoryview(b""))  # first, to have one at a time
                self._kept = (name, read_unit(self, name)[1])
            return self._kept[1][offset : offset + num_bytes]
        if name not in self._verified:
            starts = range(0, unit.num_bytes, _PIECE_BYTES)
            sizes = (min(_PIECE_BYTES, unit.num_bytes - start) for start in starts)
            pieces = map(
                self.read, repeat(unit.file), (unit.offset + each for each in starts), sizes
            )
            check_unit(name, unit, pieces, self.where)
            self._verified.add(name)
        return self.read(unit.file, unit.offset + offset, num_bytes)

    def check(self) -> None:
        """Read everything; raise CorruptStateError unless it is intact, and its numbers are finite."""
        check_header(self.index, self.read_header(), self.where)
        for name, unit in self.index.entries():
            content = self.read(unit.file, unit.offset, unit.num_bytes)
            check_unit(name, unit, (content,), self.where)
            check_is_finite(name, unit, content)

    def stays(self, unit: UnitEntry) -> bool:
        """Return whether a unit version is in memory that this rank will use again."""
        return False

    def close(self) -> None:
        """Release files and connections."""


def read_unit(
    reader: StateReader,
    name: str,
    position: int | None = None,
    version: tuple[int, int] | None = None,
) -> tuple[UnitEntry, memoryview]:
    """Return a unit version and its bytes.

    Args:
        position: number of the snapshot that has it at COMPUTE; None for FULL.
        version: see `UnitEntry.version`; None for the newest.

    Raises:
        CorruptStateError: if the unit is not there, or its bytes do not match its checksum.
        OSError: if it cannot be read.
    """
    found = reader.index.versions_of(name, position)
    unit = next((each for each in found if version in (None, each.version)), None)
    if unit is None or unit.level != (Level.FULL if position is None else Level.COMPUTE):
        raise CorruptStateError(f"there is no unit {name}")
    content = reader.read(unit.file, unit.offset, unit.num_bytes)
    check_unit(name, unit, (content,), reader.where)
    note_progress()
    return unit, content


def _map(path: Path, opened: Callable[[Path], BinaryIO]) -> memoryview:
    """Return the bytes of a file, which stay mapped as long as anything shows them."""
    with opened(path) as file:
        try:
            # Private, because torch wants a writable buffer; nothing is written to it.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except ValueError as error:
            raise CorruptStateError(f"{path} is empty") from error


class MemoryReader(StateReader):
    """Reads a region or replica in this node's memory, and the pool in the same directory.

    Closing leaves files mapped: callers may still hold parts of them.
    """

    def __init__(self, path: Path, reusable: Iterable[MappedFile] = (), where: str = "") -> None:
        """Open an index.

        Files in its directory that this rank will use again are read through their own mappings, which stay.
        """
        super().__init__(decode(read_private(path), Index, str(path)), where)
        self._directory = path.parent
        self._reused: set[str] = set()
        self._views: dict[str, memoryview] = {}
        for file in reusable:
            if file.data_path.parent == path.parent and file.is_in_place:
                file.open()
                self._reused.add(file.data_path.name)
                self._views[file.data_path.name] = memoryview(file.mapping)

    def _mapped(self, name: str) -> memoryview:
        if name not in self._views:
            self._views[name] = _map(self._directory / name, open_private)
        return self._views[name]

    @override
    def stays(self, unit: UnitEntry) -> bool:
        return bool(unit.file) and unit.file in self._reused

    @override
    def read(self, file: str, offset: int, num_bytes: int) -> memoryview:
        return self._mapped(file or self.index.file)[offset : offset + num_bytes]


class PeerReader(StateReader):
    """Reads a region or replica in another node's memory."""

    def __init__(self, connection: PeerConnection, version: Version) -> None:
        self._connection = connection
        self._path = version.path
        content = bytes(connection.get(version.path))
        super().__init__(decode(content, Index, f"{version.path} of node {version.node}"), "")
        self._directory = PurePosixPath(version.path).parent

    @override
    def read(self, file: str, offset: int, num_bytes: int) -> memoryview:
        path = str(self._directory / (file or self.index.file))
        return memoryview(self._connection.get(path, offset, num_bytes))

    @override
    def read_parts(
        self, name: str, position: int | None, unit: UnitEntry, ranges: Sequence[tuple[int, int]]
    ) -> memoryview | None:
        at = -1 if position is None else position
        request = GetParts(self._path, name, at, unit.checksum, tuple(ranges))
        return self._connection.get_parts(request, unit.num_bytes)

    @override
    def close(self) -> None:
        self._connection.close()


class StorageReader(StateReader):
    """Reads a persisted file, and those of older checkpoints that its index names."""

    def __init__(
        self,
        storage: Storage,
        index: Index,
        path: str,
        where: str = "",
        *,
        maps_local_files: bool = False,
    ) -> None:
        """Take an index that was checked, and the path of its data file.

        Args:
            maps_local_files: whether nothing is copied of files on this machine. No deadline counts then,
                and a file that is cut meanwhile ends the process.
        """
        super().__init__(index, where)
        self._storage = storage
        self._own = path
        self._maps_local_files = maps_local_files
        self._views: dict[str, memoryview] = {}

    @classmethod
    def open(cls, storage: Storage, version: Version) -> Self:
        """Return the reader of a file of a checkpoint; raises OSError unless the manifest names its index."""
        assert version.file is not None
        index = read_index(
            read_index_file(storage, version.file),
            version.file,
            iteration=version.iteration,
            history=version.history,
            window=version.window,
            where=f"{storage.url}/{version.path}",
        )
        return cls(storage, index, version.file.data)

    @override
    def read(self, file: str, offset: int, num_bytes: int) -> memoryview:
        name = file or self._own
        local = self._storage.local_path(name) if self._maps_local_files else None
        if local is None:
            # A copy, because torch wants a writable buffer.
            return memoryview(bytearray(self._storage.read(name, offset, num_bytes)))
        if name not in self._views:
            self._views[name] = _map(local, open_regular)
        return self._views[name][offset : offset + num_bytes]


Opener = Callable[[Source], StateReader]


class Readers:
    """Sources of one rank, each opened when it is first needed. Used by the training thread only.

    Attributes:
        problems: reasons for which a source could not be opened or read.
    """

    def __init__(self, open_source: Opener) -> None:
        self._open_source = open_source
        self._readers: dict[Source, StateReader | None] = {}
        self.problems: list[str] = []

    def open(self, source: Source) -> StateReader | None:
        """Return the reader of a source; None if it cannot be read, or now holds something else."""
        if source not in self._readers:
            try:
                reader = self._readers[source] = self._open_source(source)
                _check_is_planned(reader, source)
                check_header(reader.index, reader.read_header(), source.version.path)
            except Exception as error:  # of any kind: another source may have the state
                self._readers[source] = None
                self.say(source, error)
        return self._readers[source]

    def say(self, source: Source, error: Exception) -> None:
        """Remember a problem of a source."""
        version = source.version
        self.problems.append(f"{version.place}, {version.path}: {error}")

    def __enter__(self) -> Self:
        """Return these readers, which the end of the with statement closes."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close all sources."""
        for reader in self._readers.values():
            if reader is not None:
                reader.close()


def _check_is_planned(reader: StateReader, source: Source) -> None:
    """Raise CorruptStateError if a place no longer holds what the recovery was planned with."""
    index, version = reader.index, source.version
    found = (index.rank, index.iteration, index.identity.lineage, index.identity.history)
    is_same = found == (version.rank, version.iteration, version.lineage, version.history)
    if not is_same or (index.window, index.is_whole) != (version.window, True):
        raise CorruptStateError(
            f"it now holds iteration {index.iteration} of rank {index.rank}, not what was planned"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FetchedUnit:
    """A unit version that was read and verified.

    Attributes:
        stays: whether its bytes lie in memory of this rank that keeps them.
    """

    unit: UnitId
    source: Source
    entry: UnitEntry
    content: memoryview
    stays: bool
