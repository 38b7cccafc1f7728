"""A clock that tests set by hand."""

import threading

from moe_ft.engine.clock import Clock


class ManualClock(Clock):
    """Time that passes only while somebody sleeps or waits in vain."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Return whether an event is set; time passes if it is not."""
        if not event.is_set():
            self.now += timeout_s
        return event.is_set()
