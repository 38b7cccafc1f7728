"""Counters of Megatron's loop: attributes of its arguments, and what the loop does with them."""

from collections.abc import Mapping
from typing import Any

from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_current_running_global_batch_size,
    update_num_microbatches,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron.fault_tolerance.seams.uneven_batches import samples_of_iteration
from moe_ft.format.records import Counted

SAMPLE_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
COUNTERS = (*SAMPLE_COUNTERS, "num_floating_point_operations_so_far")


def counters_of(args: Any) -> dict[str, float]:
    """Return all counters by name."""
    return {name: getattr(args, name) for name in COUNTERS}


def counters_in(record: Counted) -> dict[str, float]:
    """Return the counters of a record, whose fields have Megatron's names but for the operations."""
    return {name: getattr(record, name.removesuffix("_so_far")) for name in COUNTERS}


def begin_at(args: Any, iteration: int, counters: Mapping[str, float]) -> None:
    """Have the loop begin, or continue, with these counters."""
    args.iteration = iteration
    vars(args).update(counters)
    update_num_microbatches(args.consumed_train_samples, consistency_check=False)


def begin_iteration(args: Any, iteration: int) -> None:
    """Do what the loop does before an iteration."""
    args.curr_iteration = get_rerun_state_machine().current_iteration = iteration
    update_num_microbatches(args.consumed_train_samples, consistency_check=True)


def count_iteration(args: Any, *, is_skipped: bool = False) -> None:
    """Do what the loop does after an iteration; of a skipped one the batch was only read."""
    num_samples = samples_of_iteration(args)
    args.consumed_train_samples += num_samples
    args.skipped_train_samples += num_samples if is_skipped else num_left_out()


def num_left_out() -> int:
    """Return the samples of a batch that --decrease-batch-size-if-needed leaves out."""
    return int(get_current_global_batch_size() - get_current_running_global_batch_size())
