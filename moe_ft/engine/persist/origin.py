"""Origin of a start: its processes and its launcher, which may tell that the start is over.

A start that is over has left its lock, if it was killed. Where nothing here says so, only a lock that nobody
renews tells it: storage_lock.py.
"""

import os
from collections.abc import Iterable, Mapping

import msgspec

from moe_ft.format.encoding import checksum
from moe_ft.processes import has_ended, process_namespace, start_ticks

_MAX_AGENTS = 64  # that a lock names: a restart without any of these watches the lock


class Origin(msgspec.Struct, frozen=True):
    """Processes of a start, and its launcher.

    Attributes:
        system: boot and process numbers that its processes belong to; empty if that cannot be known.
        processes: numbers and start times of rank 0 and, under torchrun, of the process that started it: as
            long as that lives, another rank 0 may come.
        agents: names of torchrun's agents, of the first nodes. An agent serves one job, and ends what it has
            started before it starts anything again.
        scheduled: job of SLURM; empty without it.
        counts: how often SLURM has started that job before, and without torchrun, how often its script has
            started the ranks before.
    """

    system: str = ""
    processes: tuple[tuple[int, int], ...] = ()
    agents: tuple[str, ...] = ()
    scheduled: str = ""
    counts: tuple[int, int] = (0, 0)

    def is_over(self, own: "Origin") -> bool:
        """Return whether it is known that nothing of this start runs any more."""
        if set(self.agents) & set(own.agents):
            return True
        if self.scheduled and self.scheduled == own.scheduled and self.counts < own.counts:
            return True
        is_here = self.system and self.system == own.system
        return bool(is_here and self.processes) and all(has_ended(*each) for each in self.processes)


def own_origin(environment: Mapping[str, str], agents: Iterable[str] = ()) -> Origin:
    """Return the origin of this process."""
    is_torchruns = _is_torchruns(environment)
    pids = [os.getpid(), os.getppid()] if is_torchruns else [os.getpid()]
    is_counted = not is_torchruns or is_kept(environment)  # by a script, for all nodes
    requeues, restarts = restart_counts(environment)
    job = environment.get("SLURM_JOB_ID", "")
    return Origin(
        system=process_namespace(),
        processes=tuple((pid, start_ticks(pid)) for pid in pids),
        agents=tuple(dict.fromkeys(filter(None, agents)))[:_MAX_AGENTS],
        scheduled=f"{environment.get('SLURM_CLUSTER_NAME', '')} {job}" if job else "",
        counts=(requeues, restarts if is_counted else 0),
    )


def agent_name(environment: Mapping[str, str]) -> str:
    """Return a name of torchrun's agent, or of its zygote, that nothing else has; empty without torchrun."""
    if not _is_torchruns(environment):
        return ""
    return checksum(f"{os.getppid()} {start_ticks(os.getppid())} {process_namespace()}".encode())


def is_kept(environment: Mapping[str, str]) -> bool:
    """Return whether `keep` has started the nodes of this job, without torchrun."""
    return "MOE_FT_KEEP_TOKEN" in environment


def _is_torchruns(environment: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in environment


def restart_counts(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return how often SLURM has requeued this job, and torchrun or keep started its ranks again."""
    requeues, restarts = (
        int(count) if (count := environment.get(f"{name}_RESTART_COUNT", "")).isdecimal() else 0
        for name in ("SLURM", "TORCHELASTIC")
    )
    return requeues, restarts
