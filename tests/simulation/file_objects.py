"""File objects of simulated processes: `open`, in the place of Python's.

The system calls below them are file_calls.py.
"""

import io
import os
import posix
from typing import TYPE_CHECKING, Any

from tests.simulation.active import World
from tests.simulation.file_calls import cut

if TYPE_CHECKING:
    from tests.simulation.files import Files, OpenFile


class RawFile(io.FileIO):
    """A file object's end towards the operating system."""

    def __init__(self, files: "Files", found: "OpenFile", mode: str, name: Any) -> None:
        super().__init__(found.number, mode)
        self._files, self._found = files, found
        self.name = name
        found.raw = self

    def write(self, data: Any) -> int:
        """Write; see `Files.write`."""
        if self.closed:
            raise ValueError("write to closed file")
        if self._files._kernel.running is None:  # a destructor, outside of simulated threads
            return super().write(data)
        return self._files.write(self._found, data)

    def truncate(self, size: int | None = None) -> int:
        """Cut the file."""
        cut(self._files, self._found, self.tell() if size is None else size)
        return self.tell() if size is None else size

    def close(self) -> None:
        """Close the descriptor unless its process has died, which closed it."""
        if not self.closed:
            self._files.forget(self._found.number)
        super().close()


def _flags_of(mode: str) -> int:
    flags = os.O_CLOEXEC | (
        os.O_RDWR if "+" in mode else os.O_RDONLY if "r" in mode else os.O_WRONLY
    )
    for letter, more in (
        ("w", os.O_CREAT | os.O_TRUNC),
        ("x", os.O_CREAT | os.O_EXCL),
        ("a", os.O_CREAT | os.O_APPEND),
    ):
        if letter in mode:
            flags |= more
    return flags


_real_open = io.open


def open_file(
    world: World,
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    files, rest = world.files, (encoding, errors, newline, closefd, opener)
    if type(file) is int:
        found = files.held(file) if closefd else None
    else:
        path = files.relative(file)
        if path is None and type(file) is not int and str(file).startswith("/proc/"):
            text = _proc_file(world, str(file))
            if text is not None:
                return io.StringIO(text) if "b" not in mode else io.BytesIO(text.encode())
        found = None
        if path is not None:
            assert opener is None
            found = files.held(files.open(path, os.fspath(file), _flags_of(mode), 0o666))
    if found is None or found.path is None:
        return _real_open(file, mode, buffering, *rest)
    try:
        raw = RawFile(files, found, mode.replace("b", "").replace("t", ""), file)
    except OSError:  # a directory
        files.forget(found.number)
        posix.close(found.number)
        raise
    return _buffered(raw, mode, buffering, encoding, errors, newline)


def _buffered(
    raw: RawFile,
    mode: str,
    buffering: int,
    encoding: str | None,
    errors: str | None,
    newline: str | None,
) -> Any:
    if buffering == 0:
        return raw
    size = io.DEFAULT_BUFFER_SIZE if buffering in (-1, 1) else buffering
    buffer: Any
    if "+" in mode:
        buffer = io.BufferedRandom(raw, size)  # type: ignore[arg-type]
    elif "r" in mode:
        buffer = io.BufferedReader(raw, size)
    else:
        buffer = io.BufferedWriter(raw, size)
    if "b" in mode:
        return buffer
    return io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)


def _proc_file(world: World, path: str) -> str | None:
    """Return what a file of /proc shows that tells simulated processes apart, None for others."""
    if path == "/proc/sys/kernel/random/boot_id":
        return f"boot-of-{world.process.node}\n"
    number = path.removeprefix("/proc/").removesuffix("/stat")
    if path.endswith("/stat") and number.isdecimal():
        return f"{number} (launcher) S {' '.join([number] * 40)}\n"
    return None
