"""The clock that the engine measures, waits and sets deadlines with.

A simulation passes a subclass. The writer process, sockets and the lock on storage keep to the system's time:
what they wait for lies outside this process.
"""

import threading
import time


class Clock:
    """Time of the system."""

    def monotonic(self) -> float:
        """Return seconds for deadlines."""
        return time.monotonic()

    def perf_counter(self) -> float:
        """Return seconds for measurements."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait until an event is set; return False if that takes longer than the timeout."""
        return event.wait(timeout_s)
