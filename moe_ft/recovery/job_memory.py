"""Jobs that have memory on this machine: their directories, sizes, signs of life, and a rank's place in one.

recovery/inventory.py finds the state in it, recovery/inspect/cleaning.py removes it. No torch.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import filelock

from moe_ft.config.fields import size_text
from moe_ft.engine.memory.job_directory import (
    ALIVE_SUFFIX,
    MARKER_NAME,
    clock_offset_s,
    entered_job,
    file_system_type,
    job_directory,
    job_lock,
    read_marker,
    remove_node,
)
from moe_ft.errors import BusyError, ConfigError, ForeignPathError
from moe_ft.files.private_files import make_private, make_root
from moe_ft.planning.host_memory import num_regions, regions_at_peers
from moe_ft.planning.parity import ParityGroup
from moe_ft.planning.placement import plan_node_memory
from moe_ft.processes import holder_of_lock, is_ending
from moe_ft.recovery.site import Site
from moe_ft.saying import say, warn
from moe_ft.strategies.registry import chosen

_LOCK_SUFFIXES = (ALIVE_SUFFIX, ".lock")
_MAX_DESCRIBED = 5
_CLAIM_POLL_S = 0.05
_OLD_START_S = 20.0  # an older start's ranks may take a moment to die
_ENDING_S = 60.0  # longer if they cannot, as where they give much memory back or wait for storage


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


def claim_memory(site: Site) -> filelock.BaseFileLock:
    """Take this rank's place in memory as `take_place` does; warn of anything unusual."""
    lock = take_place(site)
    if not site.is_lowest_on_node:
        return lock
    if reason := why_slow(site):
        warn(reason)
    memory_dir = site.config.memory.memory_dir
    for other in other_jobs(memory_dir, site.job_id):
        say(f"{memory_dir} on node {site.node} also holds memory of {other}; not touched")
    return lock


def take_place(site: Site) -> filelock.BaseFileLock:
    """Make this rank's directories and take the lock that says it is alive.

    Raises:
        ConfigError: if the directory cannot be used, or another process is this rank of this job.
        BusyError: if that process is about to end, or the directory is another user's, or full.
    """
    memory = site.config.memory
    try:
        make_root(Path(memory.memory_dir))
        return _enter(site)
    except filelock.Timeout as error:
        if not _is_of_live_rank(error):
            raise BusyError(
                f"--moe-ft-job-id={site.job_id}: memory of this job on node {site.node} is held by a process "
                f"that is ending, or not seen from here ({error}). Start again later, or without this node."
            ) from error
        raise ConfigError(
            f"--moe-ft-job-id={site.job_id}: rank {site.rank} of a job of this name is "
            f"running on node {site.node} already ({error}). Give this job another name, or end the "
            "other one."
        ) from error
    except OSError as error:
        is_busy = isinstance(error, ForeignPathError) or error.errno == errno.ENOSPC
        raise (BusyError if is_busy else ConfigError)(
            f"--moe-ft-memory-dir={memory.memory_dir} with --moe-ft-job-id={site.job_id} cannot be used on "
            f"node {site.node}: {error}. It must be a directory on a tmpfs in which no other user can "
            "replace what is yours. Name a new one, for example below /dev/shm."
        ) from error


def why_slow(site: Site) -> str:
    """Return why snapshots of this node are slow; empty if nothing is known."""
    kind = file_system_type(site.node_dir)
    if kind in ("tmpfs", "ramfs", "hugetlbfs"):
        return ""
    return (
        f"--moe-ft-memory-dir={site.config.memory.memory_dir} is on {kind or 'an unknown file system'}"
        f" on node {site.node}, not on tmpfs: snapshots are no faster than that"
    )


def _is_of_live_rank(error: filelock.Timeout) -> bool:
    """Return whether a lock is that of a rank's place, and its holder will not give it up by itself."""
    holder = holder_of_lock(Path(error.lock_file))
    is_of_rank = error.lock_file.endswith(ALIVE_SUFFIX)
    return is_of_rank and holder is not None and not is_ending(holder)


def _enter(site: Site) -> filelock.BaseFileLock:
    """Make the directories of this rank, and return its lock, taken.

    Raises:
        filelock.Timeout: if another process keeps it.
        OSError: if the directories cannot be made, or are not ours.
    """
    begin_s = time.monotonic()
    lock = alive_lock(site.node_dir, site.rank)
    while True:
        try:
            # Until the lock is taken, nobody may take the job for dead and remove it.
            with entered_job(site.node_dir.parent, timeout_s=_OLD_START_S):
                make_private(site.node_dir)
                lock.acquire(blocking=False)
                return lock
        except (filelock.Timeout, FileNotFoundError) as error:  # an older start's, or just removed
            is_ours = isinstance(error, filelock.Timeout) and not _is_of_live_rank(error)
            if time.monotonic() > begin_s + (_ENDING_S if is_ours else _OLD_START_S):
                raise
        time.sleep(_CLAIM_POLL_S)


def leave_place(site: Site, lock: filelock.BaseFileLock) -> None:
    """Release a rank's lock; the last rank that leaves a node without state removes the locks."""
    lock.release()
    with suppress(OSError):
        if not any(each.is_dir() for each in site.node_dir.iterdir()):
            remove_unused(site.node_dir, f"*{ALIVE_SUFFIX}")


def remove_unused(node_dir: Path, pattern: str = "*") -> None:
    """Remove a node's memory, or files in it, unless some process of the job is alive there."""
    with suppress(OSError):
        if node_dir.is_dir():  # else the lock would make the job's directory again
            with job_lock(node_dir.parent).acquire(timeout=_OLD_START_S):
                for each in () if is_alive(node_dir) else node_dir.glob(pattern):
                    shutil.rmtree(each) if each.is_dir() else each.unlink()
                node_dir.rmdir()  # fails if anything is left
            remove_node(node_dir)


def check_memory(
    site: Site, peers: Sequence[tuple[int, ...]], groups: Sequence[ParityGroup] = ()
) -> None:
    """Check that there is room for what regions, and replicas or parity, will take; raise as `check_room`."""
    check_room(site, reserved_bytes(site, peers, groups)[site.node])


def reserved_bytes(
    site: Site, peers: Sequence[tuple[int, ...]], groups: Sequence[ParityGroup] = ()
) -> dict[str, int]:
    """Return the bytes that regions, and replicas or parity, take on each node, at most."""
    regions = num_regions(persists=site.config.storage.persists)
    if not groups:
        replica_regions = regions_at_peers(site.config.memory, len(peers[site.rank]))
        return plan_node_memory(site.topology, peers, regions, replica_regions)
    total = plan_node_memory(site.topology, [()] * len(groups), regions, 0)
    for info, group in zip(site.topology.ranks, groups, strict=True):
        total[info.node] += group.memory_bytes(info.index_bytes)
    return total


def room_bytes(node_dir: Path) -> int:
    """Return the bytes that are free for the memory of a node, or that it has already."""
    return shutil.disk_usage(_there(node_dir)).free + measure(node_dir)[0]


class MemoryOfNode:
    """Memory that ranks of a job use on this node. Calls raise OSError while it is made or removed."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir

    def used_bytes(self) -> int:
        """Return the bytes that ranks have there."""
        return measure(self._node_dir)[0]

    def room_bytes(self) -> int:
        """Return the bytes that are free for ranks, or that they have already."""
        return room_bytes(self._node_dir)

    def remove_unused(self) -> None:
        """Remove what is left there, unless a process of the job is alive."""
        remove_unused(self._node_dir)


def _there(node_dir: Path) -> Path:
    return next(each for each in (node_dir, *node_dir.parents) if each.exists())


def check_room(site: Site, needed: int) -> None:
    """Compare the bytes that the job will take on this node with the limit and the file system.

    Raises ConfigError if it is too much for either, BusyError if it fits once others have left.
    """
    limit = site.config.memory.host_memory_limit_bytes
    memory, parts = site.config.memory, ["snapshots with their indexes", "replicas"]
    remedy = "Lower --moe-ft-replication-factor, leave out --moe-ft-persist-dir, or use more ranks"
    if memory.upstream_log:
        logs = sum(info.boundary_bytes for info in site.topology.on_node(site.node))
        parts.append(f"boundary logs ({size_text(logs)})")
        remedy = f"Leave out --moe-ft-upstream-log. {remedy}"
    if memory.breakpoints:
        parts.append("breakpoints")
        remedy = f"Leave out --moe-ft-breakpoints. {remedy}"
    named = f"{', '.join(parts[:-1])} and {parts[-1]}"
    what = f"{named} take {size_text(needed)} on node {site.node}"
    remedy = f"{chosen(site.config).memory_remedy} {remedy}".lstrip()
    if limit is not None and needed > limit:
        raise ConfigError(
            f"--moe-ft-host-memory-limit={site.config.memory.host_memory_limit}: {what}, more than "
            f"the limit. Raise it if the node has the memory. {remedy}."
        )
    free = room_bytes(site.node_dir)
    if site.is_lowest_on_node and needed > free:
        total = shutil.disk_usage(_there(site.node_dir)).total
        raise (ConfigError if needed > total else BusyError)(
            f"--moe-ft-memory-dir={memory.memory_dir}: {what}, and its file system has "
            f"{size_text(free)} for them. Enlarge it (mount -o remount,size=...). {remedy}."
        )
