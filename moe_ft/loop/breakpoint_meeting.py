"""Meeting of ranks that are told to end: breakpoints are of use only where all are of one iteration.

A SIGTERM that comes in the middle of an optimizer step finds some ranks before it and others after it. Each
rank writes its breakpoint at once and says which iteration it is of, in the job's store. If others are one
iteration further, it steps and writes again; those wait for it. Nobody waits once a rank is known to be gone,
or to have no breakpoint.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.loop.local_processes import JobProcesses, gone_ranks

_MEETING_S = 5.0  # for ranks that say nothing and cannot be seen: of a node that is gone
_STEP_S = 5.0  # for those that are one iteration behind
_ANSWER_S = 2.0
_MIN_POLL_S = 0.02
_MAX_STORE_OPERATIONS_PER_S = 5000  # of all ranks together


class BreakpointMeeting:
    """One rank's part. Used by one thread at a time."""

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        incarnation: int,
        processes: JobProcesses,
    ) -> None:
        """Prepare.

        Args:
            store: of the job.
            rank: of this process.
            world_size: number of ranks.
            incarnation: of this start.
            processes: of the ranks.
        """
        self._store = SignedStore(store, lambda: processes.token)
        self._rank, self._world_size, self._pids = rank, world_size, processes.pids
        self._prefix = f"moe_ft/breakpoints/{incarnation}"
        self._poll_s = max(_MIN_POLL_S, world_size / _MAX_STORE_OPERATIONS_PER_S)

    def cannot_step(self) -> None:
        """Say that this rank has no breakpoint, or stays where it is: nobody need wait."""
        self._ask(lambda store: store.set(f"{self._prefix}/alone", True))

    def agree(self, iteration: int) -> int | None:
        """Return the iteration that all ranks can have a breakpoint of; None if they cannot.

        Args:
            iteration: of this rank's breakpoint.
        """
        found = self._say_and_wait("at", iteration, _MEETING_S)
        return None if found is None else max(found.values())

    def wait_for_others(self) -> None:
        """Say that this rank is done, and wait for those that step: the step may need this rank."""
        self._say_and_wait("done", True, _STEP_S)

    def _say_and_wait(self, what: str, value: int, seconds: float) -> dict[int, int] | None:
        """Say something, and return what all ranks have said, by rank; None if some will not."""
        deadline_s, key = time.monotonic() + seconds, f"{self._prefix}/{what}"
        num_said = self._ask(lambda store: store.append(key, [self._rank, value]))
        while num_said is not None:
            is_last = time.monotonic() >= deadline_s
            if is_last or num_said >= self._world_size:
                said = self._ask(lambda store: dict(store.values(key)))
                if is_last or said is None or len(said) == self._world_size:
                    return said if said and len(said) == self._world_size else None
            if gone_ranks(self._pids):
                self.cannot_step()
            if self._ask(lambda store: store.get(f"{self._prefix}/alone")):
                return None
            time.sleep(self._poll_s)
            num_said = self._ask(lambda store: store.length(key))
        return None

    def _ask[Answer](self, ask: Callable[[SignedStore], Answer]) -> Answer | None:
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
