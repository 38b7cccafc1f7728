"""Removes the memory that dead jobs have left on this machine: `python -m moe_ft clean`.

A rank holds a file lock while it lives, which the kernel releases however it ends. A job whose locks are all
free may still be between two starts, so without its name only memory that is old enough is removed.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import filelock

from moe_ft.errors import ConfigError
from moe_ft.recovery.inventory import measure

_LOCK_SUFFIX = ".alive"


def alive_lock(node_dir: Path, rank: int) -> filelock.FileLock:
    """Return the lock that a rank holds while it lives."""
    return filelock.FileLock(node_dir / f"rank_{rank:05d}{_LOCK_SUFFIX}", mode=0o600)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobMemory:
    """What a job has in a memory directory."""

    job_id: str
    directory: Path
    num_bytes: int
    age_s: float
    is_alive: bool


def find_jobs(memory_dir: str) -> list[JobMemory]:
    """Return the jobs that have memory on this machine.

    Raises:
        ConfigError: if the directory cannot be read.
    """
    root = Path(memory_dir)
    try:
        directories = sorted(each for each in root.iterdir() if each.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            f"--memory-dir={memory_dir} cannot be read: {error}. Name the directory of --moe-ft-memory-dir."
        ) from error
    found = []
    for directory in directories:
        num_bytes, newest_s = measure(directory)
        found.append(
            JobMemory(
                job_id=directory.name,
                directory=directory,
                num_bytes=num_bytes,
                age_s=time.time() - newest_s,
                is_alive=any(map(_is_held, directory.glob(f"*/*{_LOCK_SUFFIX}"))),
            )
        )
    return found


def _is_held(path: Path) -> bool:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(blocking=False)
    except (filelock.Timeout, OSError):
        return True
    lock.release()
    return False


def clean(memory_dir: str, job_id: str | None, least_age_s: float) -> tuple[list[str], list[str]]:
    """Remove the memory of dead jobs.

    Args:
        memory_dir: --moe-ft-memory-dir of the jobs.
        job_id: remove this job's, whatever its age; None for all jobs that are old enough.
        least_age_s: leave memory that changed more recently.

    Returns:
        What was removed and what was left and why, a line each.

    Raises:
        ConfigError: if the named job has no memory here.
    """
    jobs = [job for job in find_jobs(memory_dir) if job_id in (None, job.job_id)]
    if job_id is not None and not jobs:
        raise ConfigError(
            f"--job-id={job_id} has no memory under {memory_dir} on this machine. Leave it out to see all."
        )
    removed, left = [], []
    for job in jobs:
        what = (
            f"job '{job.job_id}': {job.num_bytes / 2**20:.0f} MiB, {job.age_s / 60:.0f} minutes old"
        )
        if job.is_alive:
            left.append(f"{what}: it is running")
        elif job_id is None and job.age_s < least_age_s:
            left.append(
                f"{what}: younger than {least_age_s / 60:.0f} minutes; name it to remove it"
            )
        else:
            shutil.rmtree(job.directory)
            removed.append(what)
    return removed, left
