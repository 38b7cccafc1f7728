"""Failures that ranks report: the law reads each once, from ranks with and without an agent's repairs."""

import os
import signal
from collections.abc import Iterator

import pytest

from moe_ft.cluster import job_store, reported
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.cluster.reported import Reported, report_failure
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.verdicts import Failure, FailureKind
from tests.unit.signed import signed

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
    store = job_store.reach(assignment.meet, "run", TOKEN, 3, 10.0)
    mine, others = Reported(SignedStore(store, lambda: TOKEN)).new()
    assert (mine.rank, mine.node, mine.what) == (1, "b", "ValueError: X")
    assert others == other


def test_rank_whose_store_is_gone_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reported, "_REACH_S", 0.1)
    report_failure(
        Assignment(rank=1, local_rank=0, world_size=2, node="b", meet=("127.0.0.1", 1)), FAILURE
    )
    assert "rank 1 has not reported how it has failed" in capsys.readouterr().err
