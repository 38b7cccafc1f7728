"""Check of the memory directory of a node: file system, permissions, room, what other jobs have left."""

import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from moe_ft.config.fields import size_text
from moe_ft.doctor.cgroup import free_memory
from moe_ft.doctor.rows import Result, Row, failed, passed, refused, warned
from moe_ft.engine.memory.regions import file_system_type
from moe_ft.errors import ConfigError
from moe_ft.files.private_files import (
    make_private,
    make_root,
    read_private,
    write_atomically,
)
from moe_ft.recovery.inspect.cleaning import clean
from moe_ft.recovery.job_memory import measure

_CHECK, _ROOM, _LEFT = "memory dir", "memory room", "leftovers"
_KINDS = ("tmpfs", "ramfs", "hugetlbfs")
_LEAST_BYTES = 1 << 30  # where no plan says more: containers have 64 MiB
_LEAST_AGE_S = 3600.0
_FILES_OF_A_RANK = 64
_MOST_NAMED = 3
_PROBE = "moe_ft_doctor_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Memory that a job takes on a node.

    Attributes:
        num_ranks: of the node.
        num_bytes: of the planned job; None if nothing is planned.
        own: directory of an earlier start of the job, whose memory it takes over; None if it has no name.
    """

    num_ranks: int
    num_bytes: int | None = None
    own: Path | None = None


def check_memory(node: str, directory: str, demand: Demand) -> list[Row]:
    """Return rows on a node's memory directory.

    Args:
        directory: --moe-ft-memory-dir.
    """
    place = Path(directory)
    rows = [*_leftovers(node, place)]
    before = _missing(place)
    try:
        used = _use(place)
        rows.insert(0, _describe(node, place) if used == b"moe_ft" else _unequal(node, place))
        rows[1:1] = _room(node, place, demand)
    except OSError as error:
        remedy = "Name another --moe-ft-memory-dir, for example below /dev/shm."
        rows.insert(0, failed(_CHECK, node, f"{directory} cannot be used: {error}", remedy))
    finally:
        for created in before:
            with suppress(OSError):  # somebody else uses it by now
                created.rmdir()
    return rows


def _missing(place: Path) -> list[Path]:
    """Return the directories that a check has to create, deepest first."""
    return [each for each in (place, *place.parents) if not each.exists()]


def _use(place: Path) -> bytes:
    """Create a directory as a rank does, with a file; return what is read back."""
    make_root(place)
    probe = place / f"{_PROBE}{secrets.token_hex(8)}"
    try:
        make_private(probe)
        write_atomically(probe / "file", b"moe_ft")
        return read_private(probe / "file")
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _unequal(node: str, place: Path) -> Row:
    found = f"{place} does not give back what was written"
    return failed(_CHECK, node, found, "Name another --moe-ft-memory-dir.")


def _describe(node: str, place: Path) -> Row:
    kind = file_system_type(place)
    total = size_text(shutil.disk_usage(place).total)
    if kind in _KINDS:
        return passed(_CHECK, node, f"{place}: {kind} of {total}")
    found = (
        f"{place} is on {kind or 'an unknown file system'}, not on tmpfs: snapshots are no faster"
    )
    return warned(_CHECK, node, found, "Name a directory below /dev/shm.")


def _free(place: Path, own_bytes: int) -> dict[str, tuple[int, str]]:
    """Return what limits memory: the bytes that are free, and how to get more."""
    free = shutil.disk_usage(place).free + own_bytes
    found = {f"{place}": (free, "Enlarge it (mount -o remount,size=...).")}
    available = psutil.virtual_memory().available + own_bytes
    found["memory of the node"] = (available, "Use more nodes.")
    group = free_memory()
    if group is not None:
        remedy = "Ask for more memory: --mem of SLURM, limits.memory of Kubernetes."
        what = f"memory limit of the job ({size_text(group[1])})"
        found[what] = (group[0] + own_bytes, remedy)
    return found


def _room(node: str, place: Path, demand: Demand) -> list[Row]:
    """Return rows on the free space, on real memory, and on the number of files."""
    rows = []
    needed = demand.num_bytes
    room = _free(place, 0 if demand.own is None else measure(demand.own)[0])
    least = _LEAST_BYTES if needed is None else needed
    for what, (free, remedy) in room.items():
        found = f"{what}: {size_text(free)} free"
        if needed is not None:
            found += f", {size_text(needed)} needed"
            remedy += " Or fewer replicas: see `moe_ft plan`."
        if free < least:
            make = warned if needed is None else failed
            rows.append(make(_ROOM, node, found, remedy))
    status = os.statvfs(place)
    if status.f_files and status.f_favail < demand.num_ranks * _FILES_OF_A_RANK:
        found = f"{place} has room for {status.f_favail} more files"
        remedy = "Mount it with more (mount -o remount,nr_inodes=...)."
        rows.append(failed(_ROOM, node, found, remedy))
    tightest = min(room, key=lambda what: room[what][0])
    text = f"{size_text(room[tightest][0])} free, the limit is {tightest}"
    if needed is not None:
        text += f"; {size_text(needed)} needed"
    return rows or [passed(_ROOM, node, text)]


def _leftovers(node: str, place: Path) -> list[Row]:
    """Return a row on the memory of other jobs."""
    try:
        removable, left = clean(str(place), None, _LEAST_AGE_S)
    except ConfigError as error:
        return [refused(_LEFT, node, error, Result.WARN)]
    if removable:
        more = f" and {len(removable) - _MOST_NAMED} more" if len(removable) > _MOST_NAMED else ""
        found = f"dead: {'; '.join(removable[:_MOST_NAMED])}{more}"
        remedy = f"python -m moe_ft clean --memory-dir {place} --remove"
        return [warned(_LEFT, node, found, remedy)]
    if left:
        return [passed(_LEFT, node, f"{len(left)} entries that stay, the first: {left[0]}")]
    return [passed(_LEFT, node, "none")]
