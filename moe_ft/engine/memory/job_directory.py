"""The directory of a job in a memory directory: paths in it, the marker that makes it one, and its removal.

    JOB/.moe_ft_job                   the marker; also the lock for starts of ranks, and for removal
    JOB/NODE/rank_%05d/               a rank's own memory; the files in it are engine/memory/regions.py
    JOB/NODE/replica_%05d_at_%05d/    that of the first rank, kept by the second one, which is of this node

Without a marker nothing is removed: a mistyped directory is somebody's data. recovery/job_memory.py finds out
which jobs are dead.
"""

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

import filelock
import msgspec
import psutil

from moe_ft.errors import UnsafePathError
from moe_ft.files.private_files import make_private, open_directory, read_private
from moe_ft.format.boundary import BoundaryIndex
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index, IndexHead

MARKER_NAME = ".moe_ft_job"
ALIVE_SUFFIX = ".alive"
PERSIST_NAME = "persist"
LAUNCHER_NAME = "launcher"  # note of the node on its last start
_FORMAT = "moe_ft/job/1"
_LOCK_TIMEOUT_S = 20.0  # removing a terabyte takes a while
_LOCK_POLL_S = 0.002  # all ranks of a node enter at the same moment, each for a millisecond
_NAMES = rf"rank_\d{{5,}}{re.escape(ALIVE_SUFFIX)}|failed_\d{{5,}}\.json|{LAUNCHER_NAME}"
# Also what a process leaves that is killed while it writes.
_FILE = re.compile(rf"{_NAMES}|\.({_NAMES})\.\d+")
_DIRECTORY = re.compile(r"rank_(?P<rank>\d{5,})|replica_(?P<source>\d{5,})_at_(?P<holder>\d{5,})")
BREAKPOINT = (
    "breakpoint"  # the region of a rank's breakpoint, which has a number only next to another
)
INDEX_NAME = re.compile(rf"(region_\d+|{BREAKPOINT}(_\d+)?)\.json")
_LOG_NAME = re.compile(r"boundary_\d+\.json")


def job_directory(memory_dir: str, job_id: str) -> Path:
    """Return the directory of a job under --moe-ft-memory-dir."""
    return Path(memory_dir) / job_id


def node_directory(memory_dir: str, job_id: str, node: str) -> Path:
    """Return the memory directory of one node of a job."""
    return job_directory(memory_dir, job_id) / node


def own_directory(node_dir: Path, rank: int) -> Path:
    """Return where a rank keeps its own regions."""
    return node_dir / f"rank_{rank:05d}"


def replica_directory(node_dir: Path, source: int, holder: int) -> Path:
    """Return where the rank ``holder`` keeps replicas of the rank ``source``."""
    return node_dir / f"replica_{source:05d}_at_{holder:05d}"


def is_breakpoint(path: PurePath) -> bool:
    """Return whether an index, or a data file, is that of a breakpoint."""
    return re.split(r"[._]", path.name)[0] == BREAKPOINT


def tier_of(path: Path) -> str:
    """Return the memory that an index is in: a rank's own, a replica at a peer, or a breakpoint."""
    if is_breakpoint(path):
        return "breakpoint"
    return "replica" if path.parent.name.startswith("replica_") else "memory"


def rank_and_holder(name: str) -> tuple[int | None, int | None]:
    """Return whose state a directory of that name holds, and which rank keeps it; None for others."""
    match = _DIRECTORY.fullmatch(name)
    if match is None:
        return None, None
    owner = int(match["rank"] or match["source"])
    return owner, int(match["holder"] or owner)


def find_indexes[Kind: (Index, IndexHead, BoundaryIndex)](
    node_dir: Path, kind: type[Kind]
) -> Iterator[tuple[Path, Kind | OSError]]:
    """Yield the indexes of a kind in a node's memory directory, sorted; what cannot be read as its error.

    Directories that are a link or not ours are never looked at, and yielded with that: another user could
    have put them there.
    """
    names = sorted(entry.name for entry in node_dir.iterdir()) if node_dir.is_dir() else []
    for name in names:
        if rank_and_holder(name)[0] is not None:
            yield from indexes_in(node_dir / name, kind)


def find_indexes_below[Kind: (Index, IndexHead, BoundaryIndex)](
    root: Path, kind: type[Kind]
) -> Iterator[tuple[Path, Kind | OSError]]:
    """Yield the same for all nodes below a memory directory, one of a job, of a node or of a rank.

    It looks no deeper: the directory may be anybody's, with everybody's files below.
    """
    inside = [root] if root.is_dir() else []
    for folders in ("", "*/", "*/*/"):
        inside += root.glob(f"{folders}r*_*")
    nodes = {each.parent for each in inside if rank_and_holder(each.name) != (None, None)}
    for path, index in (each for node in sorted(nodes) for each in find_indexes(node, kind)):
        if path.is_relative_to(root):
            yield path, index


def indexes_in[Kind: (Index, IndexHead, BoundaryIndex)](
    directory: Path, kind: type[Kind]
) -> Iterator[tuple[Path, Kind | OSError]]:
    """Yield the same for a directory of a rank; one that cannot be opened with its own path."""
    pattern = _LOG_NAME if issubclass(kind, BoundaryIndex) else INDEX_NAME
    try:
        with open_directory(directory) as descriptor:
            names = sorted(filter(pattern.fullmatch, os.listdir(descriptor)))
    except OSError as error:
        yield directory, error
        return
    for path in (directory / name for name in names):
        try:
            yield path, decode(read_private(path), kind, str(path))
        except OSError as error:
            yield path, error


def file_system_type(path: Path) -> str:
    """Return the type of the file system that a path is on, such as tmpfs; empty if unknown."""
    mount = _mount_of(path)
    return "" if mount is None else str(mount.fstype)


def huge_pages(path: Path) -> tuple[str, str]:
    """Return the option huge= of the tmpfs that a path is on, and its mount point; never without one."""
    mount = _mount_of(path)
    if mount is None or mount.fstype != "tmpfs":
        return "never", ""
    given = [each for each in mount.opts.split(",") if each.startswith("huge=")]
    return given[-1].removeprefix("huge=") if given else "never", str(mount.mountpoint)


def _mount_of(path: Path) -> Any:
    path = path.resolve()
    mounts = {Path(each.mountpoint): each for each in psutil.disk_partitions(all=True)}
    return next((mounts[each] for each in (path, *path.parents) if each in mounts), None)


class JobMarker(msgspec.Struct, frozen=True):
    """Says that a directory holds the memory of a job, and whose.

    Attributes:
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

    Raises OSError if that cannot be found out, also because the directory belongs to another user.
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
    try:
        lock = job_lock(directory).acquire(timeout=timeout_s, poll_interval=_LOCK_POLL_S)
    except FileExistsError as error:  # that the lock says if the directory goes while it is made
        raise FileNotFoundError(error.errno, "was removed just now", str(directory)) from error
    with lock:
        if read_marker(directory) is None:
            marker = JobMarker(_FORMAT, directory.name, os.geteuid(), clock_offset_s())
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

    Raises OSError if something cannot be removed. The marker goes last: once more will remove the rest.
    """
    for node_dir in directory.iterdir():
        if node_dir.name != MARKER_NAME:
            shutil.rmtree(node_dir)
    _remove_empty(directory)


def _remove_empty(directory: Path) -> None:
    (directory / MARKER_NAME).unlink()
    with suppress(OSError):  # a new start was waiting for the lock, and is in the directory already
        directory.rmdir()
