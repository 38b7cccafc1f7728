"""Meetings in the job's store: each rank says something there, and learns what the others have said.

The store is one process, which all ranks ask: so they ask less often the more they are. Nothing here is a
collective; a meeting works also when the groups are broken. What is said is signed (signed_store.py).
Standard library only.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from moe_ft.engine.links.signed_store import SignedStore

_MAX_OPERATIONS_PER_S = 5000  # of all ranks together


def poll_s(world_size: int, least_s: float) -> float:
    """Return the seconds between two looks of a rank at the store."""
    return max(least_s, world_size / _MAX_OPERATIONS_PER_S)


class StoreMeeting:
    """One rank's part in meetings of all ranks. Used by one thread at a time."""

    def __init__(
        self,
        store: SignedStore,
        rank: int,
        world_size: int,
        *,
        least_poll_s: float,
        answer_s: float | None = None,
    ) -> None:
        """Connect nothing.

        Args:
            answer_s: seconds that the store has for each answer; None to wait as long as it takes. An
                operation can block for minutes when the store's host is gone.
        """
        self._store, self._rank, self._world_size = store, rank, world_size
        self.poll_s, self._answer_s = poll_s(world_size, least_poll_s), answer_s

    def ask[Answer](self, ask: Callable[[SignedStore], Answer]) -> Answer:
        """Return what the store answers.

        Raises:
            OSError, RuntimeError: if it does not, or not in time.
        """
        if self._answer_s is None:
            return ask(self._store)
        return within(self._answer_s, lambda: ask(self._store))

    def exchange(
        self, key: str, value: Any, seconds: float, gives_up: Callable[[float], bool]
    ) -> dict[int, Any] | None:
        """Say something in a list, and return what has been said there, by rank: by all, or by then.

        Args:
            seconds: after which this waits for nobody any more.
            gives_up: waits for so many seconds; returns whether there is nothing more to wait for.

        Returns:
            None if it gave up. Raises as `ask` does.
        """
        end_s = time.monotonic() + seconds
        num_said = self.ask(lambda store: store.append(key, [self._rank, value]))
        while True:
            is_last = time.monotonic() >= end_s
            if is_last or num_said >= self._world_size:
                said = self.said(key)
                if is_last or len(said) == self._world_size:
                    return said
            if gives_up(self.poll_s):
                return None
            num_said = self.ask(lambda store: store.length(key))

    def said(self, key: str) -> dict[int, Any]:
        """Return what ranks have said in a list so far. Raises as `ask` does."""
        return self.ask(lambda store: dict(store.values(key)))


def within[Answer](seconds: float, call: Callable[[], Answer]) -> Answer:
    """Return the result of a call, which is left to itself if it takes longer.

    Raises:
        TimeoutError: if it does. Otherwise, what the call raises.
    """
    answers: list[Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(call())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the job's store has not answered within {seconds:g} s")
    return answers[0]
