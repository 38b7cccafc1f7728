"""Runs one schedule: the job with its faults, until training has ended, or may refuse to."""

import gc
import posix
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_ft.engine.links import streams
from moe_ft.planning import levels, lost_tokens
from tests.simulation import (
    collectives,
    file_locks,
    files,
    leaving,
    network,
    processes,
    rank,
    threads,
)
from tests.simulation.active import Patches, active
from tests.simulation.injection import Injection
from tests.simulation.job import Job, Start, make_world
from tests.simulation.kernel import HangError, Kernel
from tests.simulation.oracle import Oracle, describe
from tests.simulation.owing import BOOST_ITERATIONS
from tests.simulation.repairs import machine, product, store
from tests.simulation.schedule import Schedule

_PIECE_BYTES = 300
_MORE_STARTS = 3  # after the last one with a fault; a state that fails twice is passed over
_LONGEST_RESTART_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of a schedule.

    Attributes:
        violations: promises that were broken.
        log: faults as they happened, and how each start began and ended.
        num_events: events in all.
        num_starts: starts of the job.
        num_recoveries: starts that have recovered something.
        trace: checksum of all events in their order.
        lines: what processes have printed.
        is_crash: whether the simulation itself has failed.
    """

    violations: tuple[str, ...]
    log: tuple[str, ...] = ()
    num_events: int = 0
    num_starts: int = 0
    num_recoveries: int = 0
    trace: int = 0
    lines: tuple[str, ...] = ()
    is_crash: bool = False


@contextmanager
def installed() -> Iterator[None]:
    """Put the simulated operating system in the place of the real one, for simulated threads."""
    patches, has_gradients = Patches(), torch.is_grad_enabled()
    try:
        for module in (
            threads,
            files,
            file_locks,
            processes,
            network,
            collectives,
            rank,
            leaving,
            machine,
            store,
            product,
        ):
            module.install(patches)
        yield
    finally:
        patches.restore()
        torch.set_grad_enabled(has_gradients)  # simulated threads share what each real one has


def simulate(schedule: Schedule, folder: Path) -> Verdict:
    """Run a schedule; everything is installed.

    Args:
        folder: on a tmpfs; is left as it was.
    """
    root = Path(tempfile.mkdtemp(prefix="simulation_", dir=folder))
    world = make_world(schedule.seed, root, switching=schedule.switching)
    job = Job(world, schedule.setup, root)
    oracle = Oracle(job)
    injection = Injection(job, oracle)
    patches = Patches()
    patches.set(levels, "FAN_OUT", schedule.setup.fan_out)
    patches.set(streams, "PIECE_BYTES", _PIECE_BYTES)
    patches.set(lost_tokens, "BOOST_ITERATIONS", BOOST_ITERATIONS)
    world.network.resets_some = schedule.setup.streams > 1
    gc.disable()  # destructors at any time would make two runs of a seed different
    try:
        with active(world):
            try:
                _run_starts(schedule, job, oracle, injection)
            except HangError as error:
                oracle.violations.append(f"does not end: {error}")
            finally:
                world.kernel.close()
    finally:
        gc.enable()
        patches.restore()
        _remove(str(root))
    for thread, error in world.kernel.errors:
        oracle.violations.append(f"{thread} ended with {describe(error)}")
    return Verdict(
        violations=tuple(oracle.violations),
        log=tuple(injection.log),
        num_events=world.kernel.num_events,
        num_starts=len(job.starts),
        num_recoveries=sum(
            any(life.outcome is not None and life.outcome.record is not None for life in each.lives)
            for each in job.starts
        ),
        trace=world.kernel.trace,
        lines=tuple(_printed(world.kernel)),
    )


def _remove(directory: str) -> None:
    with posix.scandir(directory) as entries:
        for each in entries:
            if each.is_dir(follow_symlinks=False):
                _remove(each.path)
            else:
                posix.unlink(each.path)
    posix.rmdir(directory)


def _printed(kernel: Kernel) -> Iterator[str]:
    for process in kernel.processes:
        yield from (f"{process!r}: {line}" for line in processes.lines_of(process))


def _run_starts(schedule: Schedule, job: Job, oracle: Oracle, injection: Injection) -> None:
    last = max((fault.start for fault in schedule.faults), default=0)
    setup = job.setup
    num_stops = -(-setup.iterations // setup.stop_interval) if setup.stop_interval else 0
    for number in range(last + 1 + _MORE_STARTS + num_stops):
        here = [fault for fault in schedule.faults if fault.start == number]
        for fault in here:
            if fault.event < 0:
                injection.inflict(fault, None)
        if number:
            _let_time_pass(job, oracle if number > last else None)
        oracle.before_start()
        start = job.start()
        for fault in here:
            if fault.event >= 0:
                injection.arm(start, fault)
        has_ended = job.run(start)
        injection.mend()
        injection.log.append(_describe(start, job))
        oracle.after_start(start, has_ended=has_ended)
        if not has_ended:
            return
        is_complete = start.has_ended_well and start.last_iteration == setup.iterations
        if is_complete or oracle.is_refused:
            return
    oracle.violations.append("training does not end, although nothing disturbs it any more")


def _let_time_pass(job: Job, oracle: Oracle | None) -> None:
    """Let the time pass that a launcher needs to start a job again, and until all faults are over."""
    kernel = job.world.kernel
    until_s = kernel.now + kernel.random.uniform(0.5, _LONGEST_RESTART_S)
    if oracle is not None:
        until_s = max(until_s, oracle.disturbed_until_s)
    kernel.run(lambda: False, until_s)
    kernel.now = max(kernel.now, until_s)


def _describe(start: Start, job: Job) -> str:
    recovered = [
        None if life.outcome is None else (life.outcome.iteration, life.replayed)
        for life in start.lives
    ]
    codes = [each.exit_code for each in start.processes]
    last = [max(life.digests, default=None) for life in start.lives]
    return (
        f"{job.world.kernel.now:.3f} s: start {start.number} over: recovered {recovered}, "
        f"trained to {last}, exit codes {codes}"
    )
