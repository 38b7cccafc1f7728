"""Reports of ranks in the job's store: their failures, what follows those, and that a start trains."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_ft.cluster import failures, job_store
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.failures import Consequence, FailureNotes, Reported, left_out_by, report_failure
from moe_ft.cluster.member import Member, become_member
from moe_ft.cluster.rounds import RoundMark, Rounds
from moe_ft.loop.listeners import EndedIteration, LoopState
from moe_ft.loop.progress import ReportsTraining
from moe_ft.verdicts import LIKELY_AGAIN, Failure, FailureKind
from tests.unit.signed import LookedAt, signed

TOKEN = "the token of this start: 32 bytes"[:32]
FAILURE = Failure(rank=1, kind=FailureKind.DATA, what="ValueError: X", iteration=3, time_s=5.0)


@pytest.fixture
def assignment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Assignment]:
    """Yield the assignment of rank 1 in start 3, while an agent has its job's store kept."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    listener = job_store.listen_at(("127.0.0.1", 0), is_alone=True)
    place = listener.getsockname()[:2]
    server = os.fork()
    if server == 0:
        job_store.serve(listener, "run", TOKEN, 2)
    listener.close()
    yield Assignment(rank=1, local_rank=0, world_size=2, node="b", start=3, meet=place, token=TOKEN)
    become_member(None)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)


def test_each_failure_is_read_once_and_in_order() -> None:
    store = signed()
    read = Reported(store)
    assert read.new() == ()
    other = Failure(rank=0, kind=FailureKind.NETWORK, what="Y", iteration=3)
    for each in (FAILURE, other):
        Reported(store).add(each)
    assert read.new() == (FAILURE, other)
    assert read.new() == ()
    Reported(store).add(FAILURE)
    assert read.new() == (FAILURE,)


def test_rank_reports_its_node_and_of_others_what_it_knows(assignment: Assignment) -> None:
    other = Failure(rank=0, kind=FailureKind.CORRUPTION, what="sums", iteration=3, time_s=6.0)
    report_failure(assignment, FAILURE)
    Member(assignment).report_failure(other)
    mine, others = Reported(job_store.reach_own(assignment, 10.0)).new()
    assert (mine.rank, mine.node, mine.what) == (1, "b", "ValueError: X")
    assert others == other


def test_rank_whose_store_is_gone_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures, "_REACH_S", 0.1)
    report_failure(
        Assignment(rank=1, local_rank=0, world_size=2, node="b", meet=("127.0.0.1", 1)), FAILURE
    )
    assert "rank 1 has not reported how it has failed" in capsys.readouterr().err


BAD = Failure(rank=1, kind=FailureKind.DATA, what="ValueError: sample 7", iteration=4)


def answers(*failures: Failure, room: int = 0) -> list[Consequence]:
    """Return what follows failures, each of a new process, if so many iterations may be left out."""
    store = LookedAt()

    def answer(failure: Failure) -> Consequence:
        notes = FailureNotes(signed(store))
        return notes.answer(failure, lambda: len(left_out_by(notes.left_out())) < room)

    return [answer(each) for each in failures]


def test_same_failure_is_repaired_once_and_others_are_repaired_again() -> None:
    others = [
        replace(BAD, rank=0),
        replace(BAD, iteration=5),
        replace(BAD, what="KeyError: 3"),
        replace(BAD, kind=FailureKind.CODE),
    ]
    found = answers(BAD, *others, BAD)
    assert found == [Consequence.REPLACE] * 5 + [Consequence.END]


def test_iteration_is_left_out_while_there_is_room_and_a_third_failure_in_it_ends_all() -> None:
    later = replace(BAD, iteration=6)
    found = answers(BAD, BAD, later, later, BAD, room=1)
    assert found == [
        Consequence.REPLACE,
        Consequence.LEAVE_OUT,
        Consequence.REPLACE,
        Consequence.END,
        Consequence.END,
    ]


def test_second_rank_that_fails_with_the_same_batch_needs_no_further_room() -> None:
    other = replace(BAD, rank=3)
    found = answers(BAD, other, BAD, other, room=1)
    assert found == [Consequence.REPLACE] * 2 + [Consequence.LEAVE_OUT] * 2


@pytest.mark.parametrize("kind", FailureKind)
def test_only_failures_of_batches_leave_iterations_out(kind: FailureKind) -> None:
    failure = replace(BAD, kind=kind)
    last = Consequence.LEAVE_OUT if kind in LIKELY_AGAIN else Consequence.END
    assert answers(failure, failure, room=9) == [Consequence.REPLACE, last]


def test_iterations_that_are_left_out_come_with_their_failures() -> None:
    store = LookedAt()
    for _ in range(2):
        FailureNotes(signed(store)).answer(BAD, lambda: True)
    assert left_out_by(FailureNotes(signed(store)).left_out()) == {4: BAD}


ENDED = EndedIteration(iteration=1, losses={}, is_skipped=False, num_samples=4, seconds=1.0)


def test_first_finished_iteration_is_reported_and_that_nothing_is_repaired(
    assignment: Assignment,
) -> None:
    rounds = Rounds(job_store.reach_own(assignment, 10.0), 1, 2)
    become_member(None, assignment)
    ReportsTraining(LoopState(), rank=1).after_iteration(ENDED)
    assert not rounds.has(RoundMark.FINISHED)
    listener = ReportsTraining(LoopState(), rank=0)
    listener.after_iteration(ENDED)
    assert rounds.has(RoundMark.FINISHED) and rounds.has(RoundMark.NOT_IN_PLACE)
    become_member(None, Assignment(rank=0, local_rank=0, world_size=2, node="", meet=("gone", 1)))
    listener.after_iteration(ENDED)  # it asks nobody again


def test_job_whose_ranks_are_replaced_reports_it_elsewhere(assignment: Assignment) -> None:
    rounds, loop = Rounds(job_store.reach_own(assignment, 10.0), 1, 2), LoopState()
    become_member(Member(assignment), assignment)
    ReportsTraining(loop, rank=0).after_iteration(ENDED)
    assert not rounds.has(RoundMark.FINISHED) and not rounds.has(RoundMark.NOT_IN_PLACE)
    loop.no_repair = "--async-save"
    ReportsTraining(loop, rank=0).after_iteration(ENDED)
    assert rounds.has(RoundMark.FINISHED) and rounds.has(RoundMark.NOT_IN_PLACE)


def test_rank_without_an_agent_or_its_store_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    become_member(None)
    ReportsTraining(LoopState(), rank=0).after_iteration(ENDED)
    monkeypatch.setattr("moe_ft.loop.progress._REACH_S", 0.0)
    gone = Assignment(rank=0, local_rank=0, world_size=2, node="", meet=("127.0.0.1", 1))
    become_member(None, gone)
    ReportsTraining(LoopState(), rank=0).after_iteration(ENDED)
    become_member(None)
