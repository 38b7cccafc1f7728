"""Stand-ins for what surrounds an engine: a clock, workers without threads, and the least of all votes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from moe_ft.engine.background import settle
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


DEADLINE_S = 120.0


class Meeting:
    """Values of all ranks, by round. Any thread."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.rounds: list[dict[int, list[int]]] = []
        self.has_broken = False
        self._changed = threading.Condition()

    def put(self, number: int, rank: int, values: list[int]) -> None:
        """Put a rank's values into a round."""
        with self._changed:
            while len(self.rounds) <= number:
                self.rounds.append({})
            self.rounds[number][rank] = values
            self._changed.notify_all()

    def least(self, number: int) -> list[int]:
        """Return the least values of a round, once all ranks have put theirs in."""
        with self._changed:
            found = self.rounds[number]
            is_over = self._changed.wait_for(
                lambda: self.has_broken or len(found) == self.num_ranks, DEADLINE_S
            )
            if not is_over or len(found) < self.num_ranks:
                raise RuntimeError("Connection closed by peer")
            return [min(column) for column in zip(*found.values(), strict=True)]

    def end(self) -> None:
        """Have every rank fail from now on that waits for another one."""
        with self._changed:
            self.has_broken = True
            self._changed.notify_all()


class LocalAgreement:
    """One rank's part in a meeting. Owned by one thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._number = 0
        self._has_begun = False

    @property
    def is_under_way(self) -> bool:
        """True if this rank has put in values and not read the result."""
        return self._has_begun

    def begin(self, values: Sequence[int]) -> None:
        """Put in this rank's values."""
        if self._meeting.has_broken:
            raise RuntimeError("Connection closed by peer")
        self._has_begun = True
        self._meeting.put(self._number, self._rank, list(values))

    def result(self) -> list[int]:
        """Return the least values."""
        self._has_begun = False
        self._number += 1
        return self._meeting.least(self._number - 1)

    def leave(self) -> None:
        """Take no further part."""
        self._has_begun = False
        self._meeting.end()
