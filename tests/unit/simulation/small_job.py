"""A small simulated job whose starts a test runs, and its judge."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.simulation.active import active
from tests.simulation.job import Job, Setup, Start, make_world
from tests.simulation.oracle import Oracle
from tests.simulation.simulate import installed

_LONG_S = 1000.0


class SmallJob(Job):
    """Job of one node, judged."""

    def __init__(self, root: Path, **flags: Any) -> None:
        setup = Setup(**{"nodes": 1, "iterations": 6, "replication": "0", **flags})
        super().__init__(make_world(1, root), setup, root)
        self.oracle = Oracle(self)

    def run_until(self, is_over: Callable[[Start], bool] = lambda _: False) -> Start:
        """Start the ranks, and kill them when something is so, or let them train to the end."""
        self.oracle.before_start()
        started = self.start()
        self.world.kernel.run(
            lambda: is_over(started) or not any(each.is_alive for each in started.processes),
            self.world.kernel.now + _LONG_S,
        )
        self.kill(started)
        return started

    def run_until_death(self, rank: int, is_time: Callable[[Start], bool]) -> Start:
        """Start the ranks, and kill one of them when something is so; the launcher ends the others."""
        self.oracle.before_start()
        started = self.start()
        self.world.kernel.run(lambda: is_time(started), self.world.kernel.now + _LONG_S)
        self.oracle.note_end(started, rank)
        self.oracle.is_disturbed = True
        self.world.kernel.kill(started.processes[rank])
        assert self.run(started)
        return started

    def judge(self, started: Start, *, has_ended: bool = True) -> list[str]:
        self.oracle.after_start(started, has_ended=has_ended)
        return self.oracle.violations


def has_trained(iterations: int) -> Callable[[Start], bool]:
    return lambda start: all(iterations in life.digests for life in start.lives)


@contextmanager
def small_job(**flags: Any) -> Iterator[SmallJob]:
    """Yield a job; it is in the place of the operating system until the end."""
    root = Path(tempfile.mkdtemp(prefix="small_job_", dir="/dev/shm"))
    try:
        with installed():
            job = SmallJob(root, **flags)
            with active(job.world):
                try:
                    yield job
                finally:
                    job.world.kernel.close()
    finally:
        shutil.rmtree(root)
