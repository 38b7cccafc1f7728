"""Workers: they run copies, commits and transfers while training continues."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, override


class Worker(Protocol):
    """Runs one piece of work after the other, in the order in which they were submitted."""

    def start(self) -> None:
        """Begin to work."""

    def submit[Result](self, act: Callable[[], Result]) -> Future[Result]:
        """Have a function called after everything submitted before. Any thread."""

    def when_idle(self, idle_s: float, act: Callable[[], None]) -> None:
        """Call a function once nothing was submitted for a while; forget it if something is.

        Only the worker's own work may call this.
        """

    def close(self, timeout_s: float) -> None:
        """End after everything that was submitted, or leave the rest after a timeout."""


class ThreadWorker(Worker):
    """A worker with a daemon thread of its own: work that hangs does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = f"moe_ft-{name}"
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle: tuple[float, Callable[[], None]] | None = None
        self._thread: threading.Thread | None = None

    @override
    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    @override
    def submit[Result](self, act: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._work.put(lambda: settle(future, act))
        return future

    @override
    def when_idle(self, idle_s: float, act: Callable[[], None]) -> None:
        self._idle = idle_s, act

    @override
    def close(self, timeout_s: float) -> None:
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            idle, self._idle = self._idle, None
            try:
                work = self._work.get(timeout=idle[0] if idle else None)
            except queue.Empty:
                work = idle[1] if idle else None
            if work is None:
                return
            work()


def settle[Result](future: Future[Result], act: Callable[[], Result]) -> None:
    """Call a function and give a future what it returns or raises."""
    try:
        result = act()
    except BaseException as error:  # whoever holds the future must hear of it
        # Without the frames, whose tensors it would keep alive: who reports it has done so.
        future.set_exception(error.with_traceback(None))
    else:
        future.set_result(result)
