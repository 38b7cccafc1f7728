"""Small jobs with partial checkpoints, and a recount of what their recoveries lose."""

from tests.checkpoint_job import CheckpointJob
from tests.recount import Recount

LAYERS = tuple(f"layer.{number}" for number in range(4))
PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-router-log", "--moe-ft-interval", "2")


def recount(job: CheckpointJob, k: int, **rules: object) -> Recount:
    known = {"num_ranks": 2, "layers": LAYERS, "num_experts": 4, "ep_size": 2}
    return Recount(folder=job.events_dir, k_snapshot=k, **{**known, **rules})  # type: ignore[arg-type]


def taken(job: CheckpointJob, incarnation: int, until: int) -> list[int]:
    """Return the iterations of an incarnation's snapshots; a slow machine may skip some."""
    assert not [line for rank in range(2) for line in job.events("degraded", rank)]
    lines = job.events("snapshot")
    found = {line["iteration"] for line in lines if line["incarnation"] == incarnation}
    return sorted(iteration for iteration in found if iteration <= until)


def follow(counted: Recount, job: CheckpointJob, incarnation: int, after: int, until: int) -> None:
    """Tell the recount of the snapshots that an incarnation has completed.

    The snapshot of the recovered iteration may have left no event: its rank may have died before writing it.
    """
    counted.read(incarnation, after)
    last = {until} if until > after else set()
    for iteration in sorted({*taken(job, incarnation, until), *last}):
        counted.snapshot(iteration)


def killed_with_storage(job: CheckpointJob, keep: int) -> None:
    """Run a job and kill it: it leaves memory, and checkpoints that share the files of their experts."""
    job.run(
        *PARTIAL,
        *("--train-iters", "12", "--moe-ft-k-snapshot", "2", "--moe-ft-keep", str(keep)),
        *("--moe-ft-persist-interval", "1", "--moe-ft-inject-fault", "kill:1@11:backward"),
        storage=True,
    )
