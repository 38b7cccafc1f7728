"""Checks of one machine: the memory directory and its room, and the limits of a process.

Those that a start makes are called, and what it would refuse becomes a row. The directory is gone afterwards
if it was not there before.
"""

import os
import resource
import secrets
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from moe_ft.config.fields import size_text
from moe_ft.doctor.rows import CheckRow, Result, failed, passed, refused, warned
from moe_ft.engine.descriptors import allow_descriptors
from moe_ft.engine.memory.job_directory import file_system_type, huge_pages, node_directory
from moe_ft.errors import BusyError, ConfigError
from moe_ft.free_memory import free_memory
from moe_ft.recovery.inspect.cleaning import clean
from moe_ft.recovery.job_memory import check_room, measure, take_place, why_slow
from moe_ft.recovery.site import Site
from moe_ft.saying import some_of

CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
SHMEM_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_DIRECTORY, _ROOM, _LEFT, _PAGES = "memory dir", "memory room", "leftovers", "huge pages"
_LOCKED, _OPEN_FILES, _CORES = "locked memory", "open files", "core files"
_LEAST_BYTES = 1 << 30  # where no plan says more: containers have 64 MiB
_LEAST_AGE_S = 3600.0
_FILES_OF_A_RANK = 64
_MOST_NAMED = 3


def check_memory(site: Site, num_ranks: int, needed: int | None) -> list[CheckRow]:
    """Return rows on a node's memory directory.

    Args:
        site: of a rank that is alone on its node, and whose job may have memory there already.
        num_ranks: of the node.
        needed: bytes that the job takes there; None if nothing is planned.
    """
    place = Path(site.config.memory.memory_dir)
    rows = _leftovers(site.node, place)
    missing = [each for each in (place, *place.parents) if not each.exists()]
    try:
        return [_claim(site), *_room(site, num_ranks, needed), *_pages(site), *rows]
    except (ConfigError, BusyError) as error:
        return [refused(_DIRECTORY, site.node, error), *rows]
    finally:
        for created in missing:
            with suppress(OSError):  # somebody else uses it by now
                created.rmdir()


def _claim(site: Site) -> CheckRow:
    """Take a rank's place for a job that is gone afterwards; raises ConfigError if that is refused."""
    name, place = f"moe_ft_doctor_{secrets.token_hex(8)}", site.config.memory.memory_dir
    # A node whose name is refused has none: it must not be taken for the job's own directory.
    node_dir = node_directory(place, name, site.node or name)
    probe = replace(site, job_id=name, node_dir=node_dir)
    try:
        take_place(probe).release()
        if reason := why_slow(probe):
            remedy = "Name a directory below /dev/shm."
            return refused(_DIRECTORY, site.node, ConfigError(reason), Result.WARN, remedy)
        kind, total = file_system_type(node_dir), shutil.disk_usage(place).total
        return passed(_DIRECTORY, site.node, f"{place}: {kind} of {size_text(total)}")
    except (ConfigError, BusyError) as error:  # with the same text on all nodes
        raise type(error)(str(error).replace(name, site.job_id)) from error
    finally:
        # Under another name it is no job any more, into which `clean` elsewhere may put a lock meanwhile.
        gone = node_dir.parent.with_name(f"{name}_gone")
        with suppress(OSError):  # it may not be there
            node_dir.parent.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _room(site: Site, num_ranks: int, needed: int | None) -> list[CheckRow]:
    """Return rows on what a start checks, on real memory, and on the number of files."""
    rows = []
    node, place = site.node, site.config.memory.memory_dir
    room = free_bytes(place, measure(site.node_dir)[0])
    text = "" if needed is None else f"{size_text(needed)} needed"
    if needed is not None:
        try:
            check_room(site, needed)
        except (ConfigError, BusyError) as error:
            rows.append(refused(_ROOM, node, error))
    for what, (free, remedy) in room.items():
        found = f"{what}: {size_text(free)} free"
        if needed is None and free < _LEAST_BYTES:
            rows.append(warned(_ROOM, node, found, remedy))
        elif needed is not None and free < needed and what != place:
            has_parity = site.config.memory.parity_nodes is not None
            less = "larger groups of parity" if has_parity else "fewer replicas"
            remedy += f" Or {less}: see `moe_ft plan`."
            rows.append(failed(_ROOM, node, f"{found}, {text}", remedy))
    status = os.statvfs(place)
    if status.f_files and status.f_favail < num_ranks * _FILES_OF_A_RANK:
        found = f"{place} has room for {status.f_favail} more files"
        remedy = "Mount it with more (mount -o remount,nr_inodes=...)."
        rows.append(failed(_ROOM, node, found, remedy))
    tightest = min(room, key=lambda what: room[what][0])
    found = f"{size_text(room[tightest][0])} free, the limit is {tightest}"
    return rows or [passed(_ROOM, node, "; ".join(filter(None, [found, text])))]


def _pages(site: Site) -> list[CheckRow]:
    """Return a row on huge pages of a tmpfs: with them memory is touched and pinned several times faster."""
    option, mount_point = huge_pages(Path(site.config.memory.memory_dir))
    if not mount_point:
        return []
    # This file is about memory without a mount; only these two of its values change those with one.
    general = SHMEM_PAGES.read_text() if SHMEM_PAGES.exists() else ""
    found, remedy = f"used (huge={option})", ""
    if "[deny]" in general:
        found = f"none: {SHMEM_PAGES} denies them"
        remedy = f"Allow them: echo never > {SHMEM_PAGES} (never is for other memory)."
    elif option == "never" and "[force]" not in general:
        found = "none (huge=never)"
        remedy = f"GPU nodes start faster with mount -o remount,huge=within_size {mount_point}."
    return [CheckRow(_PAGES, site.node, Result.PASS, found, remedy)]


def free_bytes(place: str, own_bytes: int) -> dict[str, tuple[int, str]]:
    """Return what limits memory: the bytes that are free, and how to get more."""
    free = shutil.disk_usage(place).free + own_bytes
    found = {place: (free, "Enlarge it (mount -o remount,size=...).")}
    available = psutil.virtual_memory().available + own_bytes
    found["memory of the node"] = (available, "Use more nodes.")
    group = free_memory()
    if group is not None:
        remedy = "Ask for more memory: --mem of SLURM, limits.memory of Kubernetes."
        found[f"memory limit of the job ({size_text(group[1])})"] = (group[0] + own_bytes, remedy)
    return found


def _leftovers(node: str, place: Path) -> list[CheckRow]:
    """Return a row on the memory of other jobs."""
    try:
        removable, left = clean(str(place), None, _LEAST_AGE_S)
    except ConfigError as error:
        return [refused(_LEFT, node, error, Result.WARN)]
    if removable:
        found = f"dead: {some_of(removable, _MOST_NAMED, '; ')}"
        remedy = f"python -m moe_ft clean --memory-dir {place} --remove"
        return [warned(_LEFT, node, found, remedy)]
    if left:
        return [passed(_LEFT, node, f"{len(left)} entries that stay, the first: {left[0]}")]
    return [passed(_LEFT, node, "none")]


def check_limits(node: str, world_size: int, stage_size: int) -> list[CheckRow]:
    """Return rows on the limits of this process, which are those of ranks that are started as it was.

    Args:
        world_size: ranks of the job.
        stage_size: of them, those of one pipeline stage.
    """
    return [_locked_memory(node), _open_files(node, world_size, stage_size), _core_files(node)]


def _locked_memory(node: str) -> CheckRow:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return passed(_LOCKED, node, "no limit")
    # CUDA registers host memory through its driver; InfiniBand counts what it registers.
    found = f"{size_text(limit)} (ulimit -l): NCCL over InfiniBand and pinned memory may fail"
    remedy = (
        "ulimit -l unlimited; LimitMEMLOCK=infinity of slurmd, or --ulimit memlock=-1 of docker"
    )
    return warned(_LOCKED, node, found, remedy)


def _open_files(node: str, world_size: int, stage_size: int) -> CheckRow:
    try:
        allow_descriptors(world_size, stage_size)
    except ConfigError as error:
        return refused(_OPEN_FILES, node, error)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = "no limit" if hard == resource.RLIM_INFINITY else f"{hard} (ulimit -Hn)"
    return passed(_OPEN_FILES, node, f"{limit}, enough for {world_size} ranks")


def _core_files(node: str) -> CheckRow:
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    if limit == 0:
        return passed(_CORES, node, "none are written")
    pattern = CORE_PATTERN.read_text().strip()
    what = "no limit" if limit == resource.RLIM_INFINITY else size_text(limit)
    if pattern.startswith("|"):
        return passed(_CORES, node, f"{what}; they go to {pattern[1:].split()[0]}")
    found = f"{what}, as {pattern}: a rank that dies first writes its memory, snapshots included, to disk"
    return warned(_CORES, node, found, "ulimit -c 0")
