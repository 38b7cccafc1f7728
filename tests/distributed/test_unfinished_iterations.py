"""A rank ends in what the loop does after `train_step`: the next start does it, or says that it did not."""

import re
from collections.abc import Sequence
from functools import partial

import pytest

from tests.dying_after_step import ITERATION, train_dying
from tests.harness import run_with_restarts
from tests.jobs import NUM_ITERATIONS, NUM_RANKS, CheckpointJob

STRATEGIES = pytest.mark.parametrize(
    "strategy",
    [(), ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3", "--moe-ft-breakpoints")],
    ids=["dense", "sparse, breakpoints"],
)
_LOG_LINE = re.compile(r"iteration +(\d+)/ +\d+ \|")
_EVALUATION = re.compile(r"validation loss at iteration (\d+) \|")


def run_dying(job: CheckpointJob, place: str, *flags: str) -> str:
    """Run a job that is ended once; return the output of all starts."""
    results = run_with_restarts(
        job.flags(*flags),
        NUM_RANKS,
        log_dir=job.folder,
        max_restarts=2,
        train=partial(train_dying, place, str(job.folder)),
    )
    results[-1].check()
    assert len(results) == 2
    return "".join(result.output(rank) for result in results for rank in range(NUM_RANKS))


@pytest.mark.rest
@STRATEGIES
def test_save_in_which_a_rank_ends_is_made_after_the_recovery(
    job: CheckpointJob, strategy: Sequence[str]
) -> None:
    saves = ("--save", str(job.folder / "saved"), "--save-interval", str(ITERATION))
    output = run_dying(job, "save", *saves, *strategy)
    assert re.search(rf"successfully saved checkpoint from iteration +{ITERATION} ", output)
    assert job.digests() == job.reference()


@pytest.mark.rest
@STRATEGIES
def test_evaluation_in_which_a_rank_ends_is_made_after_the_recovery(
    job: CheckpointJob, strategy: Sequence[str]
) -> None:
    evaluates = ("--eval-interval", str(ITERATION), "--eval-iters", "1")
    output = run_dying(job, "evaluation", *evaluates, *strategy)
    assert str(ITERATION) in _EVALUATION.findall(output)
    assert job.digests() == job.reference(*evaluates)


@pytest.mark.rest
@STRATEGIES
def test_exit_before_which_a_rank_ends_comes_after_the_recovery(
    job: CheckpointJob, strategy: Sequence[str]
) -> None:
    run_dying(job, "exit", "--exit-interval", str(ITERATION), *strategy)
    assert job.events("end")[-1]["iteration"] == ITERATION


@pytest.mark.rest
@STRATEGIES
def test_log_line_in_which_a_rank_ends_comes_after_the_recovery_or_is_named(
    job: CheckpointJob, strategy: Sequence[str]
) -> None:
    output = run_dying(job, "log line", *strategy)
    printed = {int(number) for number in _LOG_LINE.findall(output)}
    named = {line["iteration"] for line in job.events("left_out", NUM_RANKS - 1)}
    assert printed | named == {*range(1, NUM_ITERATIONS + 1)}
    assert (f"log line of iteration {ITERATION} may be missing" in output) == bool(named)
