"""Processes of the ranks on this machine: which of them are gone, without waiting for any."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def local_pids() -> dict[int, int]:
    """Return the process ids, by rank, of the ranks whose processes this one can see. Called by all ranks."""
    own = (_namespace(), os.getpid())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {
        rank: pid
        for rank, (namespace, pid) in enumerate(everyone)
        if namespace and namespace == own[0]
    }


def _namespace() -> str:
    """Return a name of the process ids that this process can see; empty if there is none."""
    with suppress(OSError):
        return f"{_BOOT.read_text().strip()} {Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def gone_ranks(pids: Mapping[int, int]) -> frozenset[int]:
    """Return the ranks whose processes have ended, if only just."""
    return frozenset(rank for rank, pid in pids.items() if _has_ended(pid))


def _has_ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] in ("Z", "X")
