"""Thread that frees the training thread when some rank has died or hung: it may wait for one that lives.

A training thread that does not leave its iteration then waits for nobody: it hangs, and this ends it.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.fault_tolerance.repair.links import Links
from moe_ft.files.patience import excused_until_s
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Rounds
from moe_ft.saying import say

# From the end of its connections, and of what else it waits for (moe_ft/files/patience.py), until a thread
# that is still in its iteration counts as one that hangs.
STUCK_S = 20.0
_TIMEOUT_POLL_S = 0.5


class Watcher:
    """Watches the job's store over a connection of its own.

    The training thread starts and closes it, and sets `_inside_since_s`. Its own thread sets everything else
    that changes. Each reads what the other sets.
    """

    def __init__(self, rounds: Rounds, links: Links, link: Link) -> None:
        """Prepare.

        Args:
            rounds: over the connection.
            links: of the groups, which this ends.
            link: to the zygote.
        """
        self._rounds, self._links, self._link = rounds, links, link
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="moe_ft-repair", daemon=True)
        self._noticed_s: dict[int, float] = {}
        self._inside_since_s: float | None = None
        self._training_thread = 0
        self._freed_s = self._next_look_s = 0.0

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Note that the training thread is in an iteration: it must leave it when its connections end."""
        self._training_thread = threading.get_ident()
        self._inside_since_s = time.monotonic()
        try:
            yield
        finally:
            self._inside_since_s = None

    def noticed_s(self, number: int) -> float:
        """Return the time since 1970 when this learned that a round has begun; now if it has not."""
        return self._noticed_s.get(number, time.time())

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self._ended.wait(self._rounds.poll_s):
                number = self._links.round
                if not self._links.is_open:
                    self._end_if_stuck()
                elif self._is_broken(number + 1):
                    self._noticed_s[number + 1] = time.time()
                    self._links.end(number)
                    self._freed_s = time.monotonic()
        except RuntimeError as error:  # the store is gone, and with it the job
            say(f"no rank can be replaced any more: {error}")

    def _is_broken(self, number: int) -> bool:
        """Return whether a rank has died, or one has timed out waiting for another."""
        if self._rounds.is_declared(number):
            return True
        if time.monotonic() < self._next_look_s:
            return False
        self._next_look_s = time.monotonic() + _TIMEOUT_POLL_S
        if failure := self._links.failure():
            say(f"{failure}: all ranks leave what they are doing")
            self._rounds.time_out(number)
        return self._rounds.has_timed_out(number)

    def _end_if_stuck(self) -> None:
        """End this process if the training thread was freed and is in the same iteration as before."""
        since_s, now_s = self._inside_since_s, time.monotonic()
        if since_s is None or since_s > self._freed_s:
            return
        if now_s - max(self._freed_s, excused_until_s(self._training_thread)) < STUCK_S:
            return
        self._link.note_hang(now_s - since_s)
        say(
            f"process {os.getpid()} ends: its training thread has been in one iteration for "
            f"{now_s - since_s:.1f} s, and does not leave it though nobody can be waited for any more. "
            "It is in:\n"
            + "".join(traceback.format_stack(sys._current_frames()[self._training_thread]))
        )
        os.kill(os.getpid(), signal.SIGKILL)
