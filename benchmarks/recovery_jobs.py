"""Jobs whose highest rank is killed again and again, one for each kind of answer that is compared.

`KINDS` has the kinds. All jobs of the same size train the same: they must end in the same state, bit for bit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.event_logs import Log
from benchmarks.inprocess import called_s, find_problem, run_in_process
from benchmarks.recovery_moments import Answer, Expected
from benchmarks.sparse_jobs import Changes, JobFolder, job_folder
from benchmarks.torchrun import run_under_torchrun
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events

WINDOW = 3
NUM_RESERVES = 3  # as many as a user would hold; each makes the wrapper slower
SCRIPT = "pretrain_gpt_moe.py"
DENSE = ("--moe-ft-strategy", "dense")
REPAIR = ("--moe-ft-repair", "auto")
_WHOLE = (
    *("--moe-ft-strategy", "sparse", "--moe-ft-window", str(WINDOW), "--moe-ft-upstream-log"),
    *("--moe-ft-breakpoints", "--moe-ft-recovery", "local"),
)
_REFUSAL = re.compile(rf"^{re.escape(SCRIPT)}: error: (.*)", re.M)


class NotRunError(Exception):
    """A job that cannot run here, with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Kind of answer to a death.

    Attributes:
        title: for tables.
        flags: of moe_ft.
        keeps: whether ranks are forked by `moe_ft keep`.
        is_local: whether the stages of the others run no iterations again.
        interval_s: of a wrapper in the process: how often it looks, and how long it waits for other reports.
        num_reserves: of a wrapper in the process: ranks that wait for a kill each; 0 for a kind without.
    """

    title: str
    answer: Answer
    flags: Sequence[str] = DENSE
    keeps: bool = True
    is_local: bool = False
    interval_s: float = 0.0
    num_reserves: int = 0


KINDS = {
    "restart": Kind(title="restart", answer=Answer.RESTART, keeps=False),
    "keep": Kind(title="restart, keep", answer=Answer.RESTART),
    "repair": Kind(title="repair", answer=Answer.REPAIR, flags=(*DENSE, *REPAIR)),
    "whole": Kind(
        title="repair, whole survivors, sparse",
        answer=Answer.REPAIR,
        flags=(*_WHOLE, *REPAIR),
        is_local=True,
    ),
    "nvrx": Kind(
        title="NVRx in-process",
        answer=Answer.INPROCESS,
        interval_s=1.0,
        num_reserves=NUM_RESERVES,
    ),
    "nvrx-fast": Kind(
        title="NVRx in-process, 0.1 s",
        answer=Answer.INPROCESS,
        interval_s=0.1,
        num_reserves=NUM_RESERVES,
    ),
}
REFERENCE = "restart"  # others are compared with it


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job.

    Attributes:
        kind: of `KINDS`.
        kills: ``[kill]`` the iteration that runs.
        model: what differs from the demo model of the tests.
    """

    kind: str
    num_ranks: int
    kills: Sequence[int]
    num_iterations: int
    model: Changes = field(default_factory=dict)

    @property
    def expected(self) -> Expected:
        """Return what its recoveries must be."""
        kind = KINDS[self.kind]
        return Expected(
            answer=kind.answer,
            killed=self.num_ranks - 1,
            kills=self.kills,
            is_local=kind.is_local,
        )

    def flags(self, data: Sequence[str], job: JobFolder) -> list[str]:
        """Return the flags of the script."""
        # Imports of many ranks on few cores may be minutes apart.
        model: Changes = {"distributed_timeout_minutes": 3, "train_iters": self.num_iterations}
        flags = [*model_flags(**self.model, **model), *layout_flags(layout_of(self.num_ranks))]
        flags += [*data, *event_flags(job.events), *KINDS[self.kind].flags]
        flags += ["--moe-ft-memory-dir", str(job.memory), "--moe-ft-job-id", "benchmark"]
        for kill in self.kills:
            flags += ["--moe-ft-inject-fault", f"kill:{self.num_ranks - 1}@{kill}:backward"]
        return flags


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Remains of a job.

    Attributes:
        logs: ``[rank]`` all events.
        called_s: ``[kill]`` of a wrapper in the process: when the last rank has called its function again.
    """

    logs: Sequence[Log]
    called_s: Sequence[float] = ()


def layout_of(num_ranks: int) -> Mapping[str, int]:
    """Return a layout with at least two stages, since healthy stages are what a local recovery spares."""
    stages = max(2, num_ranks // 2)
    return {"pp": stages, "ep": num_ranks // stages}


def kills_of(num_kills: int) -> list[int]:
    """Return the iterations of kills: each after a window, and a whole one after the recovery before it."""
    return [WINDOW * (2 * number + 1) + 1 for number in range(num_kills)]


def run_job(job: Job, data: Sequence[str], folder: Path, nvrx: Path) -> Result:
    """Run a job to its end.

    Args:
        job: to run.
        data: flags that name the data set.
        folder: for what it leaves until it has been read.
        nvrx: where nvidia-resiliency-ext is installed.

    Raises:
        NotRunError: if it is refused, or what it needs is not installed.
        AssertionError: if it fails.
    """
    kind, ranks = KINDS[job.kind], range(job.num_ranks)
    with job_folder(folder) as place:
        flags, log_path = job.flags(data, place), place.log / "output"
        if kind.answer is Answer.INPROCESS:
            if problem := find_problem(nvrx):
                raise NotRunError(problem)
            run_in_process(
                flags,
                job.num_ranks,
                num_kills=len(job.kills),
                interval_s=kind.interval_s,
                nvrx=nvrx,
                log_path=log_path,
            )
        else:
            # A repair needs no restarts: one that falls back to them fails.
            restarts = len(job.kills) if kind.answer is Answer.RESTART else 0
            try:
                run_under_torchrun(
                    [SCRIPT, *flags],
                    job.num_ranks,
                    max_restarts=restarts,
                    log_path=log_path,
                    keeps=kind.keeps,
                )
            except AssertionError as error:
                raise_if_refused(log_path.read_text(errors="replace"), error)
                raise
        return Result(
            logs=[events(place.events, rank) for rank in ranks],
            called_s=called_s(place.log, job.num_ranks, len(job.kills))
            if kind.answer is Answer.INPROCESS
            else (),
        )


def raise_if_refused(output: str, error: Exception) -> None:
    """Raise NotRunError if the output of a job says that its flags are refused."""
    if found := _REFUSAL.search(output):
        raise NotRunError(found[1]) from error
