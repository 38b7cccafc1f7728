"""Stand-ins for what surrounds an engine: a clock, and workers without threads."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from moe_ft.engine.background import ThreadWorker, settle
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


class ManualWorker(ThreadWorker):
    """A worker that keeps what is submitted until it is told to work.

    Attributes:
        is_eager: whether it works at once.
    """

    def __init__(self, *, is_eager: bool = True) -> None:
        self.is_eager = is_eager
        self.is_closed = False
        self._kept: list[Callable[[], None]] = []
        self._idle: tuple[float, Callable[[], None]] | None = None

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def submit[Result](self, act: Callable[[], Result]) -> Future[Result]:
        """Keep a function, or call it."""
        future: Future[Result] = Future()
        self._idle = None
        self._kept.append(lambda: settle(future, act))
        if self.is_eager:
            self.work()
        return future

    def when_idle(self, idle_s: float, act: Callable[[], None]) -> None:
        """Keep what is to be done if nothing else is."""
        self._idle = idle_s, act

    def work(self) -> None:
        """Do everything that was submitted."""
        while self._kept:
            self._kept.pop(0)()

    def close(self, timeout_s: float) -> None:
        """Do what is left."""
        self.work()
        self.is_closed = True
