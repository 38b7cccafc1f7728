"""Workers without threads: they work when a test says so, or at once."""

from collections.abc import Callable
from concurrent.futures import Future

from moe_ft.engine.worker import settle


class ManualWorker:
    """A worker that keeps what is submitted until it is told to work.

    Attributes:
        is_eager: whether it works at once.
    """

    def __init__(self, *, is_eager: bool = True) -> None:
        self.is_eager = is_eager
        self.is_closed = False
        self._work: list[Callable[[], None]] = []
        self._idle: tuple[float, Callable[[], None]] | None = None

    def start(self) -> None:
        """Do nothing: there is no thread."""

    def submit[Result](self, act: Callable[[], Result]) -> Future[Result]:
        """Keep a function, or call it."""
        future: Future[Result] = Future()
        self._idle = None
        self._work.append(lambda: settle(future, act))
        if self.is_eager:
            self.work()
        return future

    def when_idle(self, idle_s: float, act: Callable[[], None]) -> None:
        """Keep what is to be done if nothing else is."""
        self._idle = idle_s, act

    def work(self) -> None:
        """Do everything that was submitted."""
        while self._work:
            self._work.pop(0)()

    def close(self, timeout_s: float) -> None:
        """Do what is left."""
        self.work()
        self.is_closed = True
