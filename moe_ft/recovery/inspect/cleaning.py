"""Removal of the memory that dead jobs have left on this machine: `python -m moe_ft clean`.

A rank holds a file lock while it lives, which the kernel releases however the rank ends. A job whose locks
are all free may still be between two starts, so without its name only memory that is old enough is removed.
recovery/job_memory.py finds the directories of jobs.
"""

import math
from pathlib import Path

import filelock

from moe_ft.engine.memory.job_directory import (
    MARKER_NAME,
    foreign_entry,
    job_lock,
    read_marker,
    remove_job,
)
from moe_ft.errors import ConfigError
from moe_ft.recovery.job_memory import describe, find_directories, is_alive

_MAX_NAMED = 3


def clean(
    memory_dir: str, job_id: str | None, least_age_s: float, *, removes: bool = False
) -> tuple[list[str], list[str]]:
    """Remove the memory of dead jobs, or only report it.

    Args:
        job_id: the only job to remove, whatever its age; None for all jobs that are old enough.
        least_age_s: leave memory that changed more recently.

    Returns:
        Lines about what was or would be removed, and lines about what is left, with the reasons.

    Raises:
        ConfigError: if the directory cannot be read or holds no jobs of ours, for an age that is none, or if
            the named job has no memory here.
    """
    found = _find(memory_dir, job_id, least_age_s)
    removed, left = [], []
    for directory, refusal in found:
        if refusal:
            left.append(f"{directory.name}: {refusal}")
            continue
        what, age_s = describe(directory)
        is_young = job_id is None and age_s < least_age_s
        try:
            # A start that wants the directory waits for this lock, and creates the directory again.
            with job_lock(directory).acquire(blocking=False):
                reason = _reason_to_leave(directory)
                if not reason and is_young:
                    reason = f"younger than {least_age_s / 60:g} minutes; name it to remove it"
                if not reason and removes:
                    remove_job(directory)
        except filelock.Timeout:
            reason = "it is starting or ending"
        except OSError as error:
            reason = f"cannot be removed: {error}"
        if reason:
            left.append(f"{what}: {reason}")
        else:
            removed.append(what)
    return removed, left


def _find(memory_dir: str, job_id: str | None, least_age_s: float) -> list[tuple[Path, str]]:
    if not memory_dir.strip():
        raise ConfigError(
            f"--memory-dir={memory_dir} is empty: an unset variable? Name the directory of "
            "--moe-ft-memory-dir, or leave it out for the default."
        )
    if not (math.isfinite(least_age_s) and least_age_s >= 0):
        raise ConfigError(
            f"--older-than={least_age_s / 60:g} must be a number of minutes, at least 0. Give 0 to leave "
            "nothing for its age."
        )
    try:
        found = list(find_directories(Path(memory_dir)))
    except FileNotFoundError:
        found = []
    except OSError as error:
        raise ConfigError(
            f"--memory-dir={memory_dir} cannot be read: {error}. Name the directory of --moe-ft-memory-dir."
        ) from error
    found = [(each, refusal) for each, refusal in found if job_id in (None, each.name)]
    if job_id is not None and not found:
        raise ConfigError(
            f"--job-id={job_id} has no memory under {memory_dir} on this machine. Leave it out to see all."
        )
    refusals = [f"{each.name}: {refusal}" for each, refusal in found if refusal]
    if refusals and len(refusals) == len(found):
        shown = "; ".join(refusals[:_MAX_NAMED])
        more = f"; and {len(refusals) - _MAX_NAMED} more" if len(refusals) > _MAX_NAMED else ""
        raise ConfigError(
            f"--memory-dir={memory_dir} must hold jobs of yours, and has none. Left: {shown}{more}. "
            "Name the directory of --moe-ft-memory-dir."
        )
    return found


def _reason_to_leave(directory: Path) -> str:
    """Return why a job's memory must stay; empty if it may go. The caller holds the job's lock."""
    if read_marker(directory) is None:
        if [each.name for each in directory.iterdir()] == [MARKER_NAME]:
            remove_job(directory)  # the lock has made it again
        return "it has just ended"
    if is_alive(directory):
        return "it is running"
    foreign = foreign_entry(directory)
    if foreign is not None:
        return f"it holds {foreign.relative_to(directory)}, which is not of moe_ft; remove or move that first"
    return ""
