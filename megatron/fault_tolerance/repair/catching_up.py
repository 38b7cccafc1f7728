"""Iterations that run again after a recovery, until the one that was broken off is finished."""

from typing import Any

from megatron.training import get_args, training

from megatron.fault_tolerance.repair import leftovers
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.position import (
    Position,
    begin_iteration,
    count_iteration,
)
from megatron.fault_tolerance.repair.skipped_evaluations import SkippedEvaluations
from megatron.fault_tolerance.repair.step import Step
from megatron.fault_tolerance.repair.watcher import Watcher
from moe_ft.loop.listeners import Listeners


class CatchingUp:
    """Iterations of one rank in a repair, in place of Megatron's loop. Owned by the training thread."""

    def __init__(
        self,
        listeners: Listeners,
        watcher: Watcher,
        links: Links,
        evaluations: SkippedEvaluations,
    ) -> None:
        """Prepare.

        Args:
            listeners: of the loop.
            watcher: ends an iteration that hangs.
            links: of the groups.
            evaluations: between the iterations.
        """
        self._listeners, self._watcher = listeners, watcher
        self._links, self._evaluations = links, evaluations

    def run(self, step: Step, first: int, last: int, survivors: Position) -> Any:
        """Return the result of the broken iteration. Called by all ranks.

        Args:
            step: the call that was broken off.
            first: the iteration that runs next; the one after the broken one if its state was recovered.
            last: the one that was broken off.
            survivors: where their loop was.

        Raises:
            RepairError: if the state or the result of an iteration cannot be the same as without the death.
        """
        with self._watcher.inside():
            self._listeners.replay_if_due(step.parts.forward_backward)
            self._links.check()
        if first > last:
            return self._answer(step, last, survivors)
        for iteration in range(first, last):
            self._run_and_count(step, iteration)
        return self._run(step, last)

    def _answer(self, step: Step, last: int, survivors: Position) -> Any:
        """Return the result of an iteration whose state was recovered."""
        survivors.set_counters(get_args())  # the loop has not counted the iteration yet
        begin_iteration(get_args(), last)
        with self._watcher.inside():
            return step.answer(last, self._listeners.loop.grad_norm)

    def _run_and_count(self, step: Step, iteration: int) -> None:
        """Do what the loop has done with an iteration: skip it, or run it and leave out its evaluation."""
        args = get_args()
        if iteration + 1 in args.iterations_to_skip:
            _begin(iteration)
            with self._watcher.inside():
                training.dummy_train_step(step.parts.data_iterator)
            count_iteration(args, is_skipped=True)
            return
        self._run(step, iteration)
        count_iteration(args)
        self._evaluations.skip(args, iteration + 1)

    def _run(self, step: Step, iteration: int) -> Any:
        _begin(iteration)
        with self._watcher.inside():
            return step.run(iteration)


def _begin(iteration: int) -> None:
    leftovers.clear_metrics()
    begin_iteration(get_args(), iteration)
