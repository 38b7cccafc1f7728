"""Memory of this machine that is free for processes, and what processes have for themselves. Linux."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

GROUPS, GROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_GROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_NO_LIMIT = 1 << 60  # version 1 of control groups has a huge number for none


def available_bytes() -> int:
    """Return the bytes that processes of this job can still get on this machine."""
    of_group = free_memory()
    available = psutil.virtual_memory().available
    return available if of_group is None else min(available, of_group[0])


def private_bytes(pids: Iterable[int]) -> int:
    """Return the bytes that processes have for themselves, or share with those that have forked them.

    Memory on tmpfs and files do not count; nor do processes that have ended.
    """
    num_pages = 0
    for pid in pids:
        with suppress(OSError):
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            num_pages += int(resident) - int(shared)
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> list[int]:
    """Return the processes that a process of one thread has forked and not buried; none if it has ended."""
    with suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def free_memory(groups: Path = GROUPS, root: Path = GROUP_ROOT) -> tuple[int, int] | None:
    """Return the bytes that the tightest control group still allows, and its limit; None without a limit.

    Memory on tmpfs counts against it. `groups` names the groups of this process; `root` holds them.
    """
    if not groups.exists():
        return None
    found = []
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        # In a container the path may be that of the host: the mount then shows the own group at its top.
        for directory in (group, *group.parents):
            found += _free_in_group(directory)
            if directory == top:
                break
    return min(found, default=None)


def _free_in_group(directory: Path) -> list[tuple[int, int]]:
    for limit_name, used_name in _GROUP_FILES:
        limit, used = directory / limit_name, directory / used_name
        if limit.is_file() and used.is_file():
            text = limit.read_text().strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                return [(max(0, int(text) - int(used.read_text())), int(text))]
    return []
