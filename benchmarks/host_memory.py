"""Host memory of processes and of a folder on tmpfs, from /proc."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil


def host_memory_bytes(processes: Sequence[psutil.Process], tmpfs: Path) -> int:
    """Return what processes hold that is not a file's, and what the candidate's files on tmpfs hold.

    Of a process it is the proportional set size of anonymous and shared memory, so that pages which a
    fork or shared memory shows in several processes count once. The libraries' code is left out: it
    would depend on who else runs them. Files on tmpfs count by their blocks, hence also where no
    process maps them, and mappings of them are taken off the processes. A sample takes some 50 ms: a
    peak that is shorter may be missed.
    """
    total = sum(path.stat().st_blocks * 512 for path in tmpfs.rglob("*") if path.is_file())
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            folder = Path(f"/proc/{process.pid}")
            held = _held_bytes(folder)
            if str(tmpfs) in (folder / "maps").read_text():
                mapped = _mapped_bytes((folder / "smaps").read_text(), tmpfs)
                # A mapping that appears or disappears meanwhile must not count twice.
                held = min(held, _held_bytes(folder)) - mapped
            total += held
    return total


def _held_bytes(folder: Path) -> int:
    return _sum_fields((folder / "smaps_rollup").read_text(), ("Pss_Anon:", "Pss_Shmem:"))


def _sum_fields(smaps: str, fields: tuple[str, ...]) -> int:
    lines = (line.split() for line in smaps.splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in fields)


def _mapped_bytes(smaps: str, tmpfs: Path) -> int:
    """Return the shared memory in a process's mappings of files below a folder."""
    total, is_below = 0, False
    for line in smaps.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            is_below = len(words) == 6 and words[5].startswith(str(tmpfs)) and "s" in words[1]
        elif is_below and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total
