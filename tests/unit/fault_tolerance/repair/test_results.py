"""The result of an iteration that is not run again is made from what was kept of it.

That it equals the one without a failure is in tests/distributed/test_local_repair.py.
"""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron.fault_tolerance.repair import results
from megatron.fault_tolerance.repair.results import KeptResult, can_be_kept, most_iteration
from moe_ft.config.config import ObservabilityConfig
from moe_ft.config.flag_table import flag_classes
from moe_ft.errors import RepairError
from moe_ft.loop.listeners import LoopState
from tests.unit.fault_tolerance.repair.members import position_at

NAME = "load_balancing_loss"
ARGUMENTS = ("forward", "data", "model", "optimizer", "scheduler", "config", "schedule")


class Iterations:
    """Forward and backward that return their iteration, and record a metric that names it.

    Attributes:
        loop: of the rank.
        kept: keeps them.
    """

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self.loop = LoopState()
        self.kept = KeptResult(self.loop)
        self._run = self.kept.around(self._forward_backward)

    def _forward_backward(self) -> list[int]:
        iteration = self._args.curr_iteration
        get_moe_metrics_tracker().record(NAME, torch.tensor(float(iteration)), 1, 2)
        return [iteration]

    def run(self, iteration: int) -> None:
        """Run one."""
        self._args.curr_iteration = iteration
        assert self._run() == [iteration]

    def answers(self, iteration: int, grad_norm: float | None = 1.5) -> Any:
        """Return the arguments of a step that computes nothing."""
        return self.kept.answers(ARGUMENTS, iteration, grad_norm)


@pytest.fixture
def iterations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterations]:
    args = Namespace()
    monkeypatch.setattr(results, "get_args", lambda: args)
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", None)
    yield Iterations(args)


def metric() -> float:
    return float(get_moe_metrics_tracker().metrics[NAME].values[0])


def test_step_with_the_answers_gets_what_the_iteration_has_returned(iterations: Iterations) -> None:
    iterations.run(4)
    get_moe_metrics_tracker().clear()  # what a broken iteration leaves is
    forward_step, data, model, optimizer, scheduler, config, schedule = iterations.answers(4)
    assert (forward_step, data, model, config) == ("forward", "data", "model", "config")
    optimizer.zero_grad()
    assert schedule(forward_step_func=forward_step, num_microbatches=2) == [4]
    assert optimizer.step() == (True, 1.5, None)
    scheduler.step(increment=8)
    assert metric() == 4.0


def test_step_that_was_skipped_is_skipped_in_the_answer(iterations: Iterations) -> None:
    iterations.run(4)
    optimizer = iterations.answers(4, grad_norm=None)[3]
    assert optimizer.step() == (False, None, None)


def test_metrics_are_those_of_the_last_iteration_of_a_replay(iterations: Iterations) -> None:
    iterations.loop.is_replaying = True
    iterations.run(3)
    iterations.run(4)
    assert metric() == 4.0
    get_moe_metrics_tracker().clear()
    assert iterations.answers(4)[6]() == [4]
    assert metric() == 4.0


def test_metrics_of_training_add_up_as_ever(iterations: Iterations) -> None:
    iterations.run(3)
    iterations.run(4)
    assert metric() == 7.0


def test_rank_that_has_not_kept_the_iteration_gives_the_repair_up(iterations: Iterations) -> None:
    with pytest.raises(RepairError, match="after iteration 4 was recovered, and its result is not"):
        iterations.answers(4)
    iterations.run(3)
    with pytest.raises(RepairError):
        iterations.answers(4)


def test_flags_that_ask_for_more_exist() -> None:
    ours = {f"moe_ft_{each.name}" for each in fields(ObservabilityConfig)}
    assert set(results._NEEDING_MORE) <= {*flag_classes(), *ours}


def test_result_is_not_kept_where_an_iteration_gives_more() -> None:
    assert can_be_kept(Namespace(qk_clip=False, mtp_num_layers=None))
    assert not can_be_kept(Namespace(qk_clip=True, mtp_num_layers=None))
    assert not can_be_kept(Namespace(save_wgrads_interval=5))


def test_state_after_the_broken_iteration_is_recovered_only_where_all_can_have_its_result() -> None:
    def most(*iterations: int, is_evaluated: bool = False, **flags: bool) -> int:
        positions = [position_at(each, is_evaluated=is_evaluated) for each in iterations]
        return most_iteration(positions, Namespace(**flags))

    assert most(4, 4) == 5
    assert most(4, 5) == 4
    assert most(4, 4, log_num_zeros_in_grad=True) == 4
    assert most(4, 4, is_evaluated=True) == 4, "its result was returned before"
