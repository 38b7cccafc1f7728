"""The manifest of a checkpoint on storage: the file that makes the files of an iteration a checkpoint."""

from typing import override

import msgspec

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import Body, decodable
from moe_ft.format.entries import FileEntry, LevelName
from moe_ft.format.records import Count, Length

MANIFEST_NAME = "manifest.json"


class UnitSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of a checkpoint that hold one unit.

    Attributes:
        iteration: of the version; the oldest if ranks have different ones.
        files: positions in the manifest's `files` followed by its `older` files.
    """

    iteration: Count
    level: LevelName
    files: tuple[Count, ...]


@decodable
class Manifest(Body, frozen=True, forbid_unknown_fields=True):
    """The files of a checkpoint; written last.

    Attributes:
        older: files of other checkpoints that this one needs.
        units: by name; a unit that was never saved is not listed.
        window: number of snapshots in each file. With more than one, units are FULL at different
            iterations, and replaying `window` - 1 iterations brings all of them to `iteration`.
    """

    iteration: Count
    created_s: float
    files: tuple[FileEntry, ...]
    units: dict[str, UnitSource]
    older: tuple[FileEntry, ...] = ()
    window: Length = 1

    @override
    def check(self, where: str) -> None:
        super().check(where)
        files = (*self.files, *self.older)
        for entry in files:
            entry.check_paths(where)
        for name, source in self.units.items():
            if any(position >= len(files) for position in source.files):
                raise CorruptStateError(f"{where}: unit {name} names a file that is not listed")
