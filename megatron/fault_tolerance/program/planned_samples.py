"""Number of samples that the planned run reads, by Megatron's own schedule of batch sizes.

The proportion of lost tokens, which follows from it, is moe_ft/planning/lost_tokens.py.
"""

import argparse
from collections.abc import Sequence

from megatron.core.num_microbatches_calculator import (
    StepBatchsizeNumMicroBatchesCalculator,
    get_current_running_global_batch_size,
)

Schedule = Sequence[tuple[int, int]]  # (samples consumed so far, global batch size from there on)


def planned_samples(args: argparse.Namespace) -> int:
    """Return the number of samples in all iterations of the run that the flags of this start plan.

    The number is Megatron's: it ignores --rampup-batch-size, leaves samples out with
    --decrease-batch-size-if-needed, and rounds --train-samples down to whole batches. Skipped iterations
    count.

    Args:
        args: Megatron's arguments; building the optimizer has set `train_iters`.
    """
    return samples_of(_schedule(args), args.train_iters or 0)


def samples_of(schedule: Schedule, num_iterations: int) -> int:
    """Return the number of samples in the first iterations of a schedule, which ascends from 0."""
    consumed = 0
    ends = [start for start, _ in schedule[1:]]
    for (_, batch_size), end in zip(schedule, [*ends, None], strict=True):
        num_here = num_iterations
        if end is not None:  # the batch that crosses the end still has this size
            num_here = min(num_iterations, max(0, -(-(end - consumed) // batch_size)))
        consumed += num_here * batch_size
        num_iterations -= num_here
    return consumed


def _schedule(args: argparse.Namespace) -> Schedule:
    if args.step_batch_size_schedule is None:
        return [(0, get_current_running_global_batch_size())]
    calculator = StepBatchsizeNumMicroBatchesCalculator(
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=False,
        rank=-1,  # the first one logs
        schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    return [(start, batch_size) for start, batch_size in calculator.schedule]
