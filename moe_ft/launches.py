"""Starts of a job's ranks as their launcher counts them: who starts them, and whether it has done so before.

torchrun counts its restarts after failures, but not those after nodes have come or gone: its agent, which
lives on, tells these. SLURM counts how often it has requeued a job, a script how often it has begun again,
and `keep` each start of its ranks, which a rank has from its assignment (cluster/assignment.py).
"""

import os
import re
from collections.abc import Mapping

import msgspec

from moe_ft.format.encoding import checksum
from moe_ft.processes import process_namespace, start_ticks


class Launch(msgspec.Struct, frozen=True):
    """One start of the ranks: start 3 of this launcher, begun from start 2.

    Attributes:
        agent: name of the process that starts the ranks of this node, of torchrun or `keep`, which nothing
            else has; empty without one.
        job: of SLURM; empty without it.
        requeues: how often SLURM has started that job before.
        scripted: how often a script has started the launcher before; 0 where torchrun counts its own starts.
        start: number of the start, from 0.
        begun_from: number of the start before it; -1 for the first one.
    """

    agent: str = ""
    job: str = ""
    requeues: int = 0
    scripted: int = 0
    start: int = 0
    begun_from: int = -1

    @property
    def is_counted(self) -> bool:
        """True if a launcher says that it has started this job before."""
        return bool(self.requeues or self.scripted or self.start)

    def repeats(self, known: "Launch") -> bool:
        """Return whether the launcher of an earlier start on this node is that of this one."""
        is_of_agent = bool(self.agent) and self.agent == known.agent
        return bool(self.requeues or self.scripted) or is_of_agent

    def follows(self, known: "Launch") -> bool:
        """Return whether no other start was between an earlier one on this node and this one."""
        if self.job != known.job or self.requeues != known.requeues:
            return self.job == known.job and self.requeues == known.requeues + 1
        # An agent starts ranks again, and repairs some of them, also without counting it.
        is_uncounted = bool(self.agent) and known.start == self.start
        return self.agent == known.agent and (known.start == self.begun_from or is_uncounted)


def launch_of(environment: Mapping[str, str]) -> Launch:
    """Return the start that made this process, as far as its environment tells."""
    requeues, restarts = (
        int(count) if (count := environment.get(f"{name}_RESTART_COUNT", "")).isdecimal() else 0
        for name in ("SLURM", "TORCHELASTIC")
    )
    has_agent, is_kept = "TORCHELASTIC_RUN_ID" in environment, "MOE_FT_KEEP_TOKEN" in environment
    job = environment.get("SLURM_JOB_ID", "")
    return Launch(
        agent=_name_of_parent() if has_agent else "",
        job=f"{environment.get('SLURM_CLUSTER_NAME', '')} {job}" if job else "",
        requeues=requeues,
        scripted=restarts if is_kept or not has_agent else 0,
        start=restarts,
        begun_from=restarts - 1,
    )


def _name_of_parent() -> str:
    pid = os.getppid()
    return checksum(f"{pid} {start_ticks(pid)} {process_namespace()}".encode())


def shares_store(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun keeps the store where ranks meet, over all starts."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def slurms_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables, from those of a step of `srun` with several tasks; else none."""
    if "RANK" in environment or environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return {}
    return {
        "RANK": environment.get("SLURM_PROCID", ""),
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(_tasks_on_node(environment)),
    }


def _tasks_on_node(environment: Mapping[str, str]) -> int:
    """Return SLURM's processes on this node, from a list such as 8(x2),4."""
    counts: list[int] = []
    for text in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", text):
            counts += [int(match[1])] * int(match[2] or 1)
    text = environment.get("SLURM_NODEID", "")
    node = int(text) if text.isdecimal() else 0
    return counts[node] if node < len(counts) else 1
