"""The judge of simulated jobs fails lies that no mutation of the product tells."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.active import active
from tests.simulation.job import Job, Setup, Start, make_world
from tests.simulation.left import states_of_several_iterations
from tests.simulation.lossy import Recount
from tests.simulation.oracle import Oracle
from tests.simulation.schedule import draw
from tests.simulation.simulate import installed

MIDDLE = 1
STAGES: dict[str, Any] = {"stages": 3, "dp": 1, "ep": 1, "breakpoints": True, "upstream_log": True}
PARTIAL: dict[str, Any] = {
    "strategy": "partial",
    "options": {"k_snapshot": "1", "k_persist": 1, "selection": "sequential"},
}
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


def test_wrong_sum_of_lost_tokens_is_a_violation() -> None:
    with small_job(**PARTIAL) as job:
        first, second = job.run_until(has_trained(5)), job.run_until()
        recount = Recount()
        assert list(recount.check(first.shape, first.lives, {})) == []
        outcome: Any = second.lives[0].outcome
        total = outcome.loss.total_lost_tokens
        wrong = replace(outcome.loss, total_lost_tokens=total + 1)
        second.lives[0].outcome = replace(outcome, loss=wrong)
        assert list(recount.check(second.shape, second.lives, {})) == [
            f"said that {total + 1} tokens are lost, and {total} are"
        ]
        assert total > 0


def test_lost_tokens_are_uncertain_where_another_branch_has_skipped_an_iteration() -> None:
    with small_job(**PARTIAL) as job:
        first, second = job.run_until(has_trained(5)), job.run_until()
        recount = Recount()
        assert list(recount.check(first.shape, first.lives, {})) == []
        for key, version in recount.known.items():
            routed = {at: count for at, count in version.routed.items() if at > 1}
            recount.known[key] = replace(version, routed=routed)
        outcome: Any = second.lives[0].outcome
        total = outcome.loss.total_lost_tokens
        less = replace(outcome.loss, total_lost_tokens=total - 1)
        second.lives[0].outcome = replace(outcome, loss=less)
        assert list(recount.check(second.shape, second.lives, {})) == []
        assert recount.num_other > 0


def test_nothing_is_acknowledged_any_more_when_a_run_ends_after_a_fault() -> None:
    with small_job(persist_interval=0) as job:

        def lose_storage_once(start: Start) -> bool:
            if has_trained(5)(start) and not job.oracle.is_damaged:
                job.oracle.note_fault()
                job.oracle.lose_storage()
                assert job.oracle.floors.memory > 0
            return False

        first = job.run_until(lose_storage_once)
        assert all(life.may_lose_memory for life in first.lives)
        assert job.judge(first) == []
        second = job.run_until()
        assert [life.outcome.iteration for life in second.lives if life.outcome] == [0, 0]
        assert job.judge(second) == []


def test_local_recovery_that_is_not_allowed_is_a_violation() -> None:
    with small_job(**STAGES, iterations=8, recovery="global") as job:
        assert job.judge(job.run_until_death(MIDDLE, has_trained(5))) == []
        start = job.run_until()
        for life in start.lives:
            assert life.outcome is not None
            assert life.outcome.stages == ()
            life.outcome = replace(life.outcome, stages=(MIDDLE,))
        assert job.judge(start) == ["start 1: stages (1,) recovered alone"]


def test_replay_of_more_than_is_needed_is_a_violation() -> None:
    with small_job(**STAGES, iterations=8) as job:
        assert job.judge(job.run_until_death(MIDDLE, has_trained(5))) == []
        start = job.run_until()
        start.lives[0].replayed = 2
        (violation,) = job.judge(start)
        assert "replayed {0: 2, 1:" in violation


@pytest.mark.parametrize(("intervals", "num"), [((1, 0), 1), ((0, 3), 0)])
def test_windows_on_storage_are_told_from_whole_states(
    intervals: tuple[int, int], num: int
) -> None:
    persist_interval, dense_interval = intervals
    with small_job(
        strategy="sparse",
        options={"window": "2", "max_window": 4},
        persist_interval=persist_interval,
        dense_interval=dense_interval,
    ) as job:
        job.run_until()
        assert len(list(job.root.glob("storage/iter_*/manifest.json"))) == 2  # with the end
        assert len(states_of_several_iterations(job.root)) == num


def test_schedules_are_drawn_of_jobs_whose_stages_recover_alone() -> None:
    setups = [draw(seed).setup for seed in range(60)]
    own = [each for each in setups if each.recovers_locally]
    assert len(own) > 5
    assert {each.recovery for each in own} == {"auto", "local"}
    assert any(each.breakpoints and not each.upstream_log for each in setups)
