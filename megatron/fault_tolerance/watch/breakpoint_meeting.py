"""Meeting of ranks that are told to end: breakpoints are of use only where all are of one iteration.

A SIGTERM that comes in the middle of an optimizer step finds some ranks before it and others after it. Each
rank writes its breakpoint at once and says which iteration it is of, in the job's store. If others are one
iteration further, it steps and writes again; those wait for it. Nobody waits once a rank is known to be gone,
or to have no breakpoint.
"""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from megatron.fault_tolerance.watch.local_processes import gone_ranks

_MEETING_S = 5.0  # for ranks that say nothing and cannot be seen: of a node that is gone
_STEP_S = 5.0  # for those that are one iteration behind
_ANSWER_S = 2.0
_MIN_POLL_S = 0.02
_MAX_STORE_OPERATIONS_PER_S = 5000  # of all ranks together


class BreakpointMeeting:
    """One rank's part. Used by one thread at a time."""

    def __init__(
        self, store: Any, world_size: int, incarnation: int, pids: Mapping[int, int]
    ) -> None:
        """Prepare.

        Args:
            store: of the job.
            world_size: number of ranks.
            incarnation: of this start.
            pids: result of `local_pids`.
        """
        self._store, self._world_size, self._pids = store, world_size, pids
        self._prefix = f"moe_ft/breakpoints/{incarnation}"
        self._poll_s = max(_MIN_POLL_S, world_size / _MAX_STORE_OPERATIONS_PER_S)

    def cannot_step(self) -> None:
        """Say that this rank has no breakpoint, or stays where it is: nobody need wait."""
        self._ask(lambda store: store.add(f"{self._prefix}/alone", 1))

    def agree(self, iteration: int) -> int | None:
        """Return the iteration that all ranks can have a breakpoint of; None if they cannot.

        Args:
            iteration: of this rank's breakpoint.
        """

        def say(store: Any) -> bool:
            store.append(f"{self._prefix}/at", f"{iteration} ")
            store.add(f"{self._prefix}/count", 1)
            return True

        if not self._ask(say) or not self._wait("count", _MEETING_S):
            return None
        found = self._ask(lambda store: store.get(f"{self._prefix}/at"))
        return None if found is None else max(map(int, found.split()))

    def wait_for_others(self) -> None:
        """Say that this rank is done, and wait for those that step: the step may need this rank."""
        self._ask(lambda store: store.add(f"{self._prefix}/done", 1))
        self._wait("done", _STEP_S)

    def _wait(self, what: str, seconds: float) -> bool:
        """Wait until all ranks have said something; return False if they will not."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            number = self._ask(lambda store: store.add(f"{self._prefix}/{what}", 0))
            if number is None or number >= self._world_size:
                return number is not None
            if gone_ranks(self._pids):
                self.cannot_step()
            if self._ask(lambda store: store.add(f"{self._prefix}/alone", 0)):
                return False
            time.sleep(self._poll_s)
        return False

    def _ask[Answer](self, ask: Callable[[Any], Answer]) -> Answer | None:
        """Return what the job's store answers; None if it does not: its host may be what died."""
        answers: list[Answer] = []

        def call() -> None:
            with suppress(RuntimeError, OSError):
                answers.append(ask(self._store))

        # An operation can block for minutes when the store's host is gone.
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(_ANSWER_S)
        return answers[0] if answers else None

    @property
    def step_s(self) -> float:
        """Seconds that ranks have for a step."""
        return _STEP_S
