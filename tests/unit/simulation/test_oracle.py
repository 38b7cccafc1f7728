"""The judge of simulated jobs: it accepts what happened, and fails each lie about it."""

from dataclasses import replace

from moe_ft.errors import UnrecoverableError
from tests.simulation.job import Start
from tests.unit.simulation.small_job import SmallJob, has_trained, small_job


def recovered(job: SmallJob) -> Start:
    """Return a start that has recovered what a killed one has left, and trained to the end."""
    first = job.run_until(has_trained(4))
    job.oracle.is_disturbed = True
    assert job.judge(first) == []
    return job.run_until()


def test_recovery_of_all_that_was_acknowledged_is_accepted() -> None:
    with small_job() as job:
        start = recovered(job)
        assert job.judge(start) == []
        assert [life.outcome.iteration for life in start.lives if life.outcome] == [3, 3]


def test_another_digest_is_a_violation() -> None:
    with small_job() as job:
        start = recovered(job)
        start.lives[1].digests[5] = "another"
        assert job.judge(start) == ["start 1: rank 1 has a wrong state at iteration 5"]


def test_state_older_than_the_acknowledged_one_is_a_violation() -> None:
    with small_job() as job:
        start = recovered(job)
        life = start.lives[0]
        assert life.outcome is not None
        life.outcome = replace(life.outcome, iteration=2)
        assert job.judge(start) == [
            "start 1: rank 0 recovered iteration 2, and 3 was acknowledged",
            "start 1: rank 0 recovered iteration 2, and 3 is the newest that is left",
        ]


def test_refusal_of_intact_state_is_a_violation() -> None:
    with small_job() as job:
        start = recovered(job)
        start.lives[0].outcome = None
        start.lives[0].error = UnrecoverableError("nothing")
        assert job.judge(start) == [
            "start 1: rank 0 ended with UnrecoverableError: nothing; but iteration 3 is intact"
        ]


def test_hang_is_a_violation() -> None:
    with small_job() as job:
        job.oracle.before_start()
        start = job.start()
        (violation,) = job.judge(start, has_ended=False)
        assert violation.startswith("start 0: hangs: ")
        job.kill(start)
