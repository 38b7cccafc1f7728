"""Number of samples that the planned run reads, by Megatron's own schedule of batch sizes.

What follows from it, the proportion of lost tokens, is moe_ft/planning/lost_tokens.py.
"""

import argparse
from collections.abc import Sequence

from megatron.core.num_microbatches_calculator import (
    StepBatchsizeNumMicroBatchesCalculator,
    get_current_running_global_batch_size,
)

Schedule = Sequence[tuple[int, int]]  # (samples consumed so far, global batch size from there on)


def planned_samples(args: argparse.Namespace) -> int:
    """Return the samples of all iterations of the run that the flags of this start plan.

    Those are Megatron's: --rampup-batch-size is ignored, --decrease-batch-size-if-needed leaves samples
    out, and --train-samples is a number of whole batches. Skipped iterations count.

    Args:
        args: Megatron's arguments, after the optimizer was built, which sets `train_iters`.
    """
    return samples_of(_schedule(args), args.train_iters or 0)


def samples_of(schedule: Schedule, num_iterations: int) -> int:
    """Return the samples of a run's iterations.

    Args:
        schedule: ascending, the first from 0 on.
        num_iterations: of the run.
    """
    consumed = 0
    ends = [start for start, _ in schedule[1:]]
    for (_, batch_size), end in zip(schedule, [*ends, None], strict=True):
        num_here = num_iterations
        if end is not None:  # the batch that passes the end still has this size
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
