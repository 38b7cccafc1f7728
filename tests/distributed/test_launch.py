"""Pretraining scripts of all shapes train under `moe_ft run` unchanged, and a kill changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.demo_model import layout_flags, model_flags
from tests.harness import run_ranks, run_training
from tests.jobs import NUM_RANKS, CheckpointJob, refusal
from tests.own_scripts import (
    run_and_digest,
    run_hybrid,
    run_library,
    run_older,
    run_own,
    run_own_parser,
    run_program,
)
from tests.references import Digests
from tests.shares import share_of

ROOT = Path(__file__).resolve().parents[2]
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2")
JOB = [*model_flags(train_iters=6, hidden_dropout=0.1), *layout_flags({"ep": 2})]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("train", share_of([run_own, run_hybrid, run_library], versions=[run_own]))
def test_killed_script_ends_in_the_same_state(
    train: Callable[[list[str]], None], job: CheckpointJob
) -> None:
    """Scripts with data, loss and arguments of their own, with a hybrid model, and with moe_ft imported."""
    job.train = train
    job.base = JOB
    results = job.run_with_faults("kill:1@4:backward", flags=SPARSE)
    assert job.recovered() == [(3, 4)]
    assert job.digests() == job.reference()
    assert "moe_ft: on: --moe-ft-strategy is sparse" in results[-1].output(0)


def test_program_that_needs_no_moe_ft_run_trains_the_same_with_it(
    job: CheckpointJob, expected: Digests
) -> None:
    job.train = run_program
    job.run().check()
    assert job.digests() == expected


def test_without_flags_of_moe_ft_a_script_ends_in_the_state_of_plain_python(tmp_path: Path) -> None:
    ends = []
    for is_plain in (True, False):
        folder = tmp_path / f"plain_{is_plain}"
        result = run_ranks(
            run_and_digest, NUM_RANKS, JOB, is_plain, str(folder), log_dir=folder
        ).check()
        ends.append([json.loads((folder / f"digests_{rank}.json").read_text()) for rank in (0, 1)])
    assert ends[0] == ends[1]
    assert "moe_ft: off" in result.output(0)


@pytest.mark.rest
def test_start_with_other_arguments_of_the_script_says_which(
    job: CheckpointJob,
) -> None:
    job.train, job.base = run_own, JOB
    assert any(job.run("--moe-ft-inject-fault", "kill:1@3:backward").exit_codes)
    result = job.resume("--ignored-share", "0.5")
    (line,) = [
        line for line in result.output(0).splitlines() if "flags of the training script" in line
    ]
    assert line.endswith(": --ignored-share")


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (run_older, "pretrain is called in a way that it does not take"),
        (run_own_parser, "--moe-ft-job-id would be ignored: the script has made its arguments"),
    ],
)
def test_script_that_cannot_work_is_refused_with_the_line_to_change(
    train: Callable[[list[str]], None], words: str, tmp_path: Path
) -> None:
    flags = ["--moe-ft-strategy", "dense", "--moe-ft-job-id", "job"]
    result = run_training(flags, 1, log_dir=tmp_path, train=train)
    assert words in refusal(result)
