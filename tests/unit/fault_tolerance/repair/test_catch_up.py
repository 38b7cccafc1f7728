"""Iterations run again as the loop has run them, until the broken one is finished, or its result is made.

That results equal those without a failure is in tests/distributed/test_local_repair.py.
"""

from argparse import Namespace
from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import Any, override

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

from megatron.fault_tolerance.repair.between import SkippedEvaluations
from megatron.fault_tolerance.repair.catch_up import (
    NEEDING_MORE,
    Step,
    catch_up,
    most_iteration,
    position_of,
    recover,
    set_counters,
)
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.megatron_loop import begin_iteration, count_iteration
from moe_ft.cluster.member import Done, LoopPosition
from moe_ft.config.flag_table import flag_classes
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.errors import ConfigError, RepairError, UnrecoverableError
from moe_ft.loop.listeners import Built, Listeners, LoopListener, LoopState
from moe_ft.loop.training_loop import LoopParts
from tests.unit.fault_tolerance.repair.members import Watched, position_at

BROKEN = 5
METRIC = "load_balancing_loss"
DATA: tuple[Any, ...] = ("forward", "data", "model", "config")


class _Optimizer:
    """Steps without skipping."""

    def zero_grad(self) -> None: ...
    def step(self) -> tuple[bool, float, None]:
        return True, 0.5, None


class Rank(LoopListener):
    """A rank that has recovered the state of iteration 3, and was in iteration 5.

    Attributes:
        args: Megatron's.
        evaluations: are skipped.
        events: what has run, with the samples that were consumed before.
    """

    def __init__(self, args: Namespace) -> None:
        args.iterations_to_skip, args.consumed_train_samples = [], 3 * args.global_batch_size
        self.args, self.events, self.loop = args, list[Any](), LoopState()
        self._watched, self.evaluations = Watched(), SkippedEvaluations()
        scheduler = Namespace(step=lambda increment: None)
        given = (*DATA[:3], _Optimizer(), scheduler, DATA[3], self._forward_backward)
        self.step = Step(self._train_step, given, {"iteration": BROKEN, "scale": 10}, self.loop)

    def _train_step(self, *args: Any, iteration: int, scale: int) -> tuple[Any, ...]:
        """Do what Megatron's does, in short."""
        assert self.args.curr_iteration == iteration
        assert get_rerun_state_machine().current_iteration == iteration
        *data, optimizer, scheduler, config, schedule = args
        optimizer.zero_grad()
        losses, stepped = schedule(scale=scale), optimizer.step()
        scheduler.step(increment=8)
        return (*data, config, losses, stepped)

    def _forward_backward(self, *, scale: int) -> list[int]:
        iteration = self.args.curr_iteration
        self.note(iteration)
        get_moe_metrics_tracker().record(METRIC, torch.tensor(float(iteration)), 1, 2)
        return [scale * iteration]

    @override
    def replay_if_due(self, forward_backward: Any = None) -> None:
        self.note(("replay", forward_backward is not None))

    def note(self, event: Any) -> None:
        """Note what runs."""
        self.events.append((event, self.args.consumed_train_samples))

    def run(self, iteration: int) -> Any:
        """Run one iteration."""
        begin_iteration(self.args, iteration)
        return self.step.run(iteration)

    def renew_training(self, iterators: Any, num_more: int) -> None:
        """Stand for the data sets."""
        self.note(("renewed", iterators, num_more))

    def catch_up(self, first: int = 3, left_out: Collection[int] = ()) -> Any:
        """Return the result of the broken iteration."""
        whole: Any = Namespace(
            member=Namespace(left_out=left_out),
            listeners=Listeners(self.loop, [self]),
            watcher=self._watched.watcher,
            links=self._watched.links,
            evaluations=self.evaluations,
            data_sets=self,
        )
        return catch_up(whole, self.step, first, BROKEN, position_at(BROKEN))


@pytest.fixture
def rank(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", None)
    initialize_rerun_state_machine()
    yield Rank(loop_args)
    destroy_rerun_state_machine()


def metric() -> float:
    return float(get_moe_metrics_tracker().metrics[METRIC].values[0])


REPLAY = (("replay", True), 24)
RESULT = (*DATA, [50], (True, 0.5, None))


def test_all_iterations_run_and_all_but_the_broken_one_are_counted(rank: Rank) -> None:
    assert rank.catch_up() == RESULT
    assert rank.events == [REPLAY, (3, 24), (4, 32), (5, 40)]
    assert rank.args.consumed_train_samples == 40, "the loop counts the last one itself"
    assert metric() == 5.0, "a log line is about one iteration"


def test_iteration_that_the_loop_has_skipped_is_skipped_again(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "dummy_train_step", lambda data: rank.note(data))
    rank.args.iterations_to_skip = [5]
    rank.args.do_valid, rank.args.eval_interval = True, 5
    rank.evaluations.draw = True  # the loop does not evaluate after an iteration that it skips
    assert rank.catch_up() == RESULT
    assert rank.events == [REPLAY, (3, 24), ("data", 32), (5, 40)]
    assert rank.args.skipped_train_samples == 8
    assert rank.args.consumed_valid_samples == 0


@pytest.mark.parametrize(
    ("left_out", "ran"),
    [(4, [(3, 24), (("renewed", "data", 8), 32), (5, 40)]), (BROKEN, [(3, 24), (4, 32)])],
)
def test_iteration_that_is_left_out_is_not_run_and_its_samples_are_not_read(
    rank: Rank, left_out: int, ran: list[Any]
) -> None:
    result = rank.catch_up(left_out=[left_out])
    if left_out == BROKEN:
        assert result == (*DATA, [], (False, None, None)), "as of one whose step was skipped"
        ran = [*ran, (("renewed", "data", 8), 40)]
        assert rank.loop.iteration == BROKEN + 1
    else:
        assert result == RESULT
    assert rank.events == [REPLAY, *ran]
    assert rank.args.consumed_train_samples == 40, "the loop counts the last one itself"
    assert rank.args.skipped_train_samples == 8
    assert not rank.loop.is_left_out


@pytest.mark.parametrize("norm", [2.5, None])
def test_result_is_answered_where_the_state_after_the_broken_iteration_was_recovered(
    rank: Rank, norm: float | None
) -> None:
    rank.run(BROKEN)
    get_moe_metrics_tracker().clear()  # what a broken iteration leaves is
    rank.loop.grad_norm = norm
    rank.args.consumed_train_samples = 48
    rank.events.clear()
    assert rank.catch_up(first=BROKEN + 1) == (*DATA, [50], (norm is not None, norm, None))
    assert rank.events == [(("replay", True), 48)], "nothing is computed"
    assert rank.args.consumed_train_samples == 40, "the loop has yet to count it"
    assert metric() == 5.0


def test_metrics_are_those_of_the_last_iteration_of_a_replay(rank: Rank) -> None:
    rank.run(3)
    rank.run(4)
    assert metric() == 7.0, "those of training add up as ever"
    rank.loop.is_replaying = True
    rank.run(5)
    assert metric() == 5.0
    parts = rank.step.parts
    assert (parts.forward_step, parts.data_iterator, parts.model, parts.config) == DATA


def test_rank_that_has_not_kept_the_iteration_gives_the_repair_up(rank: Rank) -> None:
    with pytest.raises(RepairError, match="after iteration 5 was recovered, and its result is not"):
        rank.catch_up(first=BROKEN + 1)
    rank.run(4)
    with pytest.raises(RepairError):
        rank.catch_up(first=BROKEN + 1)


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
    position = LoopPosition(**facts)
    set_counters(loop_args, position)
    assert (loop_args.iteration, loop_args.curr_iteration) == (5, 5)
    assert (loop_args.consumed_train_samples, loop_args.consumed_valid_samples) == (40, 16)
    assert loop_args.num_floating_point_operations_so_far == 2.5
    assert (loop_args.do_train, loop_args.do_valid, loop_args.do_test) == (True, True, False)
    assert (position.num_groups, position.gathers_weights) == (12, bool(hooks))


def test_iterations_are_counted_as_the_loop_counts_them(rank: Rank) -> None:
    args = rank.args
    args.consumed_train_samples = 0
    count_iteration(args)
    assert args.consumed_train_samples == args.global_batch_size
    assert args.skipped_train_samples == 0
    count_iteration(args, is_skipped=True)
    assert args.consumed_train_samples == 2 * args.global_batch_size
    assert args.skipped_train_samples == args.global_batch_size
    assert get_num_microbatches() == 2


def test_flags_that_ask_for_more_exist() -> None:
    ours = {f"moe_ft_{each.name}" for each in fields(ObservabilityConfig)}
    assert set(NEEDING_MORE) <= {*flag_classes(), *ours}


def test_state_after_the_broken_iteration_is_recovered_only_where_all_can_have_its_result() -> None:
    def most(*iterations: int, done: Done = Done.NOTHING, **flags: bool) -> int:
        positions = [position_at(each, done=done) for each in iterations]
        return most_iteration(positions, Namespace(**flags))

    assert most(4, 4) == 5
    assert most(4, 5) == 4
    assert most(4, 4, log_num_zeros_in_grad=True) == 4
    assert most(4, 4, done=Done.STEP) == 4, "its result was returned before"


class _Failing(LoopListener):
    """Cannot recover."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @override
    def after_setup(self, built: Built) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UnrecoverableError("all is lost"), "found no state to continue from: all is lost"),
        (ConfigError("node n2 has no room"), "cannot take up the state: node n2 has no room"),
    ],
)
def test_repair_that_cannot_recover_is_no_refusal_of_the_job_and_says_what_is_true(
    error: Exception, words: str, loop_args: Namespace
) -> None:
    loop_args.iteration = 0
    listeners, position = Listeners(LoopState(), [_Failing(error)]), position_at(4)
    parts = LoopParts(model=[], optimizer=None, config=None, forward_backward=print)
    with pytest.raises(RepairError, match=words):
        whole: Any = Namespace(listeners=listeners, data_sets=DataSets())
        recover(whole, ([], None, None), parts, [position])
    assert listeners.loop.most_iteration == 5, "all know the result of the broken iteration"
