"""Many schedules, one after another or in several processes, until all are run, time is up or a signal comes.

A schedule that breaks a promise is printed at once, and then made smaller, which takes a while.
"""

import gc
import multiprocessing
import signal
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import torch

from tests.simulation.active import Patches
from tests.simulation.mutations import MUTATIONS
from tests.simulation.repairs.schedule import RepairSchedule
from tests.simulation.repairs.simulate import simulate as simulate_repairs
from tests.simulation.schedule import Schedule
from tests.simulation.simulate import Verdict, installed, simulate

AnySchedule = Schedule | RepairSchedule

_POLL_S = 0.5
_WAITING_PER_JOB = 2  # schedules that a process has been given


class _StopError(Exception):
    """The campaign is to end."""


def attempt(schedule: AnySchedule, folder: Path) -> Verdict:
    """Run a schedule; an error of the simulation itself is a violation, too."""
    try:
        if isinstance(schedule, RepairSchedule):
            return simulate_repairs(schedule, folder)
        return simulate(schedule, folder)
    except Exception:
        return Verdict(violations=(traceback.format_exc(),), is_crash=True)


@contextmanager
def mistaken(mutation: str | None) -> Iterator[None]:
    patches = Patches()
    try:
        if mutation is not None:
            MUTATIONS[mutation](patches)
        yield
    finally:
        patches.restore()


# In the processes of a campaign

_patched = ExitStack()  # for as long as the process lives
_stopping: Any = None
_folder = Path()


def _prepare(options: Namespace, stopping: Any) -> None:
    """Prepare a process that runs schedules: the parent alone reacts to signals."""
    global _stopping, _folder
    _stopping, _folder = stopping, options.folder
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _patched.enter_context(mistaken(options.mutation))
    _patched.enter_context(installed())
    gc.freeze()  # collections between schedules need not look at modules again


def _attempt(schedule: AnySchedule) -> Verdict:
    return attempt(schedule, _folder)


def _shrink(schedule: AnySchedule) -> tuple[AnySchedule, Verdict]:
    def fails(each: AnySchedule) -> bool:
        if _stopping.is_set():
            raise _StopError
        return bool(_attempt(each).violations)

    smaller = shrink(schedule, fails)
    return smaller, _attempt(smaller)


class Campaign:
    """Runs schedules in processes of its own, and prints what fails.

    Options are those of `python -m tests.simulation`.
    """

    def __init__(self, options: Namespace, *, jobs: int = 1, seconds: float = float("inf")) -> None:
        self._options, self._jobs = options, jobs
        self._begun_s = time.monotonic()
        self._end_s = self._begun_s + seconds
        self._is_stopped = False
        self._stopping: Any = None
        self._done = self._failed = self._recoveries = self._events = 0
        self._pending: dict[Future[Any], AnySchedule] = {}  # that run, or are made smaller

    def run(self, schedules: Iterator[AnySchedule]) -> int:
        """Run schedules until there are no more, time is up or a signal comes; return the exit code."""
        context = multiprocessing.get_context("fork")
        self._stopping = context.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._stop())
        with ProcessPoolExecutor(
            self._jobs, context, _prepare, (self._options, self._stopping)
        ) as pool:
            self._run(schedules, pool)
        spent_s = time.monotonic() - self._begun_s
        print(
            f"{self._recoveries} recoveries, {self._events} events, "
            f"{self._done / spent_s:.1f} schedules/s\n"
            f"{self._done} schedules, {self._failed} failures"
        )
        return int(self._failed > 0)

    def _stop(self) -> None:
        self._is_stopped = True
        self._stopping.set()

    def _run(self, schedules: Iterator[AnySchedule], pool: ProcessPoolExecutor) -> None:
        shrinking: set[Future[Any]] = set()
        is_over = False
        while not is_over or self._pending:
            is_over = is_over or self._is_stopped or time.monotonic() > self._end_s
            while not is_over and len(self._pending) < _WAITING_PER_JOB * self._jobs:
                if (schedule := next(schedules, None)) is None:
                    is_over = True
                else:
                    self._pending[pool.submit(_attempt, schedule)] = schedule
            done, _ = wait(self._pending, _POLL_S, FIRST_COMPLETED)
            for future in done:
                schedule = self._pending.pop(future)
                if future in shrinking:
                    self._tell_smaller(schedule, future)
                elif self._tell(schedule, future.result()) and self._options.shrink:
                    again = pool.submit(_shrink, schedule)
                    shrinking.add(again)
                    self._pending[again] = schedule

    def _tell(self, schedule: AnySchedule, verdict: Verdict) -> bool:
        """Count and print a schedule that has run; return whether it has failed."""
        self._done += 1
        self._recoveries += verdict.num_recoveries
        self._events += verdict.num_events
        if verdict.violations or self._options.verbose:
            lines = verdict.lines if self._options.verbose else ()
            print(schedule, *lines, *verdict.log, *verdict.violations, sep="\n", flush=True)
        if verdict.violations:
            self._failed += 1
            self._keep(schedule, schedule, verdict, "")
            # The same seed is another schedule of another kind.
            kinds = ("elastic", "spares", "repairs", "layouts")
            drawn = [each for each in kinds if getattr(self._options, each)]
            drawn += ["repairs"] * isinstance(schedule, RepairSchedule)
            kind = f"--{drawn[0]} " if drawn else ""
            again = f"python -m tests.simulation {kind}--seed {schedule.seed} --verbose"
            print(f"again: {again}", flush=True)
        return bool(verdict.violations)

    def _tell_smaller(self, schedule: AnySchedule, future: Future[Any]) -> None:
        try:
            smaller, verdict = future.result()
        except _StopError:
            return
        path = self._keep(schedule, smaller, verdict, "_smaller")
        print(
            f"smaller ({path or 'see --keep'}):", smaller, *verdict.violations, sep="\n", flush=True
        )

    def _keep(
        self, of: AnySchedule, schedule: AnySchedule, verdict: Verdict, suffix: str
    ) -> Path | None:
        """Write a schedule that fails, and beside it what happens."""
        if self._options.keep is None:
            return None
        self._options.keep.mkdir(parents=True, exist_ok=True)
        path: Path = self._options.keep / f"seed_{of.seed}{suffix}.json"
        path.write_bytes(msgspec.json.encode(schedule))
        text = "\n".join((str(schedule), *verdict.lines, *verdict.log, *verdict.violations))
        path.with_suffix(".txt").write_text(f"{text}\n")
        return path


class _Smaller(Protocol):
    """A schedule that knows simpler ones of its kind."""

    def smaller(self) -> Sequence[Self]:
        """Return schedules with fewer faults, or of a simpler job."""


def shrink[S: _Smaller](schedule: S, fails: Callable[[S], bool], tries: int = 200) -> S:
    is_smaller = True
    while is_smaller and tries > 0:
        is_smaller = False
        for candidate in schedule.smaller():
            tries -= 1
            if fails(candidate):
                schedule, is_smaller = candidate, True
                break
            if tries <= 0:
                break
    return schedule
