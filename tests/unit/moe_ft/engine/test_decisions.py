"""Votes of a rank, and its way out without an exception when it can no longer vote or hear."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.engine.background import EngineEvent, EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.decisions import Decisions, EndVote, Votes
from moe_ft.engine.snapshots.job import SnapshotState
from tests.unit.moe_ft.engine.stand_ins import ManualClock

FLAGS = ("is_ready", "is_idle", "can_persist", "is_protected", "can_grow")


def make_votes() -> Votes:
    return Votes(
        state=SnapshotState.COMPLETE,
        is_ready=True,
        is_idle=False,
        can_persist=True,
        is_protected=False,
        can_grow=True,
        turn=EndVote.WAIT,
        strategy=(11, 12),
        interval=(21,),
    )


class Reduction:
    """All-reduces of a single rank, which fail from some call on."""

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.has_left = fails_at, False
        self._values: Any = None

    @property
    def is_under_way(self) -> bool:
        """True if the result was not read."""
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

    def __init__(self, agreement: Any, stage: Any = None, clock: Clock | None = None) -> None:
        self._reports = EventQueue()
        self.decisions = Decisions(agreement, stage, self._reports, clock or Clock())

    def pass_iteration(self, iteration: int, tokens: torch.Tensor | None = None) -> Any:
        """Vote, and return what was decided."""
        self.decisions.begin_count(tokens, iteration)
        self.decisions.begin(make_votes, iteration)
        return self.decisions.read(iteration)

    def failures(self) -> Sequence[EngineEvent]:
        """Return what has failed since the last call."""
        return [report for report in self._reports.drain() if report.event == "degraded"]


NUMBERS = st.integers(-(2**63), 2**63 - 1)


def any_votes(num_strategy: int, num_interval: int) -> st.SearchStrategy[Votes]:
    """Return any votes of a job whose strategy and interval agree on this many numbers."""
    flags = {name: st.booleans() for name in FLAGS}
    return st.builds(
        Votes,
        state=st.sampled_from(SnapshotState),
        turn=st.sampled_from(EndVote),
        strategy=st.tuples(*[NUMBERS] * num_strategy),
        interval=st.tuples(*[NUMBERS] * num_interval),
        **flags,
    )


@given(st.data(), st.integers(0, 5), st.sampled_from([0, 3]))
def test_votes_come_back_as_they_went_in(
    data: st.DataObject, num_strategy: int, num_interval: int
) -> None:
    votes, form = (data.draw(any_votes(num_strategy, num_interval)) for _ in range(2))
    found = form.with_numbers(votes.as_numbers())
    assert found == votes
    assert [type(each) for each in astuple(found)] == [type(each) for each in astuple(votes)]


@given(st.lists(any_votes(2, 1), min_size=1, max_size=4))
def test_least_of_all_votes_is_the_least_in_each_field(ranks: list[Votes]) -> None:
    numbers = np.array([votes.as_numbers() for votes in ranks], dtype=np.int64)
    least = ranks[0].with_numbers(numbers.min(axis=0).tolist())
    for name in ("state", "turn", *FLAGS):
        assert getattr(least, name) == min(getattr(votes, name) for votes in ranks)
    for name in ("strategy", "interval"):
        columns = zip(*(getattr(votes, name) for votes in ranks), strict=True)
        assert getattr(least, name) == tuple(min(column) for column in columns)


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


def test_rank_that_has_left_says_so_again_every_few_minutes() -> None:
    clock = ManualClock(now=1000.0)
    rank = Rank(Reduction("begin"), clock=clock)
    rank.pass_iteration(7)
    rank.failures()
    clock.now += 200.0
    rank.pass_iteration(8)
    assert not rank.failures()
    clock.now += 200.0
    rank.pass_iteration(9)
    (reminder,) = rank.failures()
    assert (reminder.fields["part"], reminder.iteration) == ("agreement", 9)
