"""Second count of lost tokens, of a real recovery and with a wrong sum."""

from dataclasses import replace
from typing import Any

from tests.simulation.job import Start
from tests.simulation.lossy import Recount
from tests.unit.simulation.small_job import SmallJob, has_trained, small_job

PARTIAL: dict[str, Any] = {
    "strategy": "partial",
    "options": {"k_snapshot": "1", "k_persist": 1, "selection": "sequential"},
}


def recovered(job: SmallJob) -> tuple[Start, Start]:
    first = job.run_until(has_trained(5))
    second = job.run_until()
    assert all(life.outcome is not None and life.outcome.loss for life in second.lives)
    return first, second


def test_right_sum_of_lost_tokens_is_accepted() -> None:
    with small_job(**PARTIAL) as job:
        first, second = recovered(job)
        recount = Recount(job.setup.shape)
        assert list(recount.check(first.lives)) == []
        assert list(recount.check(second.lives)) == []
        assert any(recount.missing.values())


def test_wrong_sum_of_lost_tokens_is_a_violation() -> None:
    with small_job(**PARTIAL) as job:
        first, second = recovered(job)
        recount = Recount(job.setup.shape)
        assert list(recount.check(first.lives)) == []
        outcome: Any = second.lives[0].outcome
        total = outcome.loss.total_lost_tokens
        wrong = replace(outcome.loss, total_lost_tokens=total + 1)
        second.lives[0].outcome = replace(outcome, loss=wrong)
        assert list(recount.check(second.lives)) == [
            f"said that {total + 1} tokens are lost, and {total} are"
        ]
