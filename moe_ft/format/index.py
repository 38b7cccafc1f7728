"""The index of a data file: the unit versions in the file, the iterations, and the run that wrote it.

A data file is a valid safetensors file; its index is a separate file in the same directory. The entries of an
index are in format/entries.py, its records in format/records.py, its encoding in format/encoding.py. The
bytes of a data file are checked against their checksums here, without any I/O.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import override

import msgspec
import xxhash

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import (
    Body,
    Checksum,
    check_content,
    check_found,
    check_path,
    checksums,
    decodable,
)
from moe_ft.format.entries import (
    EntryHead,
    EntryPlace,
    FileEntry,
    ModelPlaces,
    ParameterEntry,
    UnitEntry,
    tensor_bytes,
)
from moe_ft.format.records import Count, ExpertProgress, IterationRecord, Length

_MOST_HEADER_BYTES = 100_000_000  # as the package safetensors has it


@decodable
class Index(Body, frozen=True, forbid_unknown_fields=True):
    """Description of one data file: a region, a replica or a persisted file.

    Attributes:
        rank: global rank whose state it is.
        iteration: of the snapshot; of the last snapshot in a window.
        file: name of the data file, in the directory of the index.
        header_bytes, header_checksum: of the safetensors header, with its length field and padding.
        units: unit versions by unit name; those of a window are FULL at different iterations.
        records: ``[snapshot]`` of consecutive iterations; the last is the record of `iteration`.
        origins: checksums, by unit name, of this rank's weights in the state that the run began with. A
            unit without a version has not changed since then, or all its changes are lost.
        progress: of the experts of this rank's stage, if a strategy saves only some of them.
        older: files of other checkpoints on storage that hold some of the units.
        window: number of snapshots that together hold every unit.
        num_snapshots: number of these snapshots that the file holds so far.
        compute: ``[snapshot]`` by unit name, the weights that forward uses, of units that only a later
            snapshot of the window holds at FULL.
        complete_iteration: the newest iteration that all ranks were known to have when this was taken; None
            if there was none, and then missing state of other ranks is no loss.
        model: what Megatron's checkpoints hold besides parameters; unset in earlier versions.
        retained: older versions of units in memory, because those are the ones that peers have. Unset
            where there are none.
    """

    rank: Count
    node: str
    iteration: Count
    file: str
    file_bytes: Count
    header_bytes: Count
    header_checksum: Checksum
    units: dict[str, UnitEntry]
    parameters: dict[str, ParameterEntry]
    records: tuple[IterationRecord, ...]
    origins: dict[str, Checksum] = {}
    progress: ExpertProgress | None = None
    older: tuple[FileEntry, ...] = ()
    window: Length = 1
    num_snapshots: Length = 1
    compute: tuple[dict[str, UnitEntry], ...] = ()
    complete_iteration: Count | None = None
    model: ModelPlaces | msgspec.UnsetType = msgspec.UNSET
    retained: dict[str, UnitEntry] | msgspec.UnsetType = msgspec.UNSET

    @property
    def model_places(self) -> ModelPlaces:
        """Tensors and objects that Megatron's checkpoints hold besides parameters, if they are known."""
        return self.model or ModelPlaces()

    @property
    def is_whole(self) -> bool:
        """True if the file holds all snapshots of the window."""
        return self.num_snapshots == self.window

    def entries(self) -> Iterator[tuple[str, UnitEntry]]:
        """Yield all unit versions with the names of their units."""
        yield from self.units.items()
        for units in self.compute:
            yield from units.items()
        yield from (self.retained or {}).items()

    def versions_of(self, name: str, position: int | None) -> list[UnitEntry]:
        """Return the versions of a unit, the newest first.

        Args:
            position: number of the snapshot that has it at COMPUTE; None for FULL.
        """
        places = (
            (self.units, self.retained or {}) if position is None else (self.compute[position],)
        )
        return [units[name] for units in places if name in units]

    @override
    def check(self, where: str) -> None:
        super().check(where)
        _check_file_name(self.file, where)
        for entry in self.older:
            entry.check_paths(where)
        if not self.records or self.records[-1].iteration != self.iteration:
            raise CorruptStateError(f"{where} holds no record of its iteration {self.iteration}")
        if self.header_bytes > min(self.file_bytes, _MOST_HEADER_BYTES):
            raise CorruptStateError(f"{where}: the header reaches beyond the end of its file")
        self._check_window(where)
        self._check_places(where)

    def _check_window(self, where: str) -> None:
        """Check that the snapshots are of consecutive iterations, as many as the index says."""
        if self.num_snapshots > self.window:
            raise CorruptStateError(f"{where} holds more snapshots than its window has")
        if self.window == 1:
            return
        first = self.iteration - self.num_snapshots + 1
        iterations = [record.iteration for record in self.records]
        is_consecutive = iterations == [*range(first, first + len(iterations))]
        are_inside = all(first <= unit.iteration <= self.iteration for _, unit in self.entries())
        if not is_consecutive or not are_inside or len(self.compute) != len(iterations):
            raise CorruptStateError(
                f"{where} does not hold {self.num_snapshots} consecutive snapshots up to iteration "
                f"{self.iteration}"
            )

    def _check_places(self, where: str) -> None:
        for name, unit in self.entries():
            if unit.file:
                check_path(unit.file, where)
            elif unit.offset + unit.num_bytes > self.file_bytes:
                raise CorruptStateError(f"{where}: unit {name} reaches beyond the end of its file")
            for tensor in unit.tensors:
                end = tensor.offset + tensor_bytes(tensor)
                if tensor.end < tensor.start or end > unit.num_bytes:
                    raise CorruptStateError(f"{where}: unit {name} has an impossible tensor")


@decodable
class IndexHead(Body, frozen=True):
    """The part of an index that identifies it; decoding skips the rest. See `Index`."""

    rank: Count
    iteration: Count
    file: str
    file_bytes: Count
    header_checksum: Checksum
    window: Length = 1
    num_snapshots: Length = 1
    complete_iteration: Count | None = None

    @property
    def is_whole(self) -> bool:
        """True if the file holds all snapshots of the window."""
        return self.num_snapshots == self.window

    @override
    def check(self, where: str) -> None:
        super().check(where)
        _check_file_name(self.file, where)


@decodable
class IndexPlaces(Body, frozen=True):
    """The part of an index that says where its units lie; decoding skips the rest. See `Index`."""

    units: dict[str, EntryPlace]
    retained: dict[str, EntryPlace] = {}


@decodable
class IndexSummary(IndexHead, frozen=True):
    """The part of an index that its manifest repeats; decoding skips the rest. See `Index`."""

    units: dict[str, EntryHead] = {}
    older: tuple[FileEntry, ...] = ()


def _check_file_name(file: str, where: str) -> None:
    check_path(file, where)
    if "/" in file:
        raise CorruptStateError(
            f"{where}: the data file '{file}' is not in the directory of its index"
        )


def check_units(
    index: Index,
    contents: Mapping[str, memoryview],
    where: str,
    entries: Iterable[tuple[str, UnitEntry]] | None = None,
) -> None:
    """Raise CorruptStateError if the header or a unit does not have the checksum of the index.

    Args:
        contents: of the index's own file, under an empty name, and of others that it names.
        entries: the unit versions to check, with names; by default all that are in the contents.
    """
    check_header(index, contents[""][: index.header_bytes], where)
    if entries is None:
        entries = [(name, unit) for name, unit in index.entries() if unit.file in contents]
    check_places(contents, where, entries)


def check_header(index: Index, header: memoryview | bytes, where: str) -> None:
    """Raise CorruptStateError if a safetensors header does not have the checksum of the index."""
    check_content(_at(where, "the safetensors header"), header, index.header_checksum)


def check_places(
    contents: Mapping[str, memoryview], where: str, entries: Iterable[tuple[str, UnitEntry]]
) -> None:
    """Raise CorruptStateError if a unit does not have the checksum of the index; see `check_units`."""
    checked = [*entries]
    parts = [contents[unit.file][unit.offset :][: unit.num_bytes] for _, unit in checked]
    for (name, unit), part, found in zip(checked, parts, checksums(parts), strict=True):
        _check_unit(name, unit, len(part), found, where)


def check_unit(
    name: str, unit: UnitEntry, pieces: Iterable[memoryview | bytes], where: str
) -> None:
    """Raise CorruptStateError unless the bytes of a unit, in pieces, have the checksum of the index.

    Args:
        where: begins the message, unless it is empty.
    """
    found, num_bytes = xxhash.xxh3_64(), 0
    for piece in pieces:
        found.update(piece)
        num_bytes += len(piece)
    _check_unit(name, unit, num_bytes, found.hexdigest(), where)


def _check_unit(name: str, unit: UnitEntry, num_bytes: int, found: str, where: str) -> None:
    if num_bytes != unit.num_bytes:
        raise CorruptStateError(_at(where, f"unit {name} is cut short"))
    check_found(_at(where, f"unit {name}"), found, unit.checksum)


def _at(where: str, what: str) -> str:
    return f"{where}: {what}" if where else what
