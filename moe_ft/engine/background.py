"""Background work: workers, which run while training continues, and their reports, read at the next seam."""

import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from moe_ft.engine.clock import Clock
from moe_ft.engine.snapshots.profile import SnapshotProfile
from moe_ft.errors import DegradedError
from moe_ft.faults import Phase
from moe_ft.saying import warn

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
    PROTECTION = "protection"  # all of the above: no state of the run is held anywhere
    BOUNDARY_LOG = "boundary-log"
    AGREEMENT = "agreement"
    PEER_SERVER = "peer-server"


def describe(error: BaseException) -> str:
    """Return the type and the message of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEvent:
    """One event of a background part.

    Attributes:
        time_s: when it happened, in seconds since 1970; the log gets it with the next iteration.
    """

    event: str
    iteration: int
    fields: dict[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.time, compare=False)


class EventQueue:
    """A queue from any thread to the training thread."""

    def __init__(self) -> None:
        self._reports: deque[EngineEvent] = deque()
        self._lock = threading.Lock()

    def add(self, event: str, iteration: int, **fields: Any) -> None:
        """Add an event. Any thread."""
        with self._lock:
            self._reports.append(EngineEvent(event=event, iteration=iteration, fields=fields))

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

    def drain(self) -> list[EngineEvent]:
        """Return and forget all events so far. Training thread."""
        with self._lock:
            reports = list(self._reports)
            self._reports.clear()
        return reports


_PRINT_INTERVAL_S = 30.0
_NOTABLE_STALL = 0.01  # of an iteration


class Messages:
    """Reports of one rank and their way to the user. Owned by the training thread."""

    def __init__(self, rank: int, clock: Clock, *, is_first_of_stage: bool, raises: bool) -> None:
        """Begin without reports; a failure ends training if it `raises`."""
        self.reports = EventQueue()
        self._clock = clock
        self._rank = rank
        self._speaks = is_first_of_stage
        self._raises = raises
        self._printed_s: dict[str, float] = {}
        self._told_length = 0

    def drain(self, log: Callable[[EngineEvent], None], *, is_ending: bool = False) -> None:
        """Hand over the events since the last call, and print those that say that something failed.

        With --moe-ft-on-error=raise, such a failure raises DegradedError. At the end of training each of them
        is printed, and none raises.
        """
        failure = ""
        for report in self.reports.drain():
            try:
                log(report)
            except Exception as error:  # TensorBoard and W&B raise whatever they like
                failed = (
                    f"iteration {report.iteration}: log: event {report.event}: {describe(error)}"
                )
                self._print_failure("log", failed, is_ending)
            if report.event == "corruption":
                self._print_accusation(report)
            if report.event == "degraded":
                failure = f"iteration {report.iteration}: {report.fields['part']}: {report.fields['reason']}"
                self._print_failure(report.fields["part"], failure, is_ending)
        if failure and self._raises and not is_ending:
            raise DegradedError(f"{failure} (--moe-ft-on-error=raise)")

    def _print_accusation(self, report: EngineEvent) -> None:
        """Print whom a peer's repetition of the optimizer's step accuses: this rank, or another one twice."""
        given, (accused, *others) = report.fields, report.fields["ranks"]
        if others or not given["decided"] or (accused != self._rank and given["times"] < 2):
            return
        self._print(
            f", iteration {report.iteration}: rank {accused} computes or keeps wrong bits ({given['where']}; "
            f"{given['reason']}), found {given['times']} times so far. Training goes on: exclude its node "
            "from the next start, and have it examined"
        )

    def _print_failure(self, part: str, failure: str, is_ending: bool) -> None:
        """Print a failure, before the end at most one per part and interval; the event log has them all.

        That nothing protects the run is printed each time.
        """
        now = self._clock.monotonic()
        is_urgent = is_ending or part == BackgroundPart.PROTECTION
        if is_urgent or now - self._printed_s.get(part, -_PRINT_INTERVAL_S) >= _PRINT_INTERVAL_S:
            self._printed_s[part] = now
            self._print(f", {failure}")

    def tell_window(
        self, iteration: int, facts: dict[str, Any], profile: SnapshotProfile, hint: str
    ) -> None:
        """Report a window; warn once for each length if training has to wait for it."""
        length, own_most = facts["length"], max(facts["bytes"], default=0)
        own_stall_s = profile.expected_stall_s(own_most)
        self.reports.add("window", iteration, **facts, expected_stall_s=own_stall_s)
        is_new, self._told_length = self._told_length != length, length
        most = facts["largest_bytes"]
        stall_s = profile.expected_stall_s(most)
        if is_new and self._speaks and stall_s > _NOTABLE_STALL * profile.iteration_s:
            self._print(
                f": windows of {length} snapshots with up to {most / 2**20:.1f} MiB each hold up every "
                f"iteration by about {stall_s:.3f} s of {profile.iteration_s:.3f} s. {hint}"
            )

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads standard error any more
            warn(f"rank {self._rank}{text}")


def device_of_this_thread() -> Callable[[], None]:
    """Return a function that makes the GPU of this thread that of the thread which calls it.

    The GPU of a new thread is the first one of its node. The first call of CUDA there would make another
    context on it, of half a GiB for each process.
    """
    torch = sys.modules.get("torch")  # commands that need none import this file
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


class ThreadWorker:
    """Runs one piece of work after the other, in the order in which they were submitted.

    It has a daemon thread of its own: work that hangs does not keep the process alive. The GPU of the thread
    is that of the thread which starts it.
    """

    def __init__(self, name: str) -> None:
        self._name = f"moe_ft-{name}"
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle: tuple[float, Callable[[], None]] | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(
            target=self._run, args=(device_of_this_thread(),), name=self._name, daemon=True
        )
        self._thread.start()

    def submit[Result](self, act: Callable[[], Result]) -> Future[Result]:
        """Have a function called after everything submitted before. Any thread."""
        future: Future[Result] = Future()
        self._work.put(lambda: settle(future, act))
        return future

    def when_idle(self, idle_s: float, act: Callable[[], None]) -> None:
        """Call a function once nothing was submitted for a while; forget it if something is.

        Only the worker's own work may call this.
        """
        self._idle = idle_s, act

    def close(self, timeout_s: float) -> None:
        """End after everything that was submitted, or leave the rest after a timeout."""
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, use_device: Callable[[], None]) -> None:
        use_device()
        while True:
            idle, self._idle = self._idle, None
            try:
                work = self._work.get(timeout=idle[0] if idle else None)
            except queue.Empty:
                work = idle[1] if idle else None
            if work is None:
                return
            work()
            del work, idle  # what they hold may wait to be let go, such as a connection


def settle[Result](future: Future[Result], act: Callable[[], Result]) -> None:
    """Call a function and give a future what it returns or raises."""
    try:
        result = act()
    except BaseException as error:  # whoever holds the future must hear of it
        # Without the frames, whose tensors it would keep alive: who reports it has done so.
        future.set_exception(error.with_traceback(None))
    else:
        future.set_result(result)
