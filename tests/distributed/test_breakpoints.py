"""Breakpoints: a job that is ended continues from the very iteration it was in, whatever the strategy."""

from collections.abc import Sequence

import pytest

from tests.checkpoint_job import CheckpointJob
from tests.faulty_runs import fault_flags
from tests.harness import run_with_restarts

NUM_RANKS = 2
NUM_ITERATIONS = 42
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
DENSE = ("--moe-ft-strategy", "dense", "--moe-ft-interval", "4")
PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1", "--moe-ft-k-persist", "1")
DROPOUT = ("--hidden-dropout", "0.1", "--lr-decay-style", "linear")
# All phases of an iteration; a new window replaces what was recovered before the next one.
PHASES = ("forward", "backward", "before-step", "in-step", "after-step")
PLAN = [(5 + 8 * number, phase) for number, phase in enumerate(PHASES)]


def run_ended(
    job: CheckpointJob, faults: Sequence[str], *flags: str, num_iterations: int = NUM_ITERATIONS
) -> list[tuple[int, int]]:
    """Run the job until it ends by itself; return where each start continued, and how many it replayed.

    All ranks agree on that, lose nothing, and read their own node's memory only.
    """
    given = [*DROPOUT, "--train-iters", str(num_iterations), "--moe-ft-breakpoints"]
    run_with_restarts(
        job.flags(*given, *flags, *fault_flags(faults)),
        NUM_RANKS,
        log_dir=job.folder,
        max_restarts=len(faults),
    )[-1].check()
    found = []
    for rank in range(NUM_RANKS):
        lines = job.events("recovery", rank)
        assert all(line["lost_tokens"] == 0 for line in lines)
        assert all(set(line["sources"]) == {"memory"} for line in lines)
        found.append([(line["target_iteration"], line["replayed_iterations"]) for line in lines])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "strategy",
    [
        SPARSE,
        pytest.param(DENSE, marks=pytest.mark.rest),
        pytest.param(PARTIAL, marks=pytest.mark.rest),
    ],
    ids=["sparse", "dense", "partial"],
)
def test_job_that_is_ended_in_any_phase_continues_where_it_was(
    job: CheckpointJob, strategy: Sequence[str]
) -> None:
    faults = [f"terminate:{n % 2}@{iteration}:{phase}" for n, (iteration, phase) in enumerate(PLAN)]
    found = run_ended(job, faults, *strategy)
    assert len(found) == len(PLAN)
    for (iteration, _), (target, num_replayed) in zip(PLAN, found, strict=True):
        assert target in (iteration, iteration + 1)
        assert num_replayed == 0
    expected = job.reference(*DROPOUT, "--train-iters", str(NUM_ITERATIONS))
    assert job.digests() == expected
