"""How often to checkpoint: CheckFreq's profiled policy, as a pure function of what was measured.

The source is CheckFreq (FAST 2021, section 4.4): profile the first iterations, take the smallest interval
whose cost stays under a limit, keep watching, adapt. Measuring is engine/profile.py.
"""

import math
from dataclasses import dataclass

from moe_ft.errors import PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointCost:
    """What was measured, in seconds; over all ranks the slowest.

    Attributes:
        iteration_s: an iteration in which no checkpoint is under way.
        overhead_s: by how much one checkpoint lengthens training: waiting at the fence, and slower
            iterations while it is copied, sent and written.
        completion_s: from the start of a snapshot until the checkpoint is complete in memory and at
            its peers and, if it goes to storage, written there.
    """

    iteration_s: float
    overhead_s: float
    completion_s: float


def choose_interval(cost: CheckpointCost, overhead_limit: float) -> int:
    """Return the smallest interval, in iterations, whose overhead stays under the limit.

    Two things bound it from below: ``overhead_s / (interval x iteration_s) <= overhead_limit``, and a
    checkpoint must be complete before the next one begins.

    Args:
        cost: what was measured.
        overhead_limit: fraction of the training time that checkpoints may cost, > 0.

    Raises:
        PlanError: if an iteration takes no time or the limit is not positive.
    """
    if cost.iteration_s <= 0 or overhead_limit <= 0:
        raise PlanError(
            f"iteration_s={cost.iteration_s} and overhead_limit={overhead_limit} must be positive"
        )
    affordable = math.ceil(cost.overhead_s / (overhead_limit * cost.iteration_s))
    sustainable = math.ceil(cost.completion_s / cost.iteration_s)
    return max(1, affordable, sustainable)
