"""The directory of a job in a memory directory: the marker that makes it one, and its removal.

    JOB/.moe_ft_job    the marker; also the lock under which a rank starts, and memory is removed
    JOB/NODE/          one node's memory; its parts are in engine/memory/regions.py

Without a marker nothing is removed: a mistyped directory is somebody's data. recovery/job_memory.py finds out
which jobs are dead.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import filelock
import msgspec

from moe_ft.engine.memory.regions import rank_and_holder
from moe_ft.errors import UnsafePathError
from moe_ft.files.private_files import make_private, read_private

MARKER_NAME = ".moe_ft_job"
ALIVE_SUFFIX = ".alive"
PERSIST_NAME = "persist"
_FORMAT = "moe_ft/job/1"
_LOCK_TIMEOUT_S = 20.0  # removing a terabyte takes a while
_NAMES = rf"rank_\d{{5,}}{re.escape(ALIVE_SUFFIX)}|failed_\d{{5,}}\.json|launcher"
_FILE = re.compile(
    rf"{_NAMES}|\.({_NAMES})\.\d+"
)  # or what a process leaves that is killed while it writes


class JobMarker(msgspec.Struct, frozen=True):
    """Says that a directory holds the memory of a job, and whose.

    Attributes:
        uid: of the user whose job it is.
        clock_s: `clock_offset_s` when the directory was made.
    """

    format: str
    job_id: str
    uid: int
    clock_s: float


_MARKER = msgspec.json.Decoder(JobMarker)


def clock_offset_s() -> float:
    """Return what the wall clock is ahead of the time since boot; it changes when the clock is set."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def read_marker(directory: Path) -> JobMarker | None:
    """Return the marker of a job's directory, None for any other directory.

    Raises:
        OSError: if that cannot be found out, also because the directory belongs to another user.
    """
    try:
        content = read_private(directory / MARKER_NAME)
        marker = _MARKER.decode(content)
    except (FileNotFoundError, ValueError):  # of msgspec, or bytes that are no text
        return None
    is_its_own = (marker.format, marker.job_id) == (_FORMAT, directory.name)
    return marker if is_its_own and marker.uid == os.geteuid() else None


def foreign_entry(directory: Path) -> Path | None:
    """Return something in a job's directory that moe_ft does not put there, None if all of it is ours."""
    for node_dir in sorted(directory.iterdir()):
        if node_dir.name == MARKER_NAME:
            continue
        if node_dir.is_symlink() or not node_dir.is_dir():
            return node_dir
        for entry in sorted(node_dir.iterdir()):
            is_directory = entry.is_dir() and not entry.is_symlink()
            is_known = (
                rank_and_holder(entry.name)[0] is not None or entry.name == PERSIST_NAME
                if is_directory
                else _FILE.fullmatch(entry.name) is not None
            )
            if not is_known:
                return entry
    return None


def job_lock(directory: Path) -> filelock.FileLock:
    """Return the lock under which a rank enters a job's directory, or somebody removes it."""
    return filelock.FileLock(directory / MARKER_NAME, mode=0o600)


@contextmanager
def entered_job(directory: Path, timeout_s: float) -> Iterator[None]:
    """Create and mark a job's directory, and keep it from being removed meanwhile.

    Raises:
        UnsafePathError: if the directory is not ours, or has no marker and holds something else.
        FileNotFoundError: if it was removed just now; once more will create it again.
        filelock.Timeout: if others keep the lock for too long.
        OSError: if it cannot be created.
    """
    make_private(directory)
    if read_marker(directory) is None and (foreign := foreign_entry(directory)) is not None:
        raise UnsafePathError(
            f"{directory} has no {MARKER_NAME} and holds {foreign.relative_to(directory)}: it is not a job's"
        )
    with job_lock(directory).acquire(timeout=timeout_s):
        if read_marker(directory) is None:
            marker = JobMarker(
                format=_FORMAT,
                job_id=directory.name,
                uid=os.geteuid(),
                clock_s=clock_offset_s(),
            )
            # In place: a new file would not be the one that is locked.
            (directory / MARKER_NAME).write_bytes(msgspec.json.encode(marker) + b"\n")
        yield


def remove_node(node_dir: Path) -> None:
    """Remove a node's memory, and the job's directory with its last node."""
    shutil.rmtree(node_dir, ignore_errors=True)
    directory = node_dir.parent
    if not (directory / MARKER_NAME).exists():
        return
    # What cannot be removed now is left to `clean`.
    with suppress(OSError), job_lock(directory).acquire(timeout=_LOCK_TIMEOUT_S):
        if [entry.name for entry in directory.iterdir()] == [MARKER_NAME]:
            _remove_empty(directory)


def remove_job(directory: Path) -> None:
    """Remove a job's directory; the caller holds its lock and has checked that it is dead.

    Raises:
        OSError: if something in it cannot be removed. The marker goes last: once more will remove the rest.
    """
    for node_dir in directory.iterdir():
        if node_dir.name != MARKER_NAME:
            shutil.rmtree(node_dir)
    _remove_empty(directory)


def _remove_empty(directory: Path) -> None:
    (directory / MARKER_NAME).unlink()
    with suppress(OSError):  # a new start was waiting for the lock, and is in the directory already
        directory.rmdir()
