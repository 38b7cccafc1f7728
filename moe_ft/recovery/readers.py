"""Readers of state from any tier, memory, a peer's memory and storage, and units that are read with them.

A unit version is verified against its index.
"""

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self, override

from moe_ft.engine.links.messages import GetParts
from moe_ft.engine.links.parts import spread
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.memory.regions import MappedFile
from moe_ft.engine.persist.soundness import read_index
from moe_ft.errors import CorruptStateError
from moe_ft.files.patience import note_progress
from moe_ft.files.private_files import open_private, read_private
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum, decode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index, check_header
from moe_ft.planning.recovery import Source, Tier, Version
from moe_ft.units import Level, UnitId


class StateReader:
    """Reads one rank's state at one place. All methods raise OSError if it cannot be read."""

    index: Index

    def read(self, unit: UnitEntry) -> memoryview:
        """Return the bytes of a unit version that the index names."""
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
        raise NotImplementedError

    def stays(self, unit: UnitEntry) -> bool:
        """Return whether a unit version is in memory that this rank will use again."""
        return False

    def close(self) -> None:
        """Release files and connections."""


def read_unit(
    reader: StateReader, name: str, position: int | None = None
) -> tuple[UnitEntry, memoryview]:
    """Return a unit version and its bytes.

    Args:
        position: number of the snapshot that has it at COMPUTE; None for FULL.

    Raises:
        CorruptStateError: if the unit is not there, or its bytes do not match its checksum.
        OSError: if it cannot be read.
    """
    index = reader.index
    unit = (index.units if position is None else index.compute[position]).get(name)
    if unit is None or unit.level != (Level.FULL if position is None else Level.COMPUTE):
        raise CorruptStateError(f"there is no unit {name}")
    content = reader.read(unit)
    if len(content) != unit.num_bytes:
        raise CorruptStateError(f"unit {name} is cut short")
    if checksum(content) != unit.checksum:
        raise CorruptStateError(f"unit {name} does not match its checksum")
    note_progress()
    return unit, content


class MemoryReader(StateReader):
    """Reads a region or replica in this node's memory, and the pool in the same directory.

    Closing leaves files mapped: callers may still hold parts of them.
    """

    def __init__(self, path: Path, reusable: Iterable[MappedFile] = ()) -> None:
        """Open an index.

        Files in its directory that this rank will use again are read through their own mappings, which stay.
        """
        self.index = decode(read_private(path), Index, str(path))
        self._directory = path.parent
        self._reused: set[str] = set()
        self._views: dict[str, memoryview] = {}
        for file in reusable:
            if file.data_path.parent == path.parent and file.is_in_place:
                file.open()
                self._reused.add(file.data_path.name)
                self._views[file.data_path.name] = memoryview(file.mapping)
        self._mapped(self.index.file)

    def _mapped(self, name: str) -> memoryview:
        if name not in self._views:
            path = self._directory / name
            with open_private(path) as file:
                try:
                    # Private, because torch wants a writable buffer; nothing is written to it.
                    mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except ValueError as error:
                    raise CorruptStateError(f"{path} is empty") from error
            self._views[name] = memoryview(mapping)
        return self._views[name]

    @override
    def stays(self, unit: UnitEntry) -> bool:
        return bool(unit.file) and unit.file in self._reused

    @override
    def read(self, unit: UnitEntry) -> memoryview:
        view = self._mapped(unit.file or self.index.file)
        return view[unit.offset : unit.offset + unit.num_bytes]

    @override
    def read_header(self) -> memoryview:
        return self._mapped(self.index.file)[: self.index.header_bytes]


class PeerReader(StateReader):
    """Reads a region or replica in another node's memory."""

    def __init__(self, connection: PeerConnection, version: Version) -> None:
        self._connection, self._path = connection, version.path
        content = bytes(connection.get(version.path))
        self.index = decode(content, Index, f"{version.path} of node {version.node}")
        self._directory = PurePosixPath(version.path).parent

    @override
    def read(self, unit: UnitEntry) -> memoryview:
        path = str(self._directory / (unit.file or self.index.file))
        return memoryview(self._connection.get(path, unit.offset, unit.num_bytes))

    @override
    def read_parts(
        self, name: str, position: int | None, unit: UnitEntry, ranges: Sequence[tuple[int, int]]
    ) -> memoryview | None:
        at = -1 if position is None else position
        request = GetParts(self._path, name, at, unit.checksum, tuple(ranges))
        return spread(unit.num_bytes, ranges, self._connection.get_parts(request, unit.num_bytes))

    @override
    def read_header(self) -> memoryview:
        path = str(self._directory / self.index.file)
        return memoryview(self._connection.get(path, 0, self.index.header_bytes))

    @override
    def close(self) -> None:
        self._connection.close()


class StorageReader(StateReader):
    """Reads a persisted file."""

    def __init__(self, storage: Storage, version: Version) -> None:
        self._storage = storage
        assert version.file is not None
        self.index = read_index(
            storage.read(version.path),
            version.file,
            iteration=version.iteration,
            history=version.history,
            window=version.window,
            where=f"{storage.url}/{version.path}",
        )
        self._own = str(PurePosixPath(version.path).with_name(self.index.file))

    @override
    def read(self, unit: UnitEntry) -> memoryview:
        # The file may be that of an older checkpoint.
        content = self._storage.read(unit.file or self._own, unit.offset, unit.num_bytes)
        return memoryview(bytearray(content))

    @override
    def read_header(self) -> memoryview:
        return memoryview(self._storage.read(self._own, 0, self.index.header_bytes))


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
        place = "storage" if version.node is None else f"memory of node {version.node}"
        self.problems.append(f"{place}, {version.path}: {error}")

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

    @property
    def tier(self) -> Tier:
        """Tier of its source."""
        return self.source.tier
