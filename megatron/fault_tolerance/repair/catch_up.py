"""Iterations that run again after a recovery, until the one that was broken off is finished.

If ranks were past their optimizer step, the state that the broken iteration made may be recovered, and the
loop still waits for its result. Megatron's own `train_step` returns it, from what forward and backward have
returned and from the norm in the record.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    update_num_microbatches,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.training import get_args, training

from megatron.fault_tolerance.repair.between import SkippedEvaluations
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.meet import Position
from megatron.fault_tolerance.repair.watcher import Watcher
from megatron.fault_tolerance.seams.replay import clear_metrics
from megatron.fault_tolerance.seams.uneven_batches import samples_of_iteration
from moe_ft.errors import RepairError
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.loop.training_loop import LoopParts

Function = Callable[..., Any]

COUNTERS = (
    *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
    "num_floating_point_operations_so_far",
)
_PARTS = ("do_train", "do_valid", "do_test")


class Step:
    """A call of `train_step` by Megatron's loop, to be made again for any iteration.

    It keeps forward and backward as they ended last on this rank, in training or in a replay. Owned by the
    training thread.
    """

    def __init__(
        self,
        original: Function,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        loop: LoopState,
    ) -> None:
        forward_step, data_iterator, model, optimizer, scheduler, config, forward_backward = args
        self._original, self._kwargs, self._loop = original, kwargs, loop
        self._scheduler, self._forward_backward = scheduler, forward_backward
        self.parts = LoopParts(
            forward_step=forward_step,
            data_iterator=data_iterator,
            model=model,
            optimizer=optimizer,
            config=config,
            forward_backward=self._run_and_keep,
        )
        self._kept_iteration: int | None = None
        self._losses: Any = None
        self._metrics: Mapping[str, torch.Tensor] = {}

    def _run_and_keep(self, *args: Any, **kwargs: Any) -> Any:
        if self._loop.is_replaying:  # a log line is about one iteration
            clear_metrics()
        self._kept_iteration = None
        self._losses = self._forward_backward(*args, **kwargs)
        entries = get_moe_metrics_tracker().metrics.items()
        self._metrics = {name: entry.values.clone() for name, entry in entries}
        self._kept_iteration = get_args().curr_iteration
        return self._losses

    def run(self, iteration: int) -> Any:
        """Run an iteration."""
        parts = self.parts
        return self._call(iteration, parts.optimizer, self._scheduler, parts.forward_backward)

    def answer(self, iteration: int, grad_norm: float | None) -> Any:
        """Return the result of an iteration whose state is there: Megatron's function computes nothing.

        Its metrics are then those that the next log line reads.

        Args:
            grad_norm: of the iteration; None if gradients were not finite.

        Raises:
            RepairError: if this rank has not kept the iteration.
        """
        if self._kept_iteration != iteration:
            raise RepairError(
                f"the state after iteration {iteration} was recovered, and its result is not known"
            )
        for name, entry in get_moe_metrics_tracker().metrics.items():
            if name in self._metrics:
                entry.values.copy_(self._metrics[name])
        outcome = (grad_norm is not None, grad_norm, None)  # made, norm, no number of zeros
        stepped = SimpleNamespace(zero_grad=lambda: None, step=lambda increment=0: outcome)
        return self._call(iteration, stepped, stepped, lambda *args, **kwargs: self._losses)

    def _call(
        self, iteration: int, optimizer: Any, scheduler: Any, forward_backward: Function
    ) -> Any:
        parts = self.parts
        data = (parts.forward_step, parts.data_iterator, parts.model)
        args = (*data, optimizer, scheduler, parts.config, forward_backward)
        return self._original(*args, **{**self._kwargs, "iteration": iteration})


def catch_up(
    step: Step,
    first: int,
    last: int,
    survivors: Position,
    *,
    listeners: Listeners,
    watcher: Watcher,
    links: Links,
    evaluations: SkippedEvaluations,
) -> Any:
    """Return the result of the broken iteration. Called by all ranks.

    Args:
        first: the iteration that runs next; the one after the broken one if its state was recovered.
        last: the one that was broken off.

    Raises:
        RepairError: if the state or the result of an iteration cannot be the same as without the death.
    """
    with watcher.inside():
        listeners.replay_if_due(step.parts.forward_backward)
        links.check()
    if first > last:
        set_counters(get_args(), survivors)  # the loop has not counted the iteration yet
        begin_iteration(get_args(), last)
        with watcher.inside():
            return step.answer(last, listeners.loop.grad_norm)
    for iteration in range(first, last):
        _run_and_count(step, iteration, watcher, evaluations)
    return _run(step, last, watcher)


def _run_and_count(
    step: Step, iteration: int, watcher: Watcher, evaluations: SkippedEvaluations
) -> None:
    """Do what the loop has done with an iteration: skip it, or run it and leave out its evaluation."""
    args = get_args()
    if iteration + 1 in args.iterations_to_skip:
        clear_metrics()
        begin_iteration(args, iteration)
        with watcher.inside():
            training.dummy_train_step(step.parts.data_iterator)
        count_iteration(args, is_skipped=True)
        return
    _run(step, iteration, watcher)
    count_iteration(args)
    evaluations.skip(args, iteration + 1)


def _run(step: Step, iteration: int, watcher: Watcher) -> Any:
    clear_metrics()
    begin_iteration(get_args(), iteration)
    with watcher.inside():
        return step.run(iteration)


def position_of(
    args: Any, iteration: int, *, num_groups: int, model: Sequence[Any], evaluations_draw: bool
) -> Position:
    """Return the position of a loop that has begun an iteration and not counted it."""
    return Position(
        iteration=iteration,
        num_groups=num_groups,
        gathers_weights=any(getattr(each, "remove_forward_pre_hook_handles", ()) for each in model),
        evaluations_draw=evaluations_draw,
        **{name: getattr(args, name) for name in COUNTERS},
        **{name: bool(getattr(args, name)) for name in _PARTS},
    )


def set_counters(args: Any, position: Position) -> None:
    """Have Megatron's loop begin, or continue, at a position."""
    args.iteration = args.curr_iteration = position.iteration
    for name in (*COUNTERS, *_PARTS):
        setattr(args, name, getattr(position, name))
    update_num_microbatches(position.consumed_train_samples, consistency_check=False)


def begin_iteration(args: Any, iteration: int) -> None:
    """Do what Megatron's loop does before an iteration."""
    args.curr_iteration = get_rerun_state_machine().current_iteration = iteration
    update_num_microbatches(args.consumed_train_samples, consistency_check=True)


def count_iteration(args: Any, *, is_skipped: bool = False) -> None:
    """Do what Megatron's loop does after an iteration; of a skipped one the batch was only read."""
    num_samples = samples_of_iteration(args)
    num_left_out = get_current_global_batch_size() - get_current_running_global_batch_size()
    args.consumed_train_samples += num_samples
    args.skipped_train_samples += num_samples if is_skipped else num_left_out
