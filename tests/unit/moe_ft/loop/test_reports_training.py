"""Rank 0 reports once that its start trains, where dead ranks are not replaced: restarts count by it."""

import os
import signal
from collections.abc import Iterator

import pytest

from moe_ft.cluster import job_store
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member, become_member
from moe_ft.cluster.rounds import Mark, Rounds
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.loop.listeners import EndedIteration, LoopState
from moe_ft.loop.reports_training import ReportsTraining

TOKEN = "the token of this start: 32 bytes"[:32]
ENDED = EndedIteration(iteration=1, losses={}, is_skipped=False, num_samples=4, seconds=1.0)


@pytest.fixture
def assignment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Assignment]:
    """Yield the assignment of rank 0 in start 3, while an agent has its job's store kept."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    listener = job_store.listen_at(("127.0.0.1", 0), is_alone=True)
    place = listener.getsockname()[:2]
    server = os.fork()
    if server == 0:
        job_store.serve(listener, "run", TOKEN, 2)
    listener.close()
    shared = {"rank": 0, "local_rank": 0, "world_size": 2, "node": "node"}
    yield Assignment(**shared, start=3, meet=place, token=TOKEN)  # type: ignore[arg-type]
    become_member(None)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def rounds_of(assignment: Assignment) -> Rounds:
    """Return what the coordinator reads."""
    store = job_store.reach(assignment.meet, "run", TOKEN, assignment.start, 10.0)
    return Rounds(SignedStore(store, lambda: TOKEN), 0, 2)


def test_first_finished_iteration_is_reported_and_that_nothing_is_repaired(
    assignment: Assignment,
) -> None:
    rounds = rounds_of(assignment)
    become_member(None, assignment)
    ReportsTraining(LoopState(), rank=1).after_iteration(ENDED)
    assert not rounds.has(Mark.FINISHED)
    listener = ReportsTraining(LoopState(), rank=0)
    listener.after_iteration(ENDED)
    assert rounds.has(Mark.FINISHED) and rounds.has(Mark.NOT_IN_PLACE)
    become_member(None, Assignment(rank=0, local_rank=0, world_size=2, node="", meet=("gone", 1)))
    listener.after_iteration(ENDED)  # it asks nobody again


def test_job_whose_ranks_are_replaced_reports_it_elsewhere(assignment: Assignment) -> None:
    rounds, loop = rounds_of(assignment), LoopState()
    become_member(Member(assignment), assignment)
    ReportsTraining(loop, rank=0).after_iteration(ENDED)
    assert not rounds.has(Mark.FINISHED) and not rounds.has(Mark.NOT_IN_PLACE)
    loop.no_repair = "--async-save"
    ReportsTraining(loop, rank=0).after_iteration(ENDED)
    assert rounds.has(Mark.FINISHED) and rounds.has(Mark.NOT_IN_PLACE)


def test_rank_without_an_agent_or_its_store_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    become_member(None)
    ReportsTraining(LoopState(), rank=0).after_iteration(ENDED)
    monkeypatch.setattr("moe_ft.loop.reports_training._REACH_S", 0.0)
    gone = Assignment(rank=0, local_rank=0, world_size=2, node="", meet=("127.0.0.1", 1))
    become_member(None, gone)
    ReportsTraining(LoopState(), rank=0).after_iteration(ENDED)
    become_member(None)
