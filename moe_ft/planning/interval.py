"""Interval between checkpoints: CheckFreq's profiled policy, as a pure function of measurements.

CheckFreq (FAST 2021, section 4.4) profiles the first iterations, takes the smallest interval whose cost is
below a limit, and adapts it later. engine/snapshots/profile.py measures.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCost:
    """Measurements of the slowest rank, in seconds.

    Attributes:
        iteration_s: time of an iteration without a checkpoint in progress.
        overhead_s: time that one checkpoint adds to training: waiting at the fence, and slower iterations
            while it is copied, sent and written.
        completion_s: time from the start of a snapshot until the checkpoint is complete in memory and at
            its peers and, if it goes to storage, written there.
    """

    iteration_s: float
    overhead_s: float
    completion_s: float


def choose_interval(cost: CheckpointCost, overhead_limit: float) -> int:
    """Return the smallest interval, in iterations, whose overhead is within the limit.

    Two conditions bound it from below: ``overhead_s / (interval x iteration_s) <= overhead_limit``, and a
    checkpoint must be complete before the next one begins.

    Args:
        overhead_limit: fraction of the training time that checkpoints may cost, > 0.
    """
    affordable = math.ceil(cost.overhead_s / (overhead_limit * cost.iteration_s))
    sustainable = math.ceil(cost.completion_s / cost.iteration_s)
    return max(1, affordable, sustainable)


def best_interval(cost: CheckpointCost, mtbf_s: float) -> int:
    """Return the interval, in iterations, at which checkpoints and failures together cost the least.

    A checkpoint must be complete before the next one begins. Source: Young, 1974; MoC-System, eq. 12, whose
    optimum is the same.
    """
    best = math.sqrt(2 * cost.overhead_s * mtbf_s) / cost.iteration_s
    return max(1, round(best), math.ceil(cost.completion_s / cost.iteration_s))


def smallest_interval(
    bottleneck_bytes: float, *, bandwidth_bytes_per_s: float, iteration_s: float
) -> int:
    """Return the least iterations between checkpoints that are persisted one at a time.

    Args:
        bottleneck_bytes: that the rank with the most persists.
        bandwidth_bytes_per_s: from host to storage, of each rank.

    Source: MoC-System, section 5.3.
    """
    return max(1, math.ceil(bottleneck_bytes / bandwidth_bytes_per_s / iteration_s))
