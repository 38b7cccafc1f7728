"""Reports of background parts to the training thread: events and failures, read at the next seam."""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from moe_ft.faults import Phase

# Called in the middle of a background part with its phase and iteration: the place where tests
# inflict faults. Raises what a fault of kind exception raises.
PhaseHook = Callable[[Phase, int], None]


class BackgroundPart(StrEnum):
    """Parts of the engine that can fail while training continues, as the field `part` of events has them."""

    SNAPSHOT = "snapshot"
    REPLICATE = "replicate"
    PERSIST = "persist"
    WRITER = "writer"
    MEMORY = "memory"
    BOUNDARY_LOG = "boundary-log"
    AGREEMENT = "agreement"
    PEER_SERVER = "peer-server"


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


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

    def degraded(
        self,
        part: BackgroundPart,
        iteration: int,
        reason: str,
        error: BaseException | None = None,
    ) -> None:
        """Add the event that a part failed and training continues without it.

        Args:
            iteration: the one concerned, 0 if none.
            error: if an exception is the reason: the event gets its traceback.
        """
        fields = {} if error is None else {"traceback": "".join(traceback.format_exception(error))}
        self.add("degraded", iteration, part=part.value, reason=reason, **fields)

    def skipped(self, part: BackgroundPart, iteration: int, reason: str) -> None:
        """Add the event that a part left something out."""
        self.add("skipped", iteration, part=part.value, reason=reason)

    @contextmanager
    def catching(
        self,
        part: BackgroundPart,
        iteration: int,
        on_failure: Callable[[], None] = lambda: None,
    ) -> Iterator[None]:
        """Report what the body raises, and continue. For what may fail on one rank alone."""
        try:
            yield
        except Exception as error:  # whatever it is, training continues and says so
            on_failure()
            self.degraded(part, iteration, describe(error), error)

    def drain(self) -> list[Report]:
        """Return and forget all events so far. Training thread."""
        with self._lock:
            reports = list(self._reports)
            self._reports.clear()
        return reports
