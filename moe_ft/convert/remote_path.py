"""Files of a source at an fsspec URL, with the methods of `pathlib.Path` that conversions call.

Nothing relies on a listing but `glob`. Reading them is foreign_files.py.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from moe_ft.files.patience import PATIENCE_S
from moe_ft.files.storage import Storage


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """A file or folder.

    Attributes:
        path: relative to the URL; empty for the folder of the URL.
    """

    path: str
    storage: Storage = field(compare=False, repr=False)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.path}/{name}" if self.path else name, self.storage)

    def __str__(self) -> str:
        return f"{self.storage.url.rstrip('/')}/{self.path}".rstrip("/")

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    def is_file(self) -> bool:
        """Return whether it is there."""
        return self.storage.exists(self.path)

    exists = is_file

    def glob(self, pattern: str) -> list["RemotePath"]:
        """Return the files of the folder whose names match, as far as the store lists them."""
        names = self.storage.names_in(self.path) if self.path else self.storage.names()
        return [self / name for name in names if fnmatch(name, pattern)]

    def version(self) -> str:
        """Return what changes when the file is written again."""
        return self.storage.version(self.path)

    def size(self) -> int:
        """Return the size in bytes."""
        return self.storage.size(self.path)


AnyPath = Path | RemotePath


def path_of(url: str) -> AnyPath:
    """Return the folder of a path or fsspec URL; raises OSError, ValueError or ImportError for bad URLs."""
    local = url.removeprefix("file://")
    return RemotePath("", Storage(url, PATIENCE_S)) if "://" in local else Path(local)
