"""Time for which training stands still for checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moe_ft.engine.clock import Clock


class Stall:
    """Time that the training thread has waited since `take`. Owned by the training thread.

    Attributes:
        seconds: so far.
    """

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
        """Return the seconds, and start again from zero."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
