"""Seconds of a repair by phase: they follow each other without a gap, from the death of the rank."""

import time
from collections.abc import Callable


class Phases:
    """A clock of one repair on one rank."""

    def __init__(self, noticed_s: float, now: Callable[[], float] = time.time) -> None:
        """Begin.

        Args:
            noticed_s: time since 1970 when this rank learned of the death.
            now: the same clock.
        """
        self._noticed_s = self._last_s = noticed_s
        self._now = now
        self.seconds: dict[str, float] = {"notice": 0.0}

    def begin_with(self, died_s: float) -> None:
        """Set when the rank died, on whatever machine; clocks may differ a little."""
        self.seconds["notice"] = max(0.0, self._noticed_s - died_s)

    def end(self, phase: str) -> None:
        """End a phase that began when the one before ended."""
        now_s = self._now()
        self.seconds[phase] = max(0.0, now_s - self._last_s)
        self._last_s = now_s
