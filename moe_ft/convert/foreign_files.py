"""Files that somebody else has made: kept inside of their folder, opened without waiting, read within limits.

A named pipe would block whoever opens it, a link or a name may lead out of the folder, and JSON may be too
long or nested too deeply. All of that is refused by name. Files of stores have the same functions.
"""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_ft.calls import looks_again
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.progress import PATIENCE_S
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum

MOST_JSON_BYTES = 256 << 20
_KINDS: Mapping[int, str] = MappingProxyType(
    {
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFDIR: "a folder",
    }
)


@dataclass(frozen=True, slots=True, order=True)
class RemotePath:
    """A file or folder at an fsspec URL, with the methods of `pathlib.Path` that conversions call.

    Nothing relies on a listing but `glob`. The path is relative to the URL, and empty for its folder.
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


AnyPath = Path | RemotePath


def path_of(url: str) -> AnyPath:
    """Return the folder of a path or fsspec URL; raises OSError, ValueError or ImportError for bad URLs."""
    local = url.removeprefix("file://")
    return RemotePath("", Storage(url, PATIENCE_S)) if "://" in local else Path(local)


def signature_of(paths: Iterable[AnyPath]) -> str:
    """Return a checksum of the names, sizes and times of files: another one if they were written again."""
    facts = [(path.name, *_version_of(path)) for path in sorted(paths, key=str)]
    return checksum(repr(facts).encode())


def _version_of(path: AnyPath) -> tuple[object, ...]:
    if isinstance(path, RemotePath):
        return (path.storage.version(path.path),)
    return (path.stat().st_size, path.stat().st_mtime_ns)


def place_in(folder: AnyPath, name: Any, where: str) -> AnyPath:
    """Return the path of a file whose name a file of the folder says.

    Args:
        where: what says it, for messages.

    Raises:
        ConfigError: if the name, or the link that has the name, leads out of the folder.
    """
    is_name = isinstance(name, str) and name not in ("", "..") and "\0" not in name
    if not is_name or Path(name).name != name:
        raise ConfigError(
            f"{where} names the file {name!r:.200}, but may only name files of its own folder, without a "
            "directory. Copy the file there and name it so."
        )
    path: AnyPath = folder / name
    if isinstance(path, Path):
        _check_link(path)
    return path


def _check_link(path: Path) -> None:
    """Raise ConfigError if a path is a link that leads out of its folder.

    Links from a snapshot to the blobs next to it, as in the cache of Hugging Face, stay inside.
    """
    try:
        folder, target = path.parent.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise CorruptStateError(f"{path} cannot be read: {error}") from error
    roots = [folder, folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(target.is_relative_to(root) for root in roots):
        raise ConfigError(
            f"{path} is a link to {target}, but must stay in its folder. Copy the file there."
        )


def read_range(path: AnyPath, offset: int, num_bytes: int) -> memoryview:
    """Return a range of a file, shorter if the file ends; memory that torch may write to.

    Raises:
        CorruptStateError: if it is no regular file.
        OSError: if it cannot be read.
    """
    if isinstance(path, RemotePath):
        wanted = max(0, min(num_bytes, size_of(path) - offset))
        return memoryview(bytearray(path.storage.read(path.path, offset, wanted)))
    descriptor = _open(path)
    try:
        num_bytes = max(0, min(num_bytes, os.fstat(descriptor).st_size - offset))
        content, num_read = memoryview(bytearray(num_bytes)), 0
        while count := os.preadv(descriptor, [content[num_read:]], offset + num_read):
            num_read += count
        # Ranges are mostly read one after the other, from files that stay closed in between.
        os.posix_fadvise(descriptor, offset + num_bytes, num_bytes, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
    return content[:num_read]


@looks_again()
def _open(path: Path) -> int:
    """Return a descriptor of a regular file."""
    # Without waiting: a named pipe would block, and is refused below.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:  # a socket, which cannot be opened at all, among others
        _check_is_regular(path, path.stat())
        raise error
    try:
        _check_is_regular(path, os.fstat(descriptor))
    except CorruptStateError:
        os.close(descriptor)
        raise
    return descriptor


def _check_is_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CorruptStateError(
            f"{path} must be a regular file, but is {found}. Remove it, or name another SRC."
        )


def size_of(path: AnyPath) -> int:
    """Return the size of a file in bytes; raises OSError if it is not there."""
    return path.storage.size(path.path) if isinstance(path, RemotePath) else path.stat().st_size


def read_whole(path: AnyPath, most_bytes: int) -> bytes:
    """Return a file that is not long.

    Raises:
        CorruptStateError: if it is no regular file, or longer.
        OSError: if it cannot be read.
    """
    content = read_range(path, 0, most_bytes + 1)
    if len(content) > most_bytes:
        raise CorruptStateError(
            f"{path} must have at most {most_bytes} bytes, but has more: it is not what its name says. Name "
            "another SRC."
        )
    return bytes(content)


def read_json(path: AnyPath, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a file of JSON.

    Raises:
        CorruptStateError: if it is none, or too long, or nested too deeply.
        OSError: if it cannot be read.
    """
    try:
        found = json.loads(read_whole(path, most_bytes).decode())
    except (ValueError, RecursionError) as error:
        raise CorruptStateError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CorruptStateError(
            f"{path} must hold a JSON object, but holds a {type(found).__name__}"
        )
    return found
