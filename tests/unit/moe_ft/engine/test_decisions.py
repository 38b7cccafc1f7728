"""What a rank votes and hears, and that it leaves without an exception when it no longer can."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from moe_ft.engine import decisions as decisions_file
from moe_ft.engine.background import Report, Reports
from moe_ft.engine.decisions import Decisions, Turn, Votes
from moe_ft.engine.snapshot_job import SnapshotState


def make_votes() -> Votes:
    return Votes(
        state=SnapshotState.COMPLETE,
        is_ready=True,
        is_idle=False,
        can_persist=True,
        is_protected=False,
        can_grow=True,
        turn=Turn.WAIT,
        strategy=[11, 12],
        tuner=[21],
    )


class Reduction:
    """All-reduces of a single rank, which fail from some call on."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.has_left = fails_at, False
        self._values: Any = None

    @property
    def is_under_way(self) -> bool:
        """Whether the result was not read."""
        return self._values is not None

    def begin(self, values: Any) -> None:
        """Keep the values."""
        if self.fails_at == "begin":
            raise RuntimeError("Connection closed by peer")
        self._values = values

    def result(self) -> Any:
        """Return the values."""
        if self.fails_at == "result":
            raise RuntimeError("Timed out")
        values, self._values = self._values, None
        return values

    def leave(self) -> None:
        """Note that the rank has left."""
        self.has_left, self._values = True, None


class Rank:
    """A rank that decides alone."""

    def __init__(self, agreement: Reduction, stage: Reduction | None = None) -> None:
        self._reports = Reports()
        self.decisions = Decisions(agreement, stage, self._reports)  # type: ignore[arg-type]

    def pass_iteration(self, iteration: int, tokens: torch.Tensor | None = None) -> Any:
        """Vote, and return what was decided."""
        self.decisions.begin_count(tokens, iteration)
        self.decisions.begin(make_votes, iteration)
        return self.decisions.read(iteration)

    def failures(self) -> Sequence[Report]:
        """Return what has failed since the last call."""
        return [report for report in self._reports.drain() if report.event == "degraded"]


def test_votes_come_back_as_they_went_in() -> None:
    votes = make_votes()
    assert votes.with_numbers(votes.as_numbers()) == votes


def test_least_votes_are_those_of_the_rank_that_is_behind() -> None:
    votes = make_votes()
    others = [0] * len(votes.as_numbers())
    least = votes.with_numbers(np.minimum(votes.as_numbers(), others).tolist())
    assert (least.state, least.turn) == (SnapshotState.RUNNING, Turn.GIVE_UP)
    assert not least.is_ready


@pytest.mark.parametrize("fails_at", ["begin", "result"])
@pytest.mark.parametrize("is_stage", [False, True])
def test_all_reduce_that_fails_makes_the_rank_leave_both_groups(
    fails_at: str, is_stage: bool
) -> None:
    agreement = Reduction("" if is_stage else fails_at)
    stage = Reduction(fails_at if is_stage else "")
    rank = Rank(agreement, stage)
    assert rank.pass_iteration(7, torch.ones(1, 2)) is None
    assert rank.decisions.is_off
    assert agreement.has_left
    assert stage.has_left
    (failure,) = rank.failures()
    assert (failure.fields["part"], failure.iteration) == ("agreement", 7)
    assert "checkpointing is off until the next start" in failure.fields["reason"]
    assert "RuntimeError" in failure.fields["traceback"]


def test_votes_that_cannot_be_made_make_the_rank_leave() -> None:
    rank = Rank(Reduction())
    rank.decisions.begin(lambda: 1 // 0, 7)  # type: ignore[arg-type, return-value]
    assert rank.decisions.is_off
    assert "ZeroDivisionError" in rank.failures()[0].fields["reason"]


def test_rank_that_has_left_says_so_again_every_few_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(decisions_file.time, "monotonic", lambda: now)
    rank = Rank(Reduction("begin"))
    rank.pass_iteration(7)
    rank.failures()
    now += 200.0
    rank.pass_iteration(8)
    assert not rank.failures()
    now += 200.0
    rank.pass_iteration(9)
    (reminder,) = rank.failures()
    assert (reminder.fields["part"], reminder.iteration) == ("agreement", 9)


def test_answer_of_what_succeeds_is_returned() -> None:
    rank = Rank(Reduction())
    assert rank.decisions.attempt(7, lambda: "done") == "done"
    assert not rank.decisions.is_off
