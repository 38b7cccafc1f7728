"""Iterations run again as the loop has run them, until the broken one is finished."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
from megatron.core.rerun_state_machine import (
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.training import training

from megatron.fault_tolerance.repair.catching_up import CatchingUp
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.results import KeptResult
from megatron.fault_tolerance.repair.skipped_evaluations import SkippedEvaluations
from megatron.fault_tolerance.repair.step import Step
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
        self.args, self.events = args, list[Any]()
        listeners = Listeners(LoopState(), [_Replays(self.events)])
        watcher = Watcher(Rounds(signed(), 0, 1), links := Links(), Link())
        self.evaluations = SkippedEvaluations()
        self._catching_up = CatchingUp(listeners, watcher, links, self.evaluations)
        kept = KeptResult(LoopState())
        schedule = (lambda: self.args.curr_iteration,)
        args_of_step = (
            *("forward", "data", "model", "optimizer", "scheduler", "config"),
            *schedule,
        )
        self._step = Step(self._train_step, args_of_step, {"iteration": BROKEN}, kept)

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
        return self._catching_up.run(self._step, first, BROKEN, position_at(BROKEN))


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
