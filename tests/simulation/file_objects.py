"""File objects of simulated processes: `open`, in the place of Python's.

The system calls below them are file_calls.py.
"""

import io
import os
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
_READING = ("r", "rb", "rt", "br", "tr")


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
    files, found = world.files, None
    if type(file) is int:
        found = files.held(file) if closefd else None
        place = None if found is None else found.path
    else:
        place = files.relative(file)
        if place is None and (shown := _shown_by_proc(world, str(file))):
            return io.StringIO(shown) if "b" not in mode else io.BytesIO(shown.encode())
    if place is None:
        return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    assert opener is None
    if mode in _READING:
        if found is None:
            files.reach("open", place)
        opened = _real_open(file, mode, buffering, encoding, errors, newline)
        if found is not None:
            files.forget(file)
        files.own_object(opened)
        return opened
    if found is None:
        number = files.open(place, os.fspath(file), _flags_of(mode), 0o666)
        found = files.held(number)
        assert found is not None
    raw = RawFile(files, found, mode.replace("b", "").replace("t", ""), file)
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
    buffer: Any = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
    if "b" in mode:
        return buffer
    return io.TextIOWrapper(buffer, encoding, errors, newline, buffering == 1)


def _shown_by_proc(world: World, path: str) -> str:
    """Return what a file of /proc shows that tells simulated processes apart; nothing for others."""
    if not path.startswith("/proc/"):
        return ""
    if path == "/proc/sys/kernel/random/boot_id":
        return f"boot-of-{world.process.node}\n"
    number = path.removeprefix("/proc/").removesuffix("/stat")
    if path.endswith("/stat") and number.isdecimal():
        return f"{number} (launcher) S {' '.join([number] * 40)}\n"
    return ""
