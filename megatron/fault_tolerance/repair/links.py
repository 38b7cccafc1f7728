"""Links of the process groups of one round, which end together when a rank has died.

The transports know them: connections of gloo, communicators of NCCL.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.transport import Transport
from moe_ft.errors import LinksEndedError


class Links:
    """The links of the present round. Any thread may end them, once, and only those of its round."""

    def __init__(self, transports: Sequence[Transport] | None = None) -> None:
        """Prepare.

        Args:
            transports: of the groups, by default gloo; those whose ends raise in all that waits come first.
        """
        self.transports: Sequence[Transport] = (Gloo(),) if transports is None else transports
        self._lock = threading.Lock()
        self._round = 0
        self._made: list[dict[Any, Any]] = [{} for _ in self.transports]
        self._is_open = True

    @property
    def round(self) -> int:
        """Number of the round."""
        return self._round

    @property
    def is_open(self) -> bool:
        """True until the links have been ended."""
        return self._is_open

    @property
    def fail_silently(self) -> bool:
        """True if a result may be wrong without an exception once the links have been ended."""
        return any(each.fails_silently for each in self.transports)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Add the links that are made in this context: those of groups.

        They are ended at once if those of the round have been ended meanwhile.
        """
        marks = [each.mark() for each in self.transports]
        yield
        made = [each.made_since(mark) for each, mark in zip(self.transports, marks, strict=True)]
        with self._lock:
            for known, new in zip(self._made, made, strict=True):
                known |= new
            if not self._is_open:
                self._end(made)

    def begin(self, number: int) -> None:
        """Begin a round, without links. All ranks have left the one before."""
        with self._lock:
            for each in self.transports:
                each.begin()
            self._round, self._is_open = number, True
            self._made = [{} for _ in self.transports]

    def end(self, number: int) -> int:
        """End the links of a round, unless they have ended or another round has begun.

        Returns:
            Their number.
        """
        with self._lock:
            if number != self._round or not self._is_open:
                return 0
            self._is_open = False
            return self._end(self._made)

    def _end(self, made: Sequence[Any]) -> int:
        return sum(each.end(own) for each, own in zip(self.transports, made, strict=True))

    def failure(self) -> str:
        """Return why links have failed without an exception; empty if none have. Any thread."""
        with self._lock:
            found = (
                each.failure(own) for each, own in zip(self.transports, self._made, strict=True)
            )
            return next((failure for failure in found if failure), "")

    def check(self) -> None:
        """Wait for what this rank is computing. It counts only if the links are still there then.

        Raises:
            LinksEndedError: if they are not: the device may have left a collective without its result.
        """
        for each in self.transports:
            each.settle()
        if not self._is_open:
            raise LinksEndedError(
                "the links of the process groups have ended: what was computed since does not count"
            )

    def leave(self) -> None:
        """Leave what an exception has broken off. The links have ended. Training thread."""
        for each in self.transports:
            each.leave()
