"""File of a rank in a checkpoint: the region, some units of the pool, and references to the rest.

A unit that is not written is in the file of an older checkpoint, or has never been written. No torch.
"""

import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from moe_ft.engine.memory.layout import FileLayout, lay_out
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum, decode
from moe_ft.format.entries import FileEntry, UnitEntry
from moe_ft.format.index import Index
from moe_ft.units import Level, parse_unit


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviousCheckpoint:
    """A rank's index in an older checkpoint."""

    index: Index
    path: str
    checksum: str

    @property
    def data(self) -> str:
        """The path of its data file."""
        return posixpath.join(posixpath.dirname(self.path), self.index.file)


class PreviousCheckpointError(OSError):
    """The older checkpoint that a request builds on cannot be read."""


def read_previous(storage: Storage, path: str) -> PreviousCheckpoint | None:
    """Return what a rank has in an older checkpoint; None without a path.

    Raises PreviousCheckpointError if it, or a file that it names, is not there.
    """
    if not path:
        return None
    try:
        content = storage.read(path)
        index = decode(content, Index, path)
        for file in index.older:
            if not storage.exists(file.data):
                raise FileNotFoundError(file.data)
    except OSError as error:
        raise PreviousCheckpointError(f"{path}: {error}") from error
    return PreviousCheckpoint(index=index, path=path, checksum=checksum(content))


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """A data file that is to be written, and its index.

    Attributes:
        from_file: the units in it, and in which file in memory each is: empty for the region.
        layout: of the file; None if it is the region as it is.
    """

    index: Index
    from_file: Mapping[str, str]
    layout: FileLayout | None

    def pieces(self, index: Index, contents: Mapping[str, memoryview]) -> Iterator[memoryview]:
        """Yield the file's bytes in order."""
        if self.layout is None:
            yield contents[""][: index.file_bytes]
            return
        yield memoryview(self.layout.header)
        end = len(self.layout.header)
        for place in self.layout.units:
            name = str(place.unit)
            unit = index.units[name]
            yield memoryview(bytes(place.offset - end))  # an alignment gap
            yield contents[self.from_file[name]][unit.offset : unit.offset + unit.num_bytes]
            end = place.offset + place.num_bytes
        yield memoryview(bytes(self.layout.num_bytes - end))


def assemble(
    index: Index, rotating: Sequence[str], previous: PreviousCheckpoint | None, file: str
) -> StoredFile:
    """Decide what a rank's file of a checkpoint holds.

    Args:
        previous: what the rank has in the newest checkpoint; units that are not written are found there.
    """
    chosen = set(rotating)
    written = {name: unit for name, unit in index.units.items() if not unit.file or name in chosen}
    from_file = {name: unit.file for name, unit in written.items()}
    in_pool = index.units.keys() - written.keys()
    older_units: dict[str, UnitEntry] = {}
    if previous is not None:  # it may hold others: parts that belong to another rank now
        older_units = {
            name: msgspec.structs.replace(unit, file=unit.file or previous.data)
            for name, unit in previous.index.units.items()
            if name in in_pool
        }
    files = {unit.file for unit in older_units.values()}
    older = tuple(entry for entry in _files_of(previous) if entry.data in files)
    layout = None
    if any(from_file.values()):
        layout = lay_out(
            (parse_unit(name), Level(unit.level), unit.tensors) for name, unit in written.items()
        )
        written = {
            str(place.unit): msgspec.structs.replace(
                written[str(place.unit)], offset=place.offset, file=""
            )
            for place in layout.units
        }
        index = msgspec.structs.replace(
            index,
            file_bytes=layout.num_bytes,
            header_bytes=len(layout.header),
            header_checksum=checksum(layout.header),
        )
    index = msgspec.structs.replace(index, file=file, units={**older_units, **written}, older=older)
    return StoredFile(index=index, from_file=from_file, layout=layout)


def _files_of(previous: PreviousCheckpoint | None) -> Iterator[FileEntry]:
    if previous is None:
        return
    yield FileEntry(
        rank=previous.index.rank,
        index=previous.path,
        index_checksum=previous.checksum,
        data=previous.data,
        num_bytes=previous.index.file_bytes,
    )
    yield from previous.index.older
