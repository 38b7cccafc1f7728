"""A rank ends in what the loop does after `train_step`: the next start does it, or says that it did not."""

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from megatron.training import training

import pretrain_gpt_moe
from tests.jobs import NUM_ITERATIONS, NUM_RANKS, CheckpointJob
from tests.kept_job import logged_in

RANK, ITERATION = 1, 4
# Functions of the loop, each with the place of the iteration in its arguments.
_PLACES = {
    "log line": ("training_log", 3),
    "evaluation": ("evaluate_and_print_results", 4),
    "save": ("save_checkpoint_and_time", 0),
    "exit": ("checkpoint_and_decide_exit", 3),
}
STRATEGIES = pytest.mark.parametrize(
    "strategy",
    [(), ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3", "--moe-ft-breakpoints")],
    ids=["dense", "sparse, breakpoints"],
)
_EVALUATION = re.compile(r"validation loss at iteration (\d+) \|")


def train_dying(place: str, folder: str, flags: list[str]) -> None:
    """Train; a rank is ended once in what the loop does with an iteration after its `train_step`."""
    name, position = _PLACES[place]
    original: Callable[..., Any] = getattr(training, name)
    marker = Path(folder) / "has_died"

    def dying(*args: Any, **kwargs: Any) -> Any:
        if os.environ["RANK"] == str(RANK) and args[position] == ITERATION and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3600)  # the thread that waits for the signal ends the process
        return original(*args, **kwargs)

    setattr(training, name, dying)
    pretrain_gpt_moe.main(flags)


def run_dying(job: CheckpointJob, place: str, *flags: str) -> str:
    """Run a job that is ended once; return the output of all starts."""
    job.train = partial(train_dying, place, str(job.folder))
    results = job.run_with_faults(flags=flags, is_intact=False)
    job.train = None
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
    printed = set(logged_in(output))
    named = {line["iteration"] for line in job.events("left_out", NUM_RANKS - 1)}
    assert printed | named == {*range(1, NUM_ITERATIONS + 1)}
    assert (f"log line of iteration {ITERATION} may be missing" in output) == bool(named)
