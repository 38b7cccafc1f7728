"""Measures what checkpoints cost and how fast they are copied; choosing is done in planning/."""

from collections import deque
from statistics import median

from moe_ft.planning.interval import CheckpointCost, choose_interval

NUM_WARM_UP_ITERATIONS = 2
NUM_QUIET_ITERATIONS = 3
_WINDOW = 20
_MICROSECONDS = 1e6


class IntervalTuner:
    """Chooses the interval from profiled iterations and adapts it. Owned by the training thread.

    The first iterations run without a checkpoint, the next one with. What is measured is put into the
    agreement, so that all ranks choose from the slowest rank's numbers.

    Attributes:
        interval: iterations between checkpoints; 0 while the first iterations are profiled.
    """

    num_values = 3

    def __init__(self, overhead_limit: float) -> None:
        self._overhead_limit = overhead_limit
        self._num_iterations = 0
        self._quiet: deque[float] = deque(maxlen=_WINDOW)
        self._extra: deque[float] = deque(maxlen=_WINDOW)
        self._complete: deque[float] = deque(maxlen=_WINDOW)
        self._extra_now = 0.0
        self._chosen = 0
        self.interval = 0

    def end_iteration(self, iteration_s: float, *, is_busy: bool) -> None:
        """Note how long an iteration took, and whether a checkpoint was under way in it."""
        self._num_iterations += 1
        if self._num_iterations <= NUM_WARM_UP_ITERATIONS:
            return
        if not is_busy or not self._quiet:
            self._quiet.append(iteration_s)
        else:
            self._extra_now += max(0.0, iteration_s - median(self._quiet))

    def end_checkpoint(self, completion_s: float) -> None:
        """Note that a checkpoint is complete, and how long after its begin."""
        self._extra.append(self._extra_now)
        self._complete.append(completion_s)
        self._extra_now = 0.0

    def values(self) -> tuple[int, int, int]:
        """Return what goes into the agreement, which takes the least: negated microseconds."""
        numbers = (
            median(self._quiet) if self._quiet else 0.0,
            median(self._extra) if self._extra else 0.0,
            median(self._complete) if self._complete else 0.0,
        )
        return tuple(-round(number * _MICROSECONDS) for number in numbers)  # type: ignore[return-value]

    def agree(self, values: list[int]) -> CheckpointCost | None:
        """Choose the interval from the agreed values; return the cost if that changed it.

        Until there is a measurement, the first checkpoint is due after the quiet iterations.
        """
        iteration_s, overhead_s, completion_s = (-value / _MICROSECONDS for value in values)
        if completion_s == 0.0:
            if len(self._quiet) >= NUM_QUIET_ITERATIONS:
                self.interval = 1
            return None
        cost = CheckpointCost(
            iteration_s=iteration_s, overhead_s=overhead_s, completion_s=completion_s
        )
        before, self.interval = self._chosen, choose_interval(cost, self._overhead_limit)
        self._chosen = self.interval
        return cost if self.interval != before else None


class SnapshotProfile:
    """Measures how many bytes can be copied while forward and backward run. Owned by the training thread."""

    def __init__(self) -> None:
        self._forward_backward_s: deque[float] = deque(maxlen=_WINDOW)
        self._bytes_per_s: deque[float] = deque(maxlen=_WINDOW)

    def note_forward_backward(self, seconds: float) -> None:
        """Note the time from the end of an iteration to the optimizer step of the next."""
        self._forward_backward_s.append(seconds)

    def note_copy(self, num_bytes: int, seconds: float) -> None:
        """Note what was copied in which time."""
        if seconds > 0:
            self._bytes_per_s.append(num_bytes / seconds)

    @property
    def budget_bytes(self) -> float | None:
        """What can be copied while forward and backward run, None until both were measured."""
        if not self._bytes_per_s or len(self._forward_backward_s) < NUM_QUIET_ITERATIONS:
            return None
        return median(self._bytes_per_s) * median(self._forward_backward_s)
