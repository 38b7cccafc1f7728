"""What background threads hand to the training thread: events and failures, read at the next seam."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moe_ft.faults import Phase

# Called in the middle of a background part with its phase and iteration: the place where tests
# inflict faults. Raises what a fault of kind exception raises.
PhaseHook = Callable[[Phase, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One event of a background part."""

    event: str
    iteration: int
    fields: dict[str, Any] = field(default_factory=dict)


class Reports:
    """A queue from any thread to the training thread."""

    def __init__(self) -> None:
        self._reports: deque[Report] = deque()
        self._lock = threading.Lock()

    def add(self, event: str, iteration: int, **fields: Any) -> None:
        """Add an event. Any thread."""
        with self._lock:
            self._reports.append(Report(event=event, iteration=iteration, fields=fields))

    def degraded(self, part: str, iteration: int, reason: str) -> None:
        """Add the event that a part failed and training goes on without it."""
        self.add("degraded", iteration, part=part, reason=reason)

    def drain(self) -> list[Report]:
        """Return and forget all events so far. Training thread."""
        with self._lock:
            reports = list(self._reports)
            self._reports.clear()
        return reports
