"""Evaluations are skipped while iterations run again, unless training would miss their random numbers."""

from argparse import Namespace

import pytest
import torch
from megatron.training import training

from megatron.fault_tolerance.repair.skipped_evaluations import SkippedEvaluations
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import RepairError


@pytest.fixture
def evaluations(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> SkippedEvaluations:
    loop_args.do_valid, loop_args.eval_interval, loop_args.eval_iters = True, 3, 2
    monkeypatch.setattr(training, "evaluate_and_print_results", lambda draw: draw())
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    return SkippedEvaluations()


def evaluate(evaluations: SkippedEvaluations, draws: bool) -> None:
    with Patches() as patches:
        evaluations.install(patches)
        training.evaluate_and_print_results(lambda: torch.rand(1) if draws else None)


def test_samples_of_an_evaluation_are_counted(
    evaluations: SkippedEvaluations, loop_args: Namespace
) -> None:
    evaluate(evaluations, draws=False)
    for iteration in range(1, 6):
        evaluations.skip(loop_args, iteration)
    assert loop_args.consumed_valid_samples == 2 * loop_args.global_batch_size


def test_evaluation_with_random_numbers_ends_the_repair(
    evaluations: SkippedEvaluations, loop_args: Namespace
) -> None:
    evaluate(evaluations, draws=True)
    evaluate(evaluations, draws=False)
    evaluations.skip(loop_args, 4)
    with pytest.raises(RepairError, match="before the evaluation of iteration 3 would run again"):
        evaluations.skip(loop_args, 3)
