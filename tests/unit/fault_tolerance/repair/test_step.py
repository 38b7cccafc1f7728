"""A call of `train_step` is made for another iteration with the same arguments, or answered."""

from argparse import Namespace
from typing import Any

import pytest

from megatron.fault_tolerance.repair import results
from megatron.fault_tolerance.repair.results import KeptResult
from megatron.fault_tolerance.repair.step import Step
from moe_ft.loop.listeners import LoopState

ARGS = Namespace(curr_iteration=0)


def forward_backward(*, scale: int) -> list[int]:
    return [scale * ARGS.curr_iteration]


def train_step(*args: Any, iteration: int, scale: int) -> tuple[Any, ...]:
    """Do what Megatron's does, in short."""
    ARGS.curr_iteration = iteration
    *others, optimizer, _, _, schedule = args
    return (*others, schedule(scale=scale), optimizer.step())


class Optimizer:
    """Steps without skipping."""

    def step(self) -> tuple[bool, float, None]:
        """Return what Megatron's does."""
        return True, 0.5, None


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    monkeypatch.setattr(results, "get_args", lambda: ARGS)
    args = ("forward", "data", "model", Optimizer(), "scheduler", "config", forward_backward)
    return Step(train_step, args, {"iteration": 3, "scale": 10}, KeptResult(LoopState()))


def test_step_runs_any_iteration_with_what_else_the_loop_has_given(step: Step) -> None:
    result = ("forward", "data", "model", [40], (True, 0.5, None))
    assert step.run(4) == result
    assert step.run(3)[3] == [30]
    assert (step.parts.forward_step, step.parts.model, step.parts.config) == (
        *("forward", "model"),
        "config",
    )


def test_answer_has_the_losses_that_were_kept_and_the_norm_that_is_given(step: Step) -> None:
    step.run(4)
    assert step.answer(4, 2.5) == ("forward", "data", "model", [40], (True, 2.5, None))
