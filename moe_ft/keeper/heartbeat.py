"""Beats of a rank, and the zygote's look at them: a rank that does not run is found and killed.

A thread of the rank counts. It needs the interpreter, so the count stands still if the process is stopped, or
sleeps in the kernel, or if some thread keeps the interpreter to itself. The zygote counts the time for which
it has watched the number stand still: if it did not run itself, or if nothing on the node did, that time is
not held against a rank. Standard library only.
"""

import threading
import time

from moe_ft.keeper.link import Link

_LONGEST_PERIOD_S = 1.0
_LOOKS_PER_LIMIT = 10


def period_s(limit_s: float) -> float:
    """Return the seconds between two beats, and between two looks.

    Args:
        limit_s: silence that is a hang; 0 if no beats are expected.
    """
    return min(_LONGEST_PERIOD_S, limit_s / _LOOKS_PER_LIMIT) if limit_s else _LONGEST_PERIOD_S


class Heart:
    """The thread of a rank that beats. Started and closed by the training thread."""

    def __init__(self, link: Link, limit_s: float) -> None:
        """Beat not yet.

        Args:
            limit_s: silence after which the zygote kills this process.
        """
        self._link, self._limit_s = link, limit_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to beat, once; the zygote expects it from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="moe_ft-heart", daemon=True)
            self._thread.start()
            self._link.expect_beats(self._limit_s)

    def _beat(self) -> None:
        while not self._ended.wait(period_s(self._limit_s)):
            self._link.beat()

    def close(self) -> None:
        """End the thread; nobody expects it to beat any more."""
        self._link.expect_beats(0)
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


class Pulse:
    """The zygote's view of one rank's beats."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._beats, self._looked_s = link.beats, time.monotonic()
        self._silent_s = 0.0

    def silent_s(self) -> float:
        """Look, and return the seconds for which this has watched the rank be silent."""
        now_s, limit_s = time.monotonic(), self._link.limit_s
        # A longer time between two looks says that this process did not run, and nothing about the rank.
        passed_s = min(now_s - self._looked_s, 2 * period_s(limit_s))
        self._looked_s = now_s
        if not limit_s or self._link.beats != self._beats:
            self._beats, self._silent_s = self._link.beats, 0.0
        else:
            self._silent_s += passed_s
        return self._silent_s
