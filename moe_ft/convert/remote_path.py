"""Files of a source at an fsspec URL, with the methods of `pathlib.Path` that conversions call.

Files are read by their names, in ranges. Nothing relies on a listing but `glob`.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import TracebackType
from typing import Self

from moe_ft.engine.persist.patience import PATIENCE_S
from moe_ft.engine.persist.storage import Storage


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

    def read_bytes(self) -> bytes:
        """Return a small file."""
        return self.storage.read(self.path)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return a small file of text."""
        return self.read_bytes().decode(encoding)

    def glob(self, pattern: str) -> list["RemotePath"]:
        """Return the files of the folder whose names match, as far as the store lists them."""
        names = self.storage.names_in(self.path) if self.path else self.storage.names()
        return [self / name for name in names if fnmatch(name, pattern)]

    def version(self) -> str:
        """Return what changes when the file is written again."""
        return self.storage.version(self.path)

    def open(self, mode: str = "rb") -> "RemoteFile":
        """Open the file to read bytes."""
        assert mode == "rb"
        return RemoteFile(self)


class RemoteFile:
    """An open file. Used by one thread at a time."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._position = path, 0
        self.num_bytes = path.storage.size(path.path)

    def seek(self, position: int) -> None:
        """Go to a position."""
        self._position = position

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes, fewer at the end."""
        wanted = max(0, min(num_bytes, self.num_bytes - self._position))
        content = self._path.storage.read(self._path.path, self._position, wanted)
        self._position += len(content)
        return content

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing stays open."""


AnyPath = Path | RemotePath


def path_of(url: str) -> AnyPath:
    """Return the folder of a path or fsspec URL; raises OSError, ValueError or ImportError for bad URLs."""
    local = url.removeprefix("file://")
    return RemotePath("", Storage(url, PATIENCE_S)) if "://" in local else Path(local)
