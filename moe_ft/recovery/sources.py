"""Reading state back from any tier: one interface for memory, a peer's memory and storage."""

import mmap
from pathlib import Path, PurePosixPath
from typing import Protocol

from moe_ft.engine.peers import PeerConnection
from moe_ft.engine.regions import Region
from moe_ft.engine.storage import Storage
from moe_ft.errors import CorruptStateError
from moe_ft.formats import Index, UnitEntry, checksum, decode
from moe_ft.planning.recovery import Version


class StateReader(Protocol):
    """Reads one rank's state at one place. All methods raise OSError if it cannot be read."""

    index: Index

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Return a range of the data file."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


def read_unit(reader: StateReader, name: str) -> tuple[UnitEntry, memoryview]:
    """Return a unit version and its bytes.

    Raises:
        CorruptStateError: if the unit is not there, or its bytes do not match its checksum.
        OSError: if it cannot be read.
    """
    unit = reader.index.units.get(name)
    if unit is None:
        raise CorruptStateError(f"there is no unit {name}")
    content = reader.read(unit.offset, unit.num_bytes)
    if len(content) != unit.num_bytes:
        raise CorruptStateError(f"unit {name} is cut short")
    if checksum(content) != unit.checksum:
        raise CorruptStateError(f"unit {name} does not match its checksum")
    return unit, content


class MemoryReader:
    """Reads a region or replica in this node's memory."""

    def __init__(self, node_dir: Path, version: Version) -> None:
        path = node_dir / version.path
        self.index = decode(path.read_bytes(), Index, str(path))
        with (path.parent / self.index.file).open("rb") as file:
            try:
                # Private, because torch wants a writable buffer; nothing is written to it.
                self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise CorruptStateError(f"{path.with_name(self.index.file)} is empty") from error
        self._view = memoryview(self._mapping)

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Return a range, without copying it."""
        return self._view[offset : offset + num_bytes]

    def close(self) -> None:
        """Leave the mapping to the garbage collector: callers may still hold parts of it."""


class RegionReader:
    """Reads one of this rank's own regions, through the mapping that snapshots will use again."""

    def __init__(self, region: Region) -> None:
        self.index = decode(region.index_path.read_bytes(), Index, str(region.index_path))
        region.open()
        self._view = memoryview(region.mapping)

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Return a range, without copying it."""
        return self._view[offset : offset + num_bytes]

    def close(self) -> None:
        """The region stays open."""


class PeerReader:
    """Reads a region or replica in another node's memory."""

    def __init__(self, connection: PeerConnection, version: Version) -> None:
        self._connection = connection
        content = bytes(connection.get(version.path))
        self.index = decode(content, Index, f"{version.path} of node {version.node}")
        self._data = str(PurePosixPath(version.path).with_name(self.index.file))

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Fetch a range."""
        return memoryview(self._connection.get(self._data, offset, num_bytes))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class StorageReader:
    """Reads a persisted file."""

    def __init__(self, storage: Storage, version: Version) -> None:
        self._storage = storage
        self.index = storage.index(version.path)
        self._data = str(PurePosixPath(version.path).with_name(self.index.file))

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Read a range."""
        return memoryview(bytearray(self._storage.read(self._data, offset, num_bytes)))

    def close(self) -> None:
        """Nothing is open."""
