"""Whether the bytes of units are those that an index says; no I/O."""

from collections.abc import Iterable, Mapping

from moe_ft.errors import CorruptStateError
from moe_ft.formats import Index, checksum


def check_units(
    index: Index,
    contents: Mapping[str, memoryview],
    where: str,
    names: Iterable[str] | None = None,
) -> None:
    """Raise CorruptStateError if the header or a unit does not have the checksum of the index.

    Args:
        index: describes them.
        contents: of the index's own file, under an empty name, and of others that it names.
        where: for messages.
        names: the units to check; by default all that are in the contents.
    """
    if checksum(contents[""][: index.header_bytes]) != index.header_checksum:
        raise CorruptStateError(f"{where}: the safetensors header does not match its checksum")
    if names is None:
        names = [name for name, unit in index.units.items() if unit.file in contents]
    check_places(index, contents, where, names)


def check_places(
    index: Index, contents: Mapping[str, memoryview], where: str, names: Iterable[str]
) -> None:
    """Raise CorruptStateError if a unit does not have the checksum of the index; see `check_units`."""
    for name in names:
        unit = index.units[name]
        content = contents[unit.file]
        if checksum(content[unit.offset : unit.offset + unit.num_bytes]) != unit.checksum:
            raise CorruptStateError(f"{where}: unit {name} does not match its checksum")
