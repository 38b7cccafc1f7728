"""Memory limit of the control groups that this process is in; tmpfs counts against it."""

from pathlib import Path

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
_NO_LIMIT = 1 << 60  # version 1 has a huge number for none


def free_memory(proc: Path = PROC, root: Path = ROOT) -> tuple[int, int] | None:
    """Return the bytes that the tightest group still allows, and its limit; None if there is no limit.

    Args:
        proc: names the groups of this process.
        root: where control groups are mounted.
    """
    if not proc.exists():
        return None
    found = []
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        group = top / path.lstrip("/")
        # In a container the path may be that of the host: the mount then shows the own group at its top.
        for directory in (group, *group.parents):
            found += _read(directory)
            if directory == top:
                break
    return min(found, default=None)


def _read(directory: Path) -> list[tuple[int, int]]:
    """Return free bytes and limit of one group, if it has one."""
    for limit_name, used_name in _FILES:
        limit, used = directory / limit_name, directory / used_name
        if limit.is_file() and used.is_file():
            text = limit.read_text().strip()
            if text.isdecimal() and int(text) < _NO_LIMIT:
                return [(max(0, int(text) - int(used.read_text())), int(text))]
    return []
