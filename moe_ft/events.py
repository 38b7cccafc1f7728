"""The event log: one file of JSON lines per rank, appended over incarnations.

`EventLog` writes, `read_events` reads. Beside each rank's events lies its progress, one small record
that is overwritten in place and survives the death of the process, so that a post-mortem knows how
far a rank came that had no time to say so. Standard library only. What events mean to a reader is
moe_ft/report.py.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ft.faults import Phase

_RANK_FILE = re.compile(r"rank_(\d{5,})\.jsonl")
_PROGRESS_BYTES = 64
TAIL_BYTES = 65536  # holds the last events of a rank


def event_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's events."""
    return directory / f"rank_{rank:05d}.jsonl"


def progress_path(directory: Path, rank: int) -> Path:
    """Return the path of a rank's progress record."""
    return directory / f"rank_{rank:05d}.progress"


class EventLog:
    """Appends events of one rank to its file. Owned by the training thread.

    A line is written with one unbuffered write, so a killed process leaves at most its last line torn.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.incarnation = 0
        self._events_fd: int | None = None
        self._progress_fd: int | None = None

    def start(self) -> None:
        """Open the rank's files, creating the directory; raises OSError if that cannot be done."""
        self.directory.mkdir(parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_CLOEXEC
        path = event_path(self.directory, self.rank)
        self._events_fd = os.open(path, flags | os.O_APPEND | os.O_RDWR, 0o644)
        size = os.fstat(self._events_fd).st_size
        if size and os.pread(self._events_fd, 1, size - 1) != b"\n":
            os.write(self._events_fd, b"\n")  # the last incarnation died while it wrote
        self._progress_fd = os.open(
            progress_path(self.directory, self.rank), flags | os.O_WRONLY, 0o644
        )

    def close(self) -> None:
        """Close the files; later events are dropped."""
        for fd in (self._events_fd, self._progress_fd):
            if fd is not None:
                os.close(fd)
        self._events_fd = self._progress_fd = None

    def write(self, event: str, iteration: int, **values: Any) -> None:
        """Append one event.

        Args:
            event: its name, DESIGN section 10.
            iteration: Megatron's counter that the event belongs to.
            values: further fields, JSON types only.
        """
        if self._events_fd is None:
            return
        line = {
            "time": time.time(),
            "rank": self.rank,
            "incarnation": self.incarnation,
            "event": event,
            "iteration": iteration,
            **{name: _as_json(value) for name, value in values.items()},
        }
        try:
            os.write(self._events_fd, json.dumps(line).encode() + b"\n")
        except OSError as error:
            self._give_up(error)

    def progress(self, iteration: int, phase: Phase) -> None:
        """Overwrite the progress record: where this rank is now (about a microsecond)."""
        if self._progress_fd is None:
            return
        record = f"{self.incarnation} {iteration} {phase}".ljust(_PROGRESS_BYTES - 1) + "\n"
        try:
            os.pwrite(self._progress_fd, record.encode(), 0)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Say once that the log cannot be written, and train on without it."""
        self.close()
        print(
            f"moe_ft: rank {self.rank} writes no more events: {error} ({self.directory})",
            file=sys.stderr,
            flush=True,
        )


def _as_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as "nan", "inf" and "-inf"."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a rank came: the last phase it entered."""

    incarnation: int
    iteration: int
    phase: Phase


def read_progress(directory: Path, rank: int) -> Progress | None:
    """Return a rank's last progress, or None if it never wrote one."""
    try:
        words = progress_path(directory, rank).read_text().split()
        return Progress(incarnation=int(words[0]), iteration=int(words[1]), phase=Phase(words[2]))
    except (OSError, ValueError, IndexError):
        return None


def read_events(path: Path, *, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the events of one rank's file.

    A torn line, left by a killed process, is passed over.

    Args:
        path: the file.
        last_bytes: read the end of the file only; None for all of it.
    """
    with path.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(0 if last_bytes is None else max(0, size - last_bytes))
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event:
                yield event


def ranks_with_events(directory: Path) -> tuple[int, ...]:
    """Return the ranks that have an event file in a directory, ascending."""
    matches = (_RANK_FILE.fullmatch(path.name) for path in directory.iterdir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def last_incarnation(directory: Path, rank: int) -> int:
    """Return the incarnation of a rank's last event, or -1 if there is none."""
    path = event_path(directory, rank)
    if not path.exists():
        return -1
    return max(
        (event["incarnation"] for event in read_events(path, last_bytes=TAIL_BYTES)), default=-1
    )
