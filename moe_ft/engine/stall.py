"""Time for which training stands still for checkpoints."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

clock = time.perf_counter


class Stall:
    """Time that the training thread has waited since `take`. Owned by it.

    Attributes:
        seconds: so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Add what the block takes: a wait, or a copy that comes back when it is done."""
        start = clock()
        try:
            yield
        finally:
            self.seconds += clock() - start

    def count[Answer](self, act: Callable[[], Answer]) -> Answer:
        """Return what a function returns, and add what it takes."""
        with self.counting():
            return act()

    def take(self) -> float:
        """Return the seconds, and begin with none."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
