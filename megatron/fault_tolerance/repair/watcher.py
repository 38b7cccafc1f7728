"""Thread that frees the training thread when some rank has died or hung: it may wait for one that lives.

A training thread that does not leave its iteration, or a recovery, then waits for nobody: it hangs, and this
ends it. An
exception of the training thread may also come before the news of a death: `Deaths` waits for it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.nccl import end_process, why_lost
from megatron.fault_tolerance.repair.own_errors import OwnErrors, may_be_of_others
from moe_ft.cluster.link import RankLink
from moe_ft.cluster.member import Member
from moe_ft.cluster.rounds import RoundMark, Rounds
from moe_ft.files.progress import awaiting_others, excused_until_s, progress_s
from moe_ft.loop.hangs import LAST_WORDS_S
from moe_ft.loop.waits import stack_of
from moe_ft.processes import exit_within
from moe_ft.recovery.failures import is_timeout
from moe_ft.saying import warn

# From the end of its connections, of what else it waits for, and of what it reads (moe_ft/files/progress.py),
# until a thread that is still in its iteration or recovery counts as one that hangs.
STUCK_S = 20.0
_TIMEOUT_POLL_S = 0.5
_CLOSE_S = 5.0
_LONGEST_LOOK_S = 5.0  # from one look at the thread to the next, of a process that runs
_NOTICE_S = 5.0  # from an exception until the keeper has said that a rank died


class Watcher:
    """Watches the job's store over a connection of its own, and ends the links of a broken round.

    The training thread starts and closes it, and sets `_inside_since_s`. Its own thread sets everything else
    that changes. Each reads what the other sets.
    """

    def __init__(self, rounds: Rounds, links: Links, member: Member) -> None:
        self._rounds = rounds
        self._links = links
        self._member = member
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="moe_ft-repair", daemon=True)
        self._noticed_s: dict[int, float] = {}
        self._inside_since_s: float | None = None
        self._training_thread = 0
        self._freed_s = self._next_look_s = self._looked_s = 0.0

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Note that the training thread is in an iteration or a recovery.

        It must leave that when its connections end.
        """
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
        """End the thread, or leave it to the end of the process if the store does not answer it."""
        self._ended.set()
        self._thread.join(_CLOSE_S)

    def _watch(self) -> None:
        try:
            while not self._ended.is_set():
                # Before the look at the links of the round: the next one may open them.
                number = self._member.round
                if not self._links.is_open:
                    self._end_if_stuck()
                    self._ended.wait(self._rounds.poll_s)
                elif self._is_broken(number + 1):
                    if self._rounds.is_own_lost(number + 1):
                        self._member.end_replaced(number + 1)
                    self._noticed_s[number + 1] = time.time()
                    self._links.end(number)
                    self._freed_s = time.monotonic()
        except RuntimeError as error:  # the store is gone, and with it the job
            warn(f"no rank can be replaced any more: {error}")

    def _is_broken(self, number: int) -> bool:
        """Return whether a rank has died, or one has timed out waiting for another; wait, not for long."""
        if self._rounds.wait_until_broken(number):
            return True
        if time.monotonic() < self._next_look_s:
            return False
        self._next_look_s = time.monotonic() + _TIMEOUT_POLL_S
        if failure := self._links.failure():
            warn(f"{failure}: all ranks leave what they are doing")
            self._rounds.note(RoundMark.TIMED_OUT, number)
        return False

    def _end_if_stuck(self) -> None:
        """End this process if the training thread was freed and is in the same place as before."""
        since_s, now_s = self._inside_since_s, time.monotonic()
        looked_s, self._looked_s = self._looked_s, now_s
        if since_s is None or since_s > self._freed_s:
            return
        # A longer time between two looks says that this process did not run, and nothing about the thread.
        self._freed_s += max(0.0, now_s - max(looked_s, self._freed_s) - _LONGEST_LOOK_S)
        thread = self._training_thread
        if now_s - max(self._freed_s, excused_until_s(thread), progress_s(thread)) < STUCK_S:
            return
        exit_within(LAST_WORDS_S)
        self._member.link.note_hang(now_s - since_s)
        warn(
            f"process {os.getpid()} ends: its training thread has been in one iteration or recovery for "
            f"{now_s - since_s:.1f} s, and stays there although all its connections are closed. "
            "It is in:\n" + stack_of(thread)
        )
        os.kill(os.getpid(), signal.SIGKILL)


class Deaths:
    """Tells whether an exception comes from the death of another rank. Owned by the training thread.

    It ends the links then, so that nobody waits for this rank.
    """

    def __init__(self, member: Member, watcher: Watcher, links: Links, own: OwnErrors) -> None:
        self._member = member
        self._watcher = watcher
        self._links = links
        self._own = own

    def notice_or_raise(self, error: BaseException, *, waits: bool = False) -> float:
        """Return when this rank learned of a death; disarm and raise the error if no rank has died.

        An exception of this rank alone ends its process, which is replaced. After others the news of a death
        may still be on its way.

        Args:
            waits: whether it may be after this one, whatever it is.
        """
        if not may_be_of_others(error):
            self._own.end_if_own(error)
        if self._member.link.is_armed and (reason := why_lost(error)):
            self._own.tell_of_device(reason)
            end_process(reason)
        noticed_s = self.notice(error, waits=waits) if isinstance(error, Exception) else None
        if noticed_s is None:
            self._own.end_if_own(error)
            self._member.link.disarm()
            raise error
        return noticed_s

    def notice(self, error: Exception, *, waits: bool = False) -> float | None:
        """Return the time since 1970 when this rank learned of a death; None if no rank has died."""
        raised_s, number = time.time(), self._member.round + 1
        if not self._is_declared(number, error, waits or may_be_of_others(error)):
            return None
        self._links.end(number - 1)
        is_over = self._member.rounds.is_finished(number - 1)
        where = "its iteration" if is_over else "a repair"
        warn(f"rank {self._member.rank} has left {where}: a rank has died ({_first_line(error)})")
        return min(raised_s, self._watcher.noticed_s(number))

    @awaiting_others()
    def _is_declared(self, number: int, error: Exception, waits: bool) -> bool:
        """Return whether a round has begun; wait for that, if asked to, as long as it may still begin."""
        begin_s, rounds = time.monotonic(), self._member.rounds
        if waits and is_timeout(error):
            rounds.note(RoundMark.TIMED_OUT, number)
        if waits and not rounds.is_declared(number):
            rounds.note(RoundMark.SUSPECTED, number)
        while not rounds.is_declared(number):
            # A rank that hangs ends itself then.
            wait_s = _NOTICE_S * (1 + self._member.assignment.is_watched) + (
                STUCK_S if rounds.has(RoundMark.TIMED_OUT, number) else 0.0
            )
            if not waits or time.monotonic() - begin_s > wait_s:
                return False
            rounds.wait_until_declared(number)
        return True


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def ending_after(seconds: float, link: RankLink) -> Iterator[None]:
    """End the process, for good, if this thread makes no progress in this context for so long.

    Progress is that of moe_ft/files/progress.py. The launcher then restarts the job.
    """
    begin_s, thread, has_ended = time.monotonic(), threading.get_ident(), threading.Event()

    def watch() -> None:
        wait_s = seconds
        while not has_ended.wait(wait_s):
            wait_s = max(begin_s, progress_s(thread)) + seconds - time.monotonic()
            if wait_s <= 0:
                exit_within(LAST_WORDS_S)
                link.retire()
                warn(f"a repair has made no progress for {seconds:.0f} s: this rank ends")
                sys.stdout.flush()
                os._exit(1)

    watching = threading.Thread(target=watch, name="moe_ft-deadline", daemon=True)
    watching.start()
    try:
        yield
    finally:
        has_ended.set()
        watching.join()
