"""Times of checkpoints: the profile of snapshots, intervals chosen from it (in planning/), and stalls."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any, override

from moe_ft.engine.clock import Clock
from moe_ft.planning.interval import CheckpointCost, choose_interval
from moe_ft.strategies.interface import MeasuredBytes

NUM_WARM_UP_ITERATIONS = 2
NUM_QUIET_ITERATIONS = 3
_WINDOW = 20
_MICROSECONDS = 1e6


class FixedInterval:
    """Iterations between checkpoints, 0 for none, as a flag sets them. Owned by the training thread."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def end_iteration(self, iteration_s: float, *, is_busy: bool) -> None:
        """Note the time of an iteration, and whether a checkpoint was under way in it."""

    def end_checkpoint(self, completion_s: float) -> None:
        """Note that a checkpoint is complete, and the time since its begin."""

    def values(self) -> tuple[int, ...]:
        """Return what goes into the agreement, which takes the least."""
        return ()

    def agree(self, values: tuple[int, ...]) -> dict[str, Any]:
        """Act on the agreed values; return what the event log says of a change, nothing if there is none."""
        return {}


class IntervalTuner(FixedInterval):
    """Chooses the interval from profiled iterations and adapts it; it is 0 while the first ones are profiled.

    The first iterations run without a checkpoint, the next one with. All ranks agree on the measurements, so
    that they all choose from the slowest rank's numbers.
    """

    def __init__(self, overhead_limit: float) -> None:
        self._overhead_limit = overhead_limit
        self._num_iterations = 0
        self._quiet: deque[float] = deque(maxlen=_WINDOW)
        self._extra: deque[float] = deque(maxlen=_WINDOW)
        self._complete: deque[float] = deque(maxlen=_WINDOW)
        self._extra_now = 0.0
        self._chosen = 0
        super().__init__(0)

    @override
    def end_iteration(self, iteration_s: float, *, is_busy: bool) -> None:
        self._num_iterations += 1
        if self._num_iterations <= NUM_WARM_UP_ITERATIONS:
            return
        if not is_busy or not self._quiet:
            self._quiet.append(iteration_s)
        else:
            self._extra_now += max(0.0, iteration_s - median(self._quiet))

    @override
    def end_checkpoint(self, completion_s: float) -> None:
        self._extra.append(self._extra_now)
        self._complete.append(completion_s)
        self._extra_now = 0.0

    @override
    def values(self) -> tuple[int, ...]:
        measured = (self._quiet, self._extra, self._complete)
        # Negated microseconds: the least is the longest.
        return tuple(-round(median(each or [0.0]) * _MICROSECONDS) for each in measured)

    @override
    def agree(self, values: tuple[int, ...]) -> dict[str, Any]:
        iteration_s, overhead_s, completion_s = (-value / _MICROSECONDS for value in values)
        if completion_s == 0.0:
            if len(self._quiet) >= NUM_QUIET_ITERATIONS:
                self.interval = 1  # there is no measurement without a first one
            return {}
        cost = CheckpointCost(
            iteration_s=iteration_s, overhead_s=overhead_s, completion_s=completion_s
        )
        before, self.interval = self._chosen, choose_interval(cost, self._overhead_limit)
        self._chosen = self.interval
        return {"interval": self.interval, **asdict(cost)} if self.interval != before else {}


class SnapshotProfile:
    """Measures how many bytes a snapshot may have to cost no time. Owned by the training thread.

    The device copy must be done before the optimizer step. Checksums and commit, and replication in parallel
    with them, must be done before those of the next iteration.
    """

    def __init__(self) -> None:
        self._forward_backward_s: deque[float] = deque(maxlen=_WINDOW)
        self._iteration_s: deque[float] = deque(maxlen=_WINDOW)
        self._copy_rate: deque[float] = deque(maxlen=_WINDOW)
        self._flow_rate: deque[float] = deque(maxlen=_WINDOW)
        self._commit_rate: deque[float] = deque(maxlen=_WINDOW)
        self._send_rate: deque[float] = deque(maxlen=_WINDOW)
        self._can_follow = True

    def note_iteration(self, seconds: float) -> None:
        """Note the time of an iteration."""
        self._iteration_s.append(seconds)

    def note_forward_backward(self, seconds: float) -> None:
        """Note the time from the end of an iteration to the optimizer step of the next."""
        self._forward_backward_s.append(seconds)

    def note(self, num_bytes: int, copy_s: float, commit_s: float, replicate_s: float) -> None:
        """Note what a snapshot took: to copy it, to commit it after that, and to send it to all peers."""
        if copy_s > 0 and num_bytes > 0:
            self._copy_rate.append(num_bytes / copy_s)
            self._flow_rate.append(num_bytes / max(commit_s, replicate_s, copy_s))
            self._commit_rate.append(num_bytes / max(commit_s, copy_s))

    def note_sent(self, num_bytes: int, seconds: float, *, can_follow: bool = True) -> None:
        """Note what sending a snapshot to all peers took, and the bytes of it that a peer got.

        Args:
            can_follow: whether peers can make replicas of gradients.
        """
        self._can_follow = can_follow
        if seconds > 0 and num_bytes > 0:
            self._send_rate.append(num_bytes / seconds)

    @property
    def iteration_s(self) -> float:
        """Duration of an iteration, 0 until measured."""
        return median(self._iteration_s) if self._iteration_s else 0.0

    @property
    def copied_bytes(self) -> float | None:
        """Bytes that can be copied while forward and backward run, None until both were measured."""
        if not self._copy_rate or len(self._forward_backward_s) < NUM_QUIET_ITERATIONS:
            return None
        return median(self._copy_rate) * median(self._forward_backward_s)

    @property
    def flow_bytes(self) -> float | None:
        """Bytes that can be committed and replicated in an iteration, None until both were measured."""
        return self._in_an_iteration(self._flow_rate)

    def _in_an_iteration(self, rate: deque[float]) -> float | None:
        if not rate or len(self._iteration_s) < NUM_QUIET_ITERATIONS:
            return None
        return median(rate) * median(self._iteration_s)

    @property
    def measured(self) -> MeasuredBytes:
        """Abilities of this rank, as strategies know them."""
        return MeasuredBytes(
            copied_bytes=self.copied_bytes,
            flow_bytes=self.flow_bytes,
            committed_bytes=self._in_an_iteration(self._commit_rate),
            sent_bytes=self._in_an_iteration(self._send_rate),
            can_follow=self._can_follow,
        )

    def expected_stall_s(self, num_bytes: int) -> float:
        """Return for how long a snapshot of so many bytes holds up the optimizer step."""
        copied = self.copied_bytes
        if copied is None:
            return 0.0
        return max(0.0, num_bytes - copied) / median(self._copy_rate)


class Stall:
    """Time that the training thread has waited since `take`. Owned by the training thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add the time of a block that waits, or copies synchronously."""
        start = self._clock.perf_counter()
        try:
            yield
        finally:
            self.seconds += self._clock.perf_counter() - start

    def count[Answer](self, act: Callable[[], Answer]) -> Answer:
        """Return what a function returns, and add the time it takes."""
        with self.counting():
            return act()

    def take(self) -> float:
        """Return the seconds, and begin again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
