"""Position of Megatron's loop in the iteration that was broken off, from a survivor to a replacement."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    update_num_microbatches,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron.fault_tolerance.seams.loop_facts import samples_of_iteration
from moe_ft.errors import RepairError
from moe_ft.keeper.rounds import Member


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Counters of the loop as its next, or broken, iteration begins.

    Attributes:
        num_groups: process groups that have been made; the same on all ranks, or they do not fit together.
        do_train, do_valid, do_test: parts for which there are data. Only ranks that read data know, and
            Megatron has told the others.
        gathers_weights: whether modules gather their weights before they run (--overlap-param-gather). They
            do after the first optimizer step of the loop.
        evaluations_draw: whether evaluations draw random numbers.
        is_evaluated: whether all have finished and logged the iteration, and a rank has died while they
            evaluated its state.
    """

    iteration: int
    consumed_train_samples: int
    consumed_valid_samples: int
    skipped_train_samples: int
    num_floating_point_operations_so_far: float
    num_groups: int
    do_train: bool
    do_valid: bool
    do_test: bool
    gathers_weights: bool
    evaluations_draw: bool
    is_evaluated: bool = False

    def facts(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def set_counters(self, args: Any) -> None:
        """Have Megatron's loop begin, or continue, here."""
        args.iteration = args.curr_iteration = self.iteration
        args.consumed_train_samples = self.consumed_train_samples
        args.consumed_valid_samples = self.consumed_valid_samples
        args.skipped_train_samples = self.skipped_train_samples
        args.num_floating_point_operations_so_far = self.num_floating_point_operations_so_far
        args.do_train, args.do_valid, args.do_test = self.do_train, self.do_valid, self.do_test
        update_num_microbatches(self.consumed_train_samples, consistency_check=False)


def position_of(
    args: Any, iteration: int, *, num_groups: int, model: Sequence[Any], evaluations_draw: bool
) -> Position:
    """Return the position of a loop that has begun an iteration and not counted it."""
    return Position(
        iteration=iteration,
        consumed_train_samples=args.consumed_train_samples,
        consumed_valid_samples=args.consumed_valid_samples,
        skipped_train_samples=args.skipped_train_samples,
        num_floating_point_operations_so_far=args.num_floating_point_operations_so_far,
        num_groups=num_groups,
        do_train=bool(args.do_train),
        do_valid=bool(args.do_valid),
        do_test=bool(args.do_test),
        gathers_weights=any(getattr(each, "remove_forward_pre_hook_handles", ()) for each in model),
        evaluations_draw=evaluations_draw,
    )


def positions_of(members: Sequence[Member]) -> list[Position]:
    """Return the positions of those members that know where their loop is."""
    return [Position(**each.facts) for each in members if each.facts]


def position_of_survivors(members: Sequence[Member]) -> Position:
    """Return where the loop of the survivors is; where they differ, the latest.

    Raises:
        RepairError: if there are none, or only some were in an evaluation.
    """
    survivors = positions_of(members)
    if not survivors:
        raise RepairError("all ranks have died: nothing is left to repair")
    if len({each.is_evaluated for each in survivors}) > 1:
        raise RepairError("some ranks were in an evaluation, and others were not")
    return max(survivors, key=lambda each: each.iteration)


def begin_iteration(args: Any, iteration: int) -> None:
    """Do what Megatron's loop does before an iteration."""
    args.curr_iteration = get_rerun_state_machine().current_iteration = iteration
    update_num_microbatches(args.consumed_train_samples, consistency_check=True)


def count_iteration(args: Any, *, is_skipped: bool = False) -> None:
    """Do what Megatron's loop does after an iteration that is not the last one to be run here.

    Args:
        args: Megatron's.
        is_skipped: whether its batch was only read (--iterations-to-skip).
    """
    num_samples = samples_of_iteration(args)
    args.consumed_train_samples += num_samples
    args.skipped_train_samples += (
        num_samples
        if is_skipped
        else get_current_global_batch_size() - get_current_running_global_batch_size()
    )
