"""Simulated jobs whose stages recover alone, and the judge of what they promise."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.job import Start
from tests.simulation.schedule import draw
from tests.unit.simulation.small_job import SmallJob, has_trained, small_job

MIDDLE = 1


@contextmanager
def job_of_stages(**flags: Any) -> Iterator[SmallJob]:
    """Yield a job of three stages with one rank each."""
    sizes = {"stages": 3, "dp": 1, "ep": 1, "iterations": 8}
    with small_job(**sizes, breakpoints=True, upstream_log=True, **flags) as job:
        yield job


def replays(start: Start) -> list[int]:
    """Return the iterations that each rank has run again."""
    return [life.replayed for life in start.lives]


def recovered_at(start: Start) -> set[int]:
    """Return where the ranks of a start have continued."""
    return {life.outcome.iteration for life in start.lives if life.outcome is not None}


SPARSE = {"strategy": "sparse", "options": {"window": "3", "max_window": 4}}


@pytest.mark.parametrize("flags", [{"interval": "2"}, SPARSE])
def test_dead_stage_alone_runs_iterations_again(flags: dict[str, Any]) -> None:
    with job_of_stages(**flags) as job:
        first = job.run_until_death(MIDDLE, has_trained(5))
        promised = job.oracle.promised
        assert promised == 5
        assert job.judge(first) == []
        start = job.run_until()
        (target,) = recovered_at(start)
        assert target >= promised
        assert replays(start)[0] == replays(start)[2] == 0
        assert replays(start)[MIDDLE] > 0
        assert [life.outcome.stages for life in start.lives if life.outcome] == [(MIDDLE,)] * 3
        assert job.judge(start) == []


def test_ranks_that_are_told_to_end_leave_all_that_they_have() -> None:
    with job_of_stages() as job:
        job.oracle.before_start()
        first = job.start()
        job.world.kernel.run(lambda: has_trained(4)(first), 1000.0)
        job.oracle.note_end(first, None)
        job.oracle.is_disturbed = True
        job.end(first)
        assert job.run(first)
        assert {each.exit_code for each in first.processes} == {143}
        assert job.judge(first) == []
        start = job.run_until()
        (target,) = recovered_at(start)
        assert target >= 4
        assert replays(start) == [0, 0, 0]
        start.lives[0].replayed = 2
        assert "and all ranks had left theirs" in job.judge(start)[0]


def test_local_recovery_that_is_not_allowed_is_a_violation() -> None:
    with job_of_stages(recovery="global") as job:
        assert job.judge(job.run_until_death(MIDDLE, has_trained(5))) == []
        start = job.run_until()
        for life in start.lives:
            assert life.outcome is not None
            assert life.outcome.stages == ()
            life.outcome = replace(life.outcome, stages=(MIDDLE,))
        assert job.judge(start) == ["start 1: stages (1,) recovered alone"]


def test_replay_of_more_than_is_needed_is_a_violation() -> None:
    with job_of_stages() as job:
        assert job.judge(job.run_until_death(MIDDLE, has_trained(5))) == []
        start = job.run_until()
        start.lives[0].replayed = 2
        (violation,) = job.judge(start)
        assert "replayed {0: 2, 1:" in violation


def test_schedules_are_drawn_of_jobs_whose_stages_recover_alone() -> None:
    setups = [draw(seed).setup for seed in range(60)]
    own = [each for each in setups if each.recovers_locally]
    assert len(own) > 5
    assert {each.recovery for each in own} == {"auto", "local"}
    assert any(each.breakpoints and not each.upstream_log for each in setups)
