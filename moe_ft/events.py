"""The event log: one file of JSON lines per rank, to which all incarnations append.

`EventLog` writes, `read_events` reads, `EventTail` follows a log that grows. A second file per rank holds its
progress: one small record that is overwritten in place and survives the death of the process, so that a
post-mortem knows how far a rank came.
A log may hold anything, because killed ranks leave torn lines and people edit files. Lines that are not
events never stop a reader. Standard library only. moe_ft/commands/report.py interprets the events.
"""

import errno
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from moe_ft.calls import looks_again, write_all
from moe_ft.faults import Phase
from moe_ft.format.encoding import finite_or_name
from moe_ft.saying import warn

_RANK_FILE = re.compile(r"rank_(\d{5,})\.jsonl")
_PROGRESS_BYTES = 192
_FIRST_BLOCK_BYTES = 1 << 16
_MAX_TAIL_BYTES = 64 << 20  # hundreds of the longest lines, which hold the loads of all experts
_MAX_LINE_BYTES = 16 << 20
MAX_COUNT = 2**31 - 1

Event = dict[str, Any]


def event_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's events."""
    return directory / f"rank_{rank:05d}.jsonl"


def progress_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's progress record."""
    return directory / f"rank_{rank:05d}.progress"


class EventLog:
    """Appends events of one rank to its file. Any thread may write; the training thread starts and closes it.

    Besides the training thread, the copy thread writes injected faults, and the thread that waits for SIGTERM
    writes failures. Each line is one unbuffered write, so a killed process leaves at most its last line torn.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.incarnation = 0
        self.spent: tuple[float, ...] = ()  # what `RankProgress` has of them
        self._events_fd: int | None = None
        self._progress_fd: int | None = None
        # Keeps a file from being closed during a write. Reentrant, because a failed write closes the files.
        self._lock = threading.RLock()

    @property
    def is_open(self) -> bool:
        """True if what is written reaches a file."""
        return self._events_fd is not None

    def start(self) -> None:
        """Open the rank's files, creating the directory; if that fails, print why and train without a log."""
        try:
            self._open()
        except OSError as error:
            self._give_up(error)

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._events_fd = _open_own(event_path(self.directory, self.rank), os.O_APPEND | os.O_RDWR)
        size = os.fstat(self._events_fd).st_size
        if size and os.pread(self._events_fd, 1, size - 1) != b"\n":
            os.write(self._events_fd, b"\n")  # the last incarnation died while it wrote
        self._progress_fd = _open_own(progress_path(self.directory, self.rank), os.O_WRONLY)

    def close(self) -> None:
        """Close the files; later events are dropped."""
        with self._lock:
            for fd in (self._events_fd, self._progress_fd):
                if fd is not None:
                    os.close(fd)
            self._events_fd = self._progress_fd = None

    def write(
        self, event: str, iteration: int, *, time_s: float | None = None, **values: Any
    ) -> None:
        """Append one event.

        Args:
            event: its name; docs/events.md lists them.
            iteration: Megatron's counter that the event belongs to.
            time_s: when it happened, in seconds since 1970, if that is not now.
            values: further fields, JSON types only.
        """
        line = {
            "time": time.time() if time_s is None else time_s,
            "rank": self.rank,
            "incarnation": self.incarnation,
            "event": event,
            "iteration": iteration,
            **{name: finite_or_name(value) for name, value in values.items()},
        }
        with self._lock:
            if self._events_fd is None:
                return
            try:
                write_all(self._events_fd, json.dumps(line).encode() + b"\n")
            except OSError as error:
                self._give_up(error)

    def progress(self, iteration: int, phase: Phase) -> None:
        """Overwrite the progress record of this rank; takes about a microsecond."""
        words = f"{self.incarnation} {iteration} {phase}", *(f"{each:.3f}" for each in self.spent)
        record = " ".join(words).ljust(_PROGRESS_BYTES - 1) + "\n"
        with self._lock:
            if self._progress_fd is None:
                return
            try:
                os.pwrite(self._progress_fd, record.encode(), 0)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Print once that the log cannot be written, and continue without it."""
        self.close()
        warn(f"rank {self.rank} writes no more events: {error} ({self.directory})")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """Progress of a rank: the last phase that it entered.

    Attributes:
        spent: what its time went into so far, as planning/time_shares.py has it; empty if nobody said.
    """

    incarnation: int
    iteration: int
    phase: Phase
    spent: tuple[float, ...] = ()


def read_progress(directory: Path, rank: int) -> RankProgress | None:
    """Return a rank's last progress, or None if it never wrote one."""
    try:
        with _open(progress_path(directory, rank)) as file:
            words = file.read(_PROGRESS_BYTES).decode().split()
        return RankProgress(
            incarnation=int(words[0]),
            iteration=int(words[1]),
            phase=Phase(words[2]),
            spent=tuple(map(float, words[3:])),
        )
    except (OSError, ValueError, IndexError):
        return None


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of one rank's file that are not blank, events or not.

    Raises:
        OSError: if the file cannot be read.
    """
    with _open(path) as file:
        # A longer line is read in pieces, which are no events.
        for line in iter(partial(file.readline, _MAX_LINE_BYTES), b""):
            if not line.isspace():
                yield line
            if len(line) == _MAX_LINE_BYTES:
                file.seek(_next_data(file, file.tell()))


def read_lines_backwards(path: Path) -> Iterator[bytes]:
    """Yield the same as `read_lines`, last line first, from the last 64 MiB of the file, without line ends.

    Raises:
        OSError: if the file cannot be read.
    """
    with _open(path) as file:
        position = data = 0
        while (data := _next_data(file, position)) < file.seek(0, os.SEEK_END):
            position = file.seek(data, os.SEEK_HOLE)  # behind the last data
        first = max(0, position - _MAX_TAIL_BYTES)
        block_bytes, rest = _FIRST_BLOCK_BYTES, b""
        while position > first:
            size = min(block_bytes, position - first)
            position -= size
            file.seek(position)
            # The first line of the block may begin before the block.
            rest, *lines = (file.read(size) + rest).split(b"\n")
            yield from (line for line in reversed(lines) if line.strip())
            block_bytes *= 2  # so that a long line is not joined from many pieces
        if position == 0 and rest.strip():
            yield rest


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of one rank's file and skip all other lines.

    Raises:
        OSError: if the file cannot be read.
    """
    return (event for line in read_lines(path) if (event := _parse(line)) is not None)


class EventTail:
    """New lines of one rank's file since the last look. Owned by one thread.

    A last line without its end waits for the rest. If the file is another one or shorter than before, it is
    read from its beginning.
    """

    def __init__(self, path: Path, *, is_from_end: bool = False) -> None:
        self._path = path
        self._rest = b""  # of a line that is not whole yet
        self._position = 0
        self._inode = 0
        self.unread_bytes = 0
        if is_from_end:
            with suppress(OSError):
                status = path.stat()
                self._position = status.st_size
                self._inode = status.st_ino

    def read(self, most_bytes: int) -> list[bytes]:
        """Return whole lines from the next bytes of the file, at most so many; `unread_bytes` are left.

        Raises:
            OSError: if the file cannot be read.
        """
        with _open(self._path) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._position:
                self._position = 0
                self._rest = b""
                self._inode = status.st_ino
            self._position = file.seek(_next_data(file, self._position))
            block = file.read(most_bytes)
            self._position += len(block)
            self.unread_bytes = os.fstat(file.fileno()).st_size - self._position
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > _MAX_LINE_BYTES:  # no event is that long
            self._rest = b""
        return [line for line in lines if line.strip()]


def _open_own(path: Path, flags: int) -> int:
    """Return a descriptor of a file to write to. The directory may be shared: a link may lead to any file."""
    # Without O_NONBLOCK, opening a pipe of that name would block.
    flags |= os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        _check_is_file(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@looks_again()
def _open(path: Path) -> BinaryIO:
    _check_is_file(path.stat(), path)
    return path.open("rb")


def _next_data(file: BinaryIO, position: int) -> int:
    """Return where data follows, else the file's size: a hole, which may be of any size, holds no lines."""
    size = os.fstat(file.fileno()).st_size  # first, as the file may grow
    try:
        return file.seek(position, os.SEEK_DATA)
    except OSError:
        return size


def _check_is_file(status: os.stat_result, path: Path) -> None:
    """Raise OSError for a directory, and for a pipe, because reading one would block."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _parse(line: bytes) -> Event | None:
    """Return the event in a line, None unless `EventLog` has written it completely."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    counts = (event.get("incarnation"), event.get("iteration"))
    is_whole = all(type(count) is int and 0 <= count <= MAX_COUNT for count in counts)
    return event if is_whole else None


def ranks_with_events(directory: Path) -> tuple[int, ...]:
    """Return the ranks that have an event file in a directory, ascending."""
    matches = (_RANK_FILE.fullmatch(path.name) for path in directory.iterdir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def last_incarnation(directory: Path, rank: int) -> int:
    """Return the incarnation of a rank's last event, or -1 if there is none that can be read."""
    path = event_path(directory, rank)
    try:
        lines = read_lines_backwards(path)
        last = next((event for line in lines if (event := _parse(line)) is not None), None)
        if last is None and path.stat().st_size:
            warn(f"{path} holds no events that can be read: rank {rank} counts its starts from 0")
    except OSError:  # no log yet, or a bad one, about which `EventLog.start` complains
        return -1
    return -1 if last is None else int(last["incarnation"])
