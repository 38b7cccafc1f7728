"""Hangs of the training thread: a rank that gets no further, and waits for no other rank, ends itself.

A thread of its own looks once a second in which section the loop is, when it last got further
(moe_ft/files/progress.py), and where in the code it is. So a rank that waits in a collective is not blamed
for the one that has not come. The limit is that of --moe-ft-hang-limit. `auto` learns it: see `Limits`.

What this cannot see: a thread that keeps the interpreter to itself, or a process that is stopped. The fork
server of `keep` sees that (moe_ft/cluster/link.py), and others time out.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, override

import psutil
import torch

from moe_ft.cluster.member import own_member
from moe_ft.config.config import RecoveryConfig
from moe_ft.config.fields import flag_of
from moe_ft.engine.background import device_of_this_thread
from moe_ft.events import EventLog
from moe_ft.faults import Section
from moe_ft.files.progress import awaits_others, excused_until_s, progress_s
from moe_ft.loop.listeners import Built, LoopListener, LoopState
from moe_ft.loop.waits import is_in_exchange, stack_of
from moe_ft.processes import exit_within
from moe_ft.saying import warn

LOOK_S = 1.0
LAST_WORDS_S = 10.0  # of a process that ends: what it writes to may be what its thread waits for
FACTOR = 10  # of the longest silence so far
NUM_ITERATIONS = 10  # of this process, before anything that was learned counts
FLOORS_S = {
    Section.ITERATION: 60.0,
    Section.EVALUATION: 60.0,
    Section.BETWEEN: 300.0,
    Section.CHECKPOINT: 300.0,
}
_CLOSE_S = 5.0
_LONGEST_LOOK_S = 5.0  # from one look to the next, of a process that runs
_DEBUGGERS = ("/bdb.py", "/pydevd.py")


class Limits:
    """Limits of silence by section, given or learned. Used by one thread.

    A section has a learned limit once this process has run ten iterations and come to the end of that
    section: ten times the longest silence in it so far, and at least its floor. Until then, and in the first
    iteration after a start or a repair, the limit is the timeout of the groups, as for those that wait. Setup
    and exit, of which a process has one each, have ten times that.
    """

    def __init__(self, given_s: float | None, timeout_s: float, loop: LoopState) -> None:
        """Know nothing yet."""
        self._given_s = given_s
        self._timeout_s = timeout_s
        self._loop = loop
        self.knows_device = True  # False: what waits for others there cannot be told from a hang
        self._longest_s: dict[Section, float] = {}

    def learn(self, section: Section, silent_s: float) -> None:
        """Note a silence that has ended."""
        self._longest_s[section] = max(silent_s, self._longest_s.get(section, 0.0))

    def of(self, section: Section) -> float:
        """Return the limit of a section in seconds."""
        passes = self._loop.num_passes
        if self._given_s is not None:
            return self._given_s if self.knows_device else max(self._given_s, self._timeout_s)
        if section not in FLOORS_S:
            return FACTOR * self._timeout_s
        is_known = passes[section] and passes[Section.ITERATION] >= NUM_ITERATIONS
        if self._loop.is_first or not is_known or not self.knows_device:
            return self._timeout_s
        return max(FLOORS_S[section], FACTOR * self._longest_s.get(section, 0.0))

    def __str__(self) -> str:
        return "auto" if self._given_s is None else f"{self._given_s:g}"


class Silence:
    """Time for which the training thread has got no further, and waited for nobody. Used by one thread."""

    def __init__(
        self, thread: int, loop: LoopState, limits: Limits, waits: Callable[[], bool]
    ) -> None:
        """Begin now; the last argument tells whether the thread waits for others."""
        self._thread = thread
        self._loop = loop
        self._limits = limits
        self._waits = waits
        self._section = loop.section
        self._is_first = True
        self._seconds = 0.0
        self._begin_s = self._looked_s = time.monotonic()
        self._written: int | None = None
        self._has_failed = False

    def look(self) -> float:
        """Return the seconds so far. They begin again with whatever explains them."""
        now_s, thread, section = time.monotonic(), self._thread, self._loop.section
        begin_s = max(self._begin_s, excused_until_s(thread), progress_s(thread))
        # A longer time between two looks says that this process did not run, and nothing about the thread.
        is_explained = now_s - self._looked_s > _LONGEST_LOOK_S or (
            now_s - begin_s > LOOK_S and self._has_reason(now_s - begin_s)
        )
        begin_s, self._looked_s = now_s if is_explained else begin_s, now_s
        if begin_s > self._begin_s:
            if (
                section is not Section.SETUP and not self._is_first
            ):  # not of one that was broken off
                self._limits.learn(self._section, self._seconds)
            self._begin_s = begin_s
        self._section = section
        self._is_first = self._loop.is_first
        self._seconds = max(0.0, now_s - begin_s)
        return self._seconds

    def _has_reason(self, silent_s: float) -> bool:
        """Return whether the thread may be silent; True if that cannot be seen."""
        try:
            return self._waits() or self._writes(silent_s)
        except Exception as error:  # no descriptor is left, or the device has failed
            if not self._has_failed:
                warn(f"whether this rank hangs cannot be seen now: {type(error).__name__}: {error}")
            self._has_failed = True
            return True

    def _writes(self, silent_s: float) -> bool:
        """Return whether a checkpoint that is soon too late has written more since the last look."""
        limit_s = self._limits.of(self._section)
        if self._section is not Section.CHECKPOINT or silent_s < limit_s / 2:
            self._written = None
            return False
        before, self._written = self._written, written_bytes()
        return before is not None and self._written != before


class Hangs(LoopListener):
    """Ends this process if its training thread hangs. Started and closed by the training thread."""

    def __init__(
        self,
        config: RecoveryConfig,
        loop: LoopState,
        event_log: EventLog,
        timeout_s: float | None,
        tell: Callable[[str], None] = lambda what: None,
    ) -> None:
        """Watch nothing yet.

        Args:
            tell: tells others of a hang, in words; the process ends next.
            timeout_s: of the groups; None if the loop does not tell its sections. Then nothing is learned.
        """
        given_s = config.hang_limit_s
        self._is_on = timeout_s is not None or given_s is not None
        self._loop = loop
        self._log = event_log
        self._tell = tell
        self._limits = Limits(given_s, timeout_s or 0.0, loop)
        self._ended = threading.Event()
        self._watcher: threading.Thread | None = None
        self._training_thread = 0
        self._stream: Any = None  # of a GPU, on which this rank computes
        self._use_device: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to watch the calling thread."""
        self._training_thread = threading.get_ident()
        if self._is_on:
            self._watcher = threading.Thread(target=self._watch, name="moe_ft-hangs", daemon=True)
            self._watcher.start()

    def after_setup(self, built: Built) -> None:
        """Learn which device may be what this rank waits for.

        One that captures graphs is not asked: a question of another thread breaks a capture.
        """
        configs = (getattr(part, "config", None) for part in built[0])
        if any(getattr(each, "cuda_graph_impl", None) not in (None, "none") for each in configs):
            self._limits.knows_device = False
            return
        on_gpu = (each for part in built[0] for each in part.parameters() if each.is_cuda)
        if (parameter := next(on_gpu, None)) is not None:
            self._use_device = device_of_this_thread()
            self._stream = torch.cuda.current_stream(parameter.device)

    @override
    def enter_section(self, section: Section) -> None:
        if (member := own_member()) is not None:
            member.link.section = section

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        if self._watcher is not None:
            self._watcher.join(_CLOSE_S)

    def _watch(self) -> None:
        silence = Silence(self._training_thread, self._loop, self._limits, self._waits)
        while not self._ended.wait(LOOK_S):
            section, silent_s = self._loop.section, silence.look()
            limit_s = self._limits.of(section)
            if silent_s >= limit_s:
                self._end(section, silent_s, limit_s)

    def _waits(self) -> bool:
        """Return whether the thread may wait for other ranks, or for somebody who debugs it."""
        thread = self._training_thread
        self._use_device()
        has_device_work = self._stream is not None and not self._stream.query()
        return (
            has_device_work
            or awaits_others(thread)
            or is_in_exchange(thread)
            or is_debugged(thread)
        )

    def _end(self, section: Section, silent_s: float, limit_s: float) -> None:
        """Say where the training thread is, and end the process: it is replaced, or all start again."""
        loop, rank = self._loop, self._log.rank
        try:
            exit_within(LAST_WORDS_S)
            if (member := own_member()) is not None:
                member.link.note_hang(silent_s)
            warn(
                f"rank {rank} hangs in iteration {loop.iteration}, phase {loop.phase}, and ends: in its "
                f"{section} it has made no progress for {silent_s:.1f} s, and waits for no other rank. The "
                f"limit is {limit_s:.0f} s ({flag_of('hang_limit')}={self._limits}). It is in:\n"
                + stack_of(self._training_thread)
            )
            self._log.write(
                "hang",
                loop.iteration,
                section=section.value,
                phase=loop.phase.value,
                silent_s=silent_s,
                limit_s=limit_s,
            )
            sys.stdout.flush()
            self._tell(f"no progress in its {section}, and it waits for no other rank")
        finally:  # also if nothing can be said
            os._exit(1)


def is_debugged(thread: int) -> bool:
    """Return whether a debugger is attached to this process, or a thread is in one of Python."""
    with open("/proc/self/status") as file:
        traced = next((line.split()[1] for line in file if line.startswith("TracerPid")), "0")
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_DEBUGGERS):
            return True
        frame = frame.f_back
    return traced != "0"


def written_bytes() -> int:
    """Return how much this process and those that it has started have written."""
    process, total = psutil.Process(), 0
    for each in (process, *process.children(recursive=True)):
        try:
            total += each.io_counters().write_chars
        except psutil.Error:  # it has ended
            continue
    return total
