"""Runs in which Megatron's checks reject a loss: a state that leads there is passed over after two starts."""

import os
from collections.abc import Sequence

import pytest
import torch
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
)
from megatron.training import get_args

from megatron.fault_tolerance.program import forward_step
from tests.harness import _train, run_with_restarts
from tests.jobs import NUM_RANKS, CheckpointJob

Digests = list[tuple[str, str]]
BAD = 4  # iterations that begin with this state
NUM_BAD = 3  # starts in which they compute NaN
RANK = 1


def train_with_nan(flags: list[str]) -> None:
    """Train; in the first starts one rank's loss is NaN in the iteration after one state.

    In the very first it is so once, and not again when Megatron repeats the iteration.
    """
    original, start = forward_step.loss_function, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    num_lost = 0

    def lose(loss_mask: torch.Tensor, output: torch.Tensor) -> object:
        nonlocal num_lost
        is_bad = get_args().curr_iteration == BAD and int(os.environ["RANK"]) == RANK
        if is_bad and start < NUM_BAD and (start > 0 or num_lost == 0):
            num_lost += 1
            output = output * torch.nan
        return original(loss_mask, output)

    forward_step.loss_function = lose  # type: ignore[assignment]
    _train(flags)


@pytest.mark.parametrize(
    "mode",
    [
        "reruns",
        pytest.param("saved", marks=pytest.mark.rest),
        pytest.param("raised", marks=pytest.mark.rest),
    ],
)
def test_state_that_leads_to_nan_twice_is_passed_over_without_a_breakpoint(
    mode: str, job: CheckpointJob, expected: Digests
) -> None:
    saved = ("--save", str(job.folder / "megatron"), "--load", str(job.folder / "megatron"))
    further: Sequence[str] = {
        "reruns": (),
        "saved": (*saved, "--save-interval", "9", "--ckpt-format", "torch_dist"),
        "raised": ("--rerun-mode", "disabled"),
    }[mode]
    *bad, last = run_with_restarts(
        job.flags(*further, "--moe-ft-keep", "2"),
        NUM_RANKS,
        log_dir=job.folder,
        max_restarts=NUM_BAD,
        train=train_with_nan,
    )
    last.check()
    assert job.recovered() == [(BAD, BAD), (BAD, BAD), (BAD - 1, BAD - 1)]
    assert job.digests() == expected
    for rank in range(NUM_RANKS):
        assert not any(line["bytes"] for line in job.events("breakpoint", rank))
    if mode == "raised":
        return
    assert [set(each.exit_codes) for each in bad] == [
        {EXIT_CODE_FAILED_ON_RESULT_VALIDATION},  # another result when it was repeated
        *[{EXIT_CODE_RESUME_TO_DISAMBIGUATE}] * (NUM_BAD - 1),
    ]
    for rank, check in ((RANK, "the loss of this micro-batch is NaN"), (1 - RANK, "grad")):
        named = job.events("rejected", rank)
        assert [(line["iteration"], line["result"]) for line in named] == [(BAD, "nan")] * NUM_BAD
        assert all(check in line["check"] for line in named), named
        reasons = [line["reason"] for line in job.events("stopped", rank)]
        assert len(reasons) == NUM_BAD
        assert all("the result nan was rejected" in each for each in reasons)
