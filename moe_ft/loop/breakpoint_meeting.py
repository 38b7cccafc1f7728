"""Meeting of ranks that are told to end: breakpoints are of use only where all are of one iteration.

A SIGTERM that comes in the middle of an optimizer step finds some ranks before it and others after it. Each
rank writes its breakpoint at once and says which iteration it is of, in the job's store. If others are one
iteration further, it steps and writes again; those wait for it. Nobody waits once a rank is known to be gone,
or to have no breakpoint.
"""

import time
from contextlib import suppress
from typing import Any

from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.engine.links.store_meeting import StoreMeeting
from moe_ft.loop.local_processes import JobProcesses, gone_ranks

_MEETING_S = 5.0  # for ranks that say nothing and cannot be seen: of a node that is gone
_STEP_S = 5.0  # for those that are one iteration behind
_ANSWER_S = 2.0
_MIN_POLL_S = 0.02
_NO_ANSWER = (RuntimeError, OSError)  # the store's host may be what died


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
        """Say nothing yet.

        Args:
            incarnation: of this start.
        """
        self._world_size, self._pids = world_size, processes.pids
        self._prefix = f"moe_ft/breakpoints/{incarnation}"
        self._meeting = StoreMeeting(
            SignedStore(store, lambda: processes.token),
            rank,
            world_size,
            least_poll_s=_MIN_POLL_S,
            answer_s=_ANSWER_S,
        )

    def cannot_step(self) -> None:
        """Say that this rank has no breakpoint, or stays where it is: nobody need wait."""
        with suppress(*_NO_ANSWER):
            self._meeting.ask(lambda store: store.set(f"{self._prefix}/alone", True))

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
        try:
            key = f"{self._prefix}/{what}"
            said = self._meeting.exchange(key, value, seconds, self._gives_up)
        except _NO_ANSWER:
            return None
        return said if said and len(said) == self._world_size else None

    def _gives_up(self, seconds: float) -> bool:
        if gone_ranks(self._pids):
            self.cannot_step()
        if self._meeting.ask(lambda store: store.get(f"{self._prefix}/alone")):
            return True
        time.sleep(seconds)
        return False

    @property
    def step_s(self) -> float:
        """Seconds that ranks have for a step."""
        return _STEP_S
