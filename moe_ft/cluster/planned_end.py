"""Planned end of a node: the signals that its ranks get, and when, once the node or the job is told to end.

If no spare takes over, all ranks of the job get Megatron's exit signal, bring their state to storage and
end. If that takes too long, they get SIGTERM in time to leave breakpoints in memory.
"""

import signal
import time
from collections.abc import Callable, Sequence

from moe_ft.cluster.link import exit_signal
from moe_ft.cluster.options import LEAVING_S

_AGAIN_S = 5.0  # until ranks get the exit signal again: those that start ignore it


class PlannedEnd:
    """Signals that ranks get when their node, or the job, is told to end. Single-threaded."""

    def __init__(
        self, words: Sequence[str], grace_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Be told nothing yet.

        Args:
            words: command line of the ranks.
            grace_s: seconds from SIGTERM to SIGKILL of what has started `keep`.
        """
        self._exit_signal = exit_signal(words)
        can_save = self._exit_signal is not None and grace_s > LEAVING_S
        self._save_by = self._exit_signal if can_save else signal.SIGTERM
        self._grace_s, self._clock = grace_s, clock
        self._told_s: float | None = None
        self._next_s = 0.0
        self._has_said = self._has_ended = False

    def tell(self) -> None:
        """Learn that this node is to end; may be called by a handler of SIGTERM."""
        if self._told_s is None:
            self._told_s = self._clock()

    @property
    def is_told(self) -> bool:
        """True if this node, or the job, is to end."""
        return self._told_s is not None

    def is_new(self) -> bool:
        """Return, once, that this node is to end."""
        is_told = self.is_told  # a handler may change it at any time
        is_new, self._has_said = is_told and not self._has_said, is_told
        return is_new

    def describe(self) -> str:
        """Return what the time is enough for."""
        grace = f"{self._grace_s:.0f} s (--grace)"
        if self._exit_signal is signal.SIGTERM:
            return f"if no spare takes over, all ranks have {grace} to bring their state to storage"
        if self._save_by is signal.SIGTERM:
            why = (
                f"{grace} are not enough" if self._exit_signal else "without --exit-signal-handler"
            )
            return f"{why}: if no spare takes over, the newest state stays in memory, and storage lacks it"
        return (
            f"if no spare takes over, all ranks have {self._grace_s - LEAVING_S:.0f} s to bring their state "
            f"to storage, of {grace}"
        )

    def describe_sigterm(self) -> str:
        """Return what ranks do that get SIGTERM."""
        if self._exit_signal is signal.SIGTERM:
            return "its ranks get SIGTERM, save and end"
        return "its ranks end, and what they have in memory stays"

    def due_signal(self, is_to_save: bool) -> signal.Signals | None:
        """Return a signal that the ranks are to get now.

        Args:
            is_to_save: whether all ranks of the job are to save and end.
        """
        if is_to_save:
            self._has_said = True
            self.tell()
        if self._told_s is None or self._has_ended:
            return None
        now_s = self._clock()
        if now_s - self._told_s > max(self._grace_s - LEAVING_S, _AGAIN_S) or (
            is_to_save and self._save_by is signal.SIGTERM
        ):
            self._has_ended = True
            return signal.SIGTERM
        if not is_to_save or now_s < self._next_s:
            return None
        self._next_s = now_s + _AGAIN_S
        return self._save_by
