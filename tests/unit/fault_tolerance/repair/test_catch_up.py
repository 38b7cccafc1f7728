"""Iterations run again as the loop has run them, until the broken one is finished, or its result is made.

That results equal those without a failure is in tests/distributed/test_local_repair.py.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import (
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.training import training

from megatron.fault_tolerance.repair.catch_up import (
    Step,
    begin_iteration,
    catch_up,
    count_iteration,
    position_of,
    set_counters,
)
from megatron.fault_tolerance.repair.evaluation import SkippedEvaluations
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.meet import Position
from megatron.fault_tolerance.repair.watcher import Watcher
from moe_ft.errors import RepairError
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Rounds
from moe_ft.loop.listeners import Listeners, LoopListener, LoopState
from tests.unit.fault_tolerance.repair.members import position_at
from tests.unit.signed import signed

BROKEN = 5


class _Replays(LoopListener):
    """Notes that a window is replayed."""

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def replay_if_due(self, forward_backward: Any = None) -> None:
        self._events.append(("replay", forward_backward is not None))


class Rank:
    """A rank that has recovered the state of iteration 3, and was in iteration 5.

    Attributes:
        args: Megatron's.
        evaluations: are skipped.
        events: what has run, with the samples that were consumed before.
    """

    def __init__(self, args: Namespace) -> None:
        args.iterations_to_skip, args.consumed_train_samples = [], 3 * args.global_batch_size
        self.args, self.events, loop = args, list[Any](), LoopState()
        self._listeners = Listeners(loop, [_Replays(self.events)])
        self._links = Links(link := Link(), (Gloo(),))
        self._watcher = Watcher(Rounds(signed(), 0, 1), self._links, link)
        self.evaluations = SkippedEvaluations()
        parts = ("forward", "data", "model", "optimizer", "scheduler", "config", lambda: None)
        self._step = Step(self._train_step, parts, {"iteration": BROKEN}, loop)

    def _train_step(self, *args: Any, iteration: int) -> str:
        assert self.args.curr_iteration == iteration
        assert get_rerun_state_machine().current_iteration == iteration
        self.note(iteration)
        return f"result {iteration}"

    def note(self, event: Any) -> None:
        """Note what runs."""
        self.events.append((event, self.args.consumed_train_samples))

    def catch_up(self, first: int = 3) -> Any:
        """Return the result of the broken iteration."""
        return catch_up(
            self._step,
            first,
            BROKEN,
            position_at(BROKEN),
            listeners=self._listeners,
            watcher=self._watcher,
            links=self._links,
            evaluations=self.evaluations,
        )


@pytest.fixture
def rank(loop_args: Namespace) -> Iterator[Rank]:
    initialize_rerun_state_machine()
    yield Rank(loop_args)
    destroy_rerun_state_machine()


def test_all_iterations_run_and_all_but_the_broken_one_are_counted(rank: Rank) -> None:
    assert rank.catch_up() == "result 5"
    assert rank.events == [("replay", True), (3, 24), (4, 32), (5, 40)]
    assert rank.args.consumed_train_samples == 40, "the loop counts the last one itself"


def test_iteration_that_the_loop_has_skipped_is_skipped_again(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "dummy_train_step", lambda data: rank.note(data))
    rank.args.iterations_to_skip = [5]
    rank.args.do_valid, rank.args.eval_interval = True, 5
    rank.evaluations.draw = True  # the loop does not evaluate after an iteration that it skips
    assert rank.catch_up() == "result 5"
    assert rank.events == [("replay", True), (3, 24), ("data", 32), (5, 40)]
    assert rank.args.skipped_train_samples == 8
    assert rank.args.consumed_valid_samples == 0


def test_evaluations_before_the_broken_iteration_are_counted_or_end_the_repair(rank: Rank) -> None:
    rank.args.do_valid, rank.args.eval_interval = True, 4
    rank.catch_up()
    assert rank.args.consumed_valid_samples == rank.args.global_batch_size
    rank.evaluations.draw = True
    with pytest.raises(RepairError, match="before the evaluation of iteration 4 would run again"):
        rank.catch_up()


def test_result_is_answered_where_the_state_after_the_broken_iteration_was_recovered(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Step, "answer", lambda step, iteration, norm: f"answer {iteration}")
    rank.args.consumed_train_samples = 48
    assert rank.catch_up(first=BROKEN + 1) == "answer 5"
    assert rank.events == [("replay", True)]
    assert rank.args.consumed_train_samples == 40, "the loop has yet to count it"


NAME = "load_balancing_loss"


class _Optimizer:
    """Steps without skipping."""

    def zero_grad(self) -> None: ...
    def step(self) -> tuple[bool, float, None]:
        return True, 0.5, None


def metric() -> float:
    return float(get_moe_metrics_tracker().metrics[NAME].values[0])


class Calls:
    """A call of `train_step` whose iterations return and record their number."""

    def __init__(self, args: Namespace) -> None:
        self._args, self.loop = args, LoopState()
        parts = ("forward", "data", "model", _Optimizer(), Namespace(step=lambda increment: None))
        given = (*parts, "config", self._forward_backward)
        self.step = Step(self._train_step, given, {"iteration": 3, "scale": 10}, self.loop)

    def _train_step(self, *args: Any, iteration: int, scale: int) -> tuple[Any, ...]:
        """Do what Megatron's does, in short."""
        self._args.curr_iteration = iteration
        *others, optimizer, scheduler, config, schedule = args
        optimizer.zero_grad()
        losses, stepped = schedule(scale=scale), optimizer.step()
        scheduler.step(increment=8)
        return (*others, config, losses, stepped)

    def _forward_backward(self, *, scale: int) -> list[int]:
        iteration = self._args.curr_iteration
        get_moe_metrics_tracker().record(NAME, torch.tensor(float(iteration)), 1, 2)
        return [scale * iteration]


@pytest.fixture
def calls(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", None)
    return Calls(loop_args)


def test_step_runs_any_iteration_with_what_else_the_loop_has_given(calls: Calls) -> None:
    data = ("forward", "data", "model", "config")
    assert calls.step.run(4) == (*data, [40], (True, 0.5, None))
    assert calls.step.run(3) == (*data, [30], (True, 0.5, None))
    parts = calls.step.parts
    assert (parts.forward_step, parts.data_iterator, parts.model, parts.config) == data
    assert metric() == 7.0, "metrics of training add up as ever"


@pytest.mark.parametrize("norm", [2.5, None])
def test_answer_has_what_the_iteration_has_returned_and_recorded(
    calls: Calls, norm: float | None
) -> None:
    calls.step.run(4)
    get_moe_metrics_tracker().clear()  # what a broken iteration leaves is
    data = ("forward", "data", "model", "config")
    assert calls.step.answer(4, norm) == (*data, [40], (norm is not None, norm, None))
    assert metric() == 4.0


def test_metrics_are_those_of_the_last_iteration_of_a_replay(calls: Calls) -> None:
    calls.loop.is_replaying = True
    calls.step.run(3)
    calls.step.run(4)
    assert metric() == 4.0
    get_moe_metrics_tracker().clear()
    calls.step.answer(4, 1.5)
    assert metric() == 4.0


def test_rank_that_has_not_kept_the_iteration_gives_the_repair_up(calls: Calls) -> None:
    with pytest.raises(RepairError, match="after iteration 4 was recovered, and its result is not"):
        calls.step.answer(4, 1.5)
    calls.step.run(3)
    with pytest.raises(RepairError):
        calls.step.answer(4, 1.5)


@pytest.mark.parametrize("hooks", [{}, {"module": "hook"}])
def test_replacement_begins_where_the_survivors_are(
    hooks: dict[str, str], loop_args: Namespace
) -> None:
    loop_args.consumed_train_samples, loop_args.consumed_valid_samples = 40, 16
    loop_args.num_floating_point_operations_so_far = 2.5
    loop_args.do_train, loop_args.do_valid, loop_args.do_test = True, 1, False
    model = [Namespace(remove_forward_pre_hook_handles=hooks)]
    facts = position_of(loop_args, 5, num_groups=12, model=model, evaluations_draw=False).facts()
    loop_args.consumed_train_samples = loop_args.consumed_valid_samples = 0
    del loop_args.do_train, loop_args.do_valid, loop_args.do_test  # they are set with the data
    position = Position(**facts)
    set_counters(loop_args, position)
    assert (loop_args.iteration, loop_args.curr_iteration) == (5, 5)
    assert (loop_args.consumed_train_samples, loop_args.consumed_valid_samples) == (40, 16)
    assert loop_args.num_floating_point_operations_so_far == 2.5
    assert (loop_args.do_train, loop_args.do_valid, loop_args.do_test) == (True, True, False)
    assert (position.num_groups, position.gathers_weights) == (12, bool(hooks))


def test_iterations_are_counted_as_the_loop_counts_them(rank: Rank) -> None:
    args = rank.args
    args.consumed_train_samples = 0
    begin_iteration(args, 7)
    assert args.curr_iteration == get_rerun_state_machine().current_iteration == 7
    count_iteration(args)
    assert args.consumed_train_samples == args.global_batch_size
    assert args.skipped_train_samples == 0
    count_iteration(args, is_skipped=True)
    assert args.consumed_train_samples == 2 * args.global_batch_size
    assert args.skipped_train_samples == args.global_batch_size
    assert get_num_microbatches() == 2
