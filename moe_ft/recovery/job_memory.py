"""Jobs that have memory on this machine: their directories, sizes, and signs of life.

recovery/inventory.py finds the state in it, recovery/inspect/cleaning.py removes it.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import filelock

from moe_ft.config.fields import size_text
from moe_ft.engine.memory.job_directory import (
    ALIVE_SUFFIX,
    MARKER_NAME,
    clock_offset_s,
    job_directory,
    read_marker,
)

_LOCK_SUFFIXES = (ALIVE_SUFFIX, ".lock")
_MAX_DESCRIBED = 5


def alive_lock(node_dir: Path, rank: int) -> filelock.FileLock:
    """Return the lock that a rank holds while it lives; the kernel releases it however it ends."""
    return filelock.FileLock(node_dir / f"rank_{rank:05d}{ALIVE_SUFFIX}", mode=0o600)


def is_alive(directory: Path) -> bool:
    """Return whether a process of a job is alive: whether any lock below its directory is held.

    Raises OSError if a directory in it cannot be read.
    """

    def fail(error: OSError) -> NoReturn:
        raise error

    for parent, _, names in os.walk(directory, onerror=fail):
        for name in names:
            if name.endswith(_LOCK_SUFFIXES) and _is_held(Path(parent, name)):
                return True
    return False


def _is_held(path: Path) -> bool:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except (filelock.Timeout, OSError):  # a lock that cannot be tried may be held
        return True
    lock.release()
    return False


def find_directories(memory_dir: Path) -> Iterator[tuple[Path, str]]:
    """Yield the entries of a memory directory, each with the reason why it is not a job of ours, or none.

    Raises OSError if the directory cannot be read.
    """
    for directory in sorted(memory_dir.iterdir()):
        if directory.is_symlink():
            yield directory, "a symbolic link, not a job of moe_ft"
        elif directory.is_dir():
            yield directory, _refusal(directory)


def _refusal(directory: Path) -> str:
    try:
        uid = directory.lstat().st_uid
        if uid != os.geteuid():
            return f"it belongs to user {uid}, not to {os.geteuid()}"
        if (directory / MARKER_NAME).exists() and read_marker(directory) is not None:
            return ""
    except OSError as error:
        return str(error)
    return f"not a job of moe_ft: it has no {MARKER_NAME} of its own"


def describe(directory: Path) -> tuple[str, float]:
    """Describe a job's memory; also return how long ago it last changed, in seconds.

    The age is for people, and spares jobs that are between two starts. File times are from this machine's
    clock: if it was set forward since the job began, the memory may be younger by as much.
    """
    num_bytes, newest_s = measure(directory)
    marker = read_marker(directory)
    forward_s = 0.0 if marker is None else clock_offset_s() - marker.clock_s
    age_s = max(0.0, time.time() - newest_s - max(0.0, forward_s))
    return (f"job '{directory.name}': {size_text(num_bytes)}, {age_s / 60:.0f} minutes old"), age_s


def other_jobs(memory_dir: str, job_id: str) -> list[str]:
    """Describe a few of our other jobs under --moe-ft-memory-dir, which are never read."""
    root, own = Path(memory_dir), job_directory(memory_dir, job_id)
    if not root.is_dir():
        return []
    others = [each for each, refusal in find_directories(root) if not refusal and each != own]
    described = [describe(each)[0] for each in others[:_MAX_DESCRIBED]]
    if len(others) > _MAX_DESCRIBED:
        described.append(f"{len(others) - _MAX_DESCRIBED} more jobs")
    return described


def measure(directory: Path) -> tuple[int, float]:
    """Return the bytes of the files in a directory, and when it last changed (seconds since 1970).

    Links are not followed. Files that vanish meanwhile or cannot be read do not count.
    """
    num_bytes, newest_s = 0, 0.0
    for parent, _, names in os.walk(directory):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            try:
                status = os.lstat(path)
            except OSError:
                continue
            if path != parent:
                num_bytes += status.st_blocks * 512
            newest_s = max(newest_s, status.st_mtime)
    return num_bytes, newest_s
