"""Recovery in processes that live on, and iterations that run again until the broken one is finished.

A repair is a start of checkpointing: the listeners set up again. Data are read by new loaders over the data
sets that are there, in the loop's iterators.

If ranks were past their optimizer step, the state that the broken iteration made may be recovered, and the
loop still waits for its result. Megatron's own `train_step` returns it, from what forward and backward have
returned and from the norm in the record.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.training import get_args

from megatron.fault_tolerance.degraded.sharing import Sharing
from megatron.fault_tolerance.repair.between import SkippedEvaluations
from megatron.fault_tolerance.repair.build import Joining
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.swap import Groups
from megatron.fault_tolerance.repair.watcher import Watcher
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.iteration_check import KnownResult
from megatron.fault_tolerance.seams.megatron_loop import (
    begin_at,
    begin_iteration,
    count_iteration,
    counters_of,
)
from megatron.fault_tolerance.seams.replay import clear_metrics
from megatron.fault_tolerance.seams.stack import Function, loop_functions
from megatron.fault_tolerance.seams.uneven_batches import samples_of_iteration
from moe_ft.cluster.member import LoopPosition, Member
from moe_ft.errors import ConfigError, RepairError, UnrecoverableError
from moe_ft.loop.listeners import Built, Listeners, LoopState
from moe_ft.loop.training_loop import LoopParts

_PARTS = ("do_train", "do_valid", "do_test")
# With these flags an iteration gives, or writes, more than is kept of it.
NEEDING_MORE = (
    "dsa_indexer_loss_coeff",
    "log_max_attention_logit",
    "log_num_zeros_in_grad",
    "moe_ft_router_log",
    "mtp_num_layers",
    "optimizer_cuda_graph",
    "qk_clip",
    "reuse_grad_buf_for_mxfp8_param_ag",
    "save_activations_interval",
    "save_dgrads_interval",
    "save_params_interval",
    "save_tokens_per_expert_interval",
    "save_wgrads_interval",
    "vision_pretraining",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Repaired:
    """One rank that is repaired: objects of a whole start, owned by the training thread."""

    member: Member
    store: Any  # of the job
    listeners: Listeners
    joining: Joining | None  # None in the first process of a rank
    watcher: Watcher
    links: Links
    groups: Groups
    data_sets: DataSets
    evaluations: SkippedEvaluations
    sharing: Sharing | None  # None if peers never share micro-batches


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
        self._original = original
        self._kwargs = kwargs
        self._loop = loop
        self._scheduler = scheduler
        self._forward_backward = forward_backward
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
        return self._call(iteration, stepped, stepped, KnownResult(self._losses))

    def leave_out(self, iteration: int) -> Any:
        """Return the result of an iteration that is not run, as one whose optimizer has not stepped."""
        outcome = (False, None, None)
        still = SimpleNamespace(zero_grad=lambda: None, step=lambda increment=0: outcome)
        self._loop.is_left_out = True
        try:
            return self._call(iteration, still, still, KnownResult([]))
        finally:
            self._loop.is_left_out = False

    def _call(
        self, iteration: int, optimizer: Any, scheduler: Any, forward_backward: Function
    ) -> Any:
        parts = self.parts
        data = (parts.forward_step, parts.data_iterator, parts.model)
        args = (*data, optimizer, scheduler, parts.config, forward_backward)
        return self._original(*args, **{**self._kwargs, "iteration": iteration})


def recover(
    rank: Repaired,
    built: Built,
    parts: LoopParts,
    positions: Sequence[LoopPosition],
    *,
    may_keep: bool = True,
) -> int:
    """Recover a state, renew the data, and return the iteration that runs next. Called by all ranks.

    Args:
        may_keep: whether the state after the broken iteration may be recovered.

    Raises:
        RepairError: if there is no state, or it cannot be taken up.
    """
    args, listeners = get_args(), rank.listeners
    most = most_iteration(positions, args)
    if not may_keep:
        most = min(each.iteration for each in positions)
    sound = [each.sound for each in positions if each.sound is not None]
    listeners.loop.most_iteration = min([most, *sound])
    try:
        listeners.after_setup(built, args.iteration)
    except (ConfigError, UnrecoverableError) as error:
        # This is no refusal of the job: another start may do better.
        what = "a repair cannot take up the state"
        if isinstance(error, UnrecoverableError):
            what = "a repair found no state to continue from"
        raise RepairError(f"{what}: {error}") from error
    rank.data_sets.renew_training(parts.data_iterator)
    listeners.begin_training(parts)
    return int(args.iteration)


def most_iteration(positions: Sequence[LoopPosition], args: Any) -> int:
    """Return the latest iteration that can be recovered: the broken one, or the one after it.

    The state after the broken iteration will do if all survivors were in that iteration, and each can still
    make its result.
    """
    iterations = {each.iteration for each in positions}
    is_returned = any(each.done for each in positions)
    is_kept = not any(getattr(args, name, None) for name in NEEDING_MORE)
    return min(iterations) + (len(iterations) == 1 and is_kept and not is_returned)


def catch_up(rank: Repaired, step: Step, first: int, last: int, survivors: LoopPosition) -> Any:
    """Return the result of the broken iteration. Called by all ranks.

    Args:
        first: the iteration that runs next; the one after the broken one if its state was recovered.
        last: the one that was broken off.

    Raises:
        RepairError: if the state or the result of an iteration cannot be the same as without the death.
    """
    left_out = rank.member.left_out
    with rank.watcher.inside():
        rank.listeners.replay_if_due(step.parts.forward_backward)
        rank.links.check()
    if first > last:
        set_counters(get_args(), survivors)  # the loop has not counted the iteration yet
        begin_iteration(get_args(), last)
        with rank.watcher.inside():
            return step.answer(last, rank.listeners.loop.grad_norm)
    for iteration in range(first, last):
        if iteration in left_out:
            _pass_over(rank, step, iteration)
            get_args().consumed_train_samples += samples_of_iteration(get_args())
            rank.evaluations.skip(get_args(), iteration + 1)
        else:
            _run_and_count(rank, step, iteration)
    if last not in left_out:
        return _run(rank, step, last)
    _pass_over(rank, step, last)
    with rank.watcher.inside():
        return step.leave_out(last)


def _pass_over(rank: Repaired, step: Step, iteration: int) -> None:
    """Leave an iteration out, and have the data continue after it; the loop has yet to count it."""
    args = get_args()
    clear_metrics()
    begin_iteration(args, iteration)
    rank.listeners.leave_out(iteration)
    num_samples = samples_of_iteration(args)
    args.skipped_train_samples += num_samples
    rank.data_sets.renew_training(step.parts.data_iterator, num_samples)


def _run_and_count(rank: Repaired, step: Step, iteration: int) -> None:
    """Do what the loop has done with an iteration: skip it, or run it and leave out its evaluation."""
    args = get_args()
    if iteration + 1 in args.iterations_to_skip:
        clear_metrics()
        begin_iteration(args, iteration)
        with rank.watcher.inside():
            loop_functions().dummy_train_step(step.parts.data_iterator)
        count_iteration(args, is_skipped=True)
        return
    _run(rank, step, iteration)
    count_iteration(args)
    rank.evaluations.skip(args, iteration + 1)


def _run(rank: Repaired, step: Step, iteration: int) -> Any:
    clear_metrics()
    begin_iteration(get_args(), iteration)
    with rank.watcher.inside():
        return step.run(iteration)


def position_of(
    args: Any, iteration: int, *, num_groups: int, model: Sequence[Any], evaluations_draw: bool
) -> LoopPosition:
    """Return the position of a loop that has begun an iteration and not counted it."""
    return LoopPosition(
        iteration=iteration,
        num_groups=num_groups,
        gathers_weights=any(getattr(each, "remove_forward_pre_hook_handles", ()) for each in model),
        evaluations_draw=evaluations_draw,
        counters=counters_of(args) | {name: bool(getattr(args, name)) for name in _PARTS},
    )


def set_counters(args: Any, position: LoopPosition) -> None:
    """Have Megatron's loop begin, or continue, at a position."""
    args.curr_iteration = position.iteration
    begin_at(args, position.iteration, position.counters)
