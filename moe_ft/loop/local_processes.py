"""Processes of the ranks: those on this machine, of which some may be gone, and the secret that all share."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from moe_ft.processes import has_ended, process_namespace


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProcesses:
    """Processes of the ranks as one rank knows them: none before the ranks have met.

    Attributes:
        pids: process ids, by rank, of the ranks whose processes this one can see.
        token: signs what the ranks say in the job's store when they leave. Before they have met, it is one
            that anybody knows.
    """

    pids: Mapping[int, int] = field(default_factory=dict)
    token: str = "none yet"


def meet_processes() -> JobProcesses:
    """Meet the other ranks. Called by all ranks."""
    own = (process_namespace(), os.getpid(), secrets.token_hex(16))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    pids = {
        rank: pid
        for rank, (namespace, pid, _) in enumerate(everyone)
        if namespace and namespace == own[0]
    }
    return JobProcesses(pids=pids, token=everyone[0][2])


def gone_ranks(pids: Mapping[int, int]) -> frozenset[int]:
    """Return the ranks whose processes have ended, if only just."""
    return frozenset(rank for rank, pid in pids.items() if has_ended(pid))
