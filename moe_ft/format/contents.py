"""Checks of bytes against the checksums in an index; no I/O."""

from collections.abc import Iterable, Mapping

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index


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
    if checksum(header) != index.header_checksum:
        raise CorruptStateError(f"{where}: the safetensors header does not match its checksum")


def check_places(
    contents: Mapping[str, memoryview], where: str, entries: Iterable[tuple[str, UnitEntry]]
) -> None:
    """Raise CorruptStateError if a unit does not have the checksum of the index; see `check_units`."""
    for name, unit in entries:
        content = contents[unit.file]
        check_unit(name, unit, content[unit.offset : unit.offset + unit.num_bytes], where)


def check_unit(name: str, unit: UnitEntry, content: memoryview | bytes, where: str) -> None:
    """Raise CorruptStateError if the bytes of a unit do not have the checksum of the index."""
    if checksum(content) != unit.checksum:
        raise CorruptStateError(f"{where}: unit {name} does not match its checksum")
