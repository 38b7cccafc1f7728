"""Reports from any thread, in order and with tracebacks, and what a user is told of them."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from moe_ft.engine.background import (
    BackgroundPart,
    EngineEvent,
    EventQueue,
    Messages,
    ThreadWorker,
    describe,
)
from moe_ft.engine.clock import Clock
from moe_ft.engine.snapshots.profile import SnapshotProfile
from moe_ft.errors import DegradedError
from tests.unit.moe_ft.engine.stand_ins import ManualClock
from tests.waiting import wait_for


def test_reports_are_handed_over_once_and_in_order() -> None:
    reports = EventQueue()
    reports.add("snapshot", 5, bytes=7)
    reports.skipped(BackgroundPart.SNAPSHOT, 6, "no room")
    found = [(each.event, each.iteration, each.fields) for each in reports.drain()]
    assert found == [
        ("snapshot", 5, {"bytes": 7}),
        ("skipped", 6, {"part": "snapshot", "reason": "no room"}),
    ]
    assert reports.drain() == []


def test_failure_keeps_the_traceback_of_what_was_raised() -> None:
    reports = EventQueue()
    with reports.catching(BackgroundPart.MEMORY, 5):
        raise ValueError("two\nlines")
    (report,) = reports.drain()
    assert (report.event, report.iteration) == ("degraded", 5)
    assert report.fields["part"] == "memory"
    assert report.fields["reason"] == "ValueError: two lines"
    assert 'raise ValueError("two\\nlines")' in report.fields["traceback"]


def test_what_is_to_be_done_after_a_failure_is_done_only_then() -> None:
    reports, done = EventQueue(), list[str]()
    with reports.catching(BackgroundPart.SNAPSHOT, 5, lambda: done.append("well")):
        pass
    assert done == []
    with reports.catching(BackgroundPart.SNAPSHOT, 6, lambda: done.append("badly")):
        raise OSError
    assert done == ["badly"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("a\n  b"), "ValueError: a b"),
        (KeyError("x"), "KeyError: 'x'"),
        (OSError(), "OSError"),
    ],
)
def test_exception_is_described_on_one_line(error: Exception, expected: str) -> None:
    assert describe(error) == expected


def test_nothing_is_lost_when_many_threads_report() -> None:
    reports = EventQueue()

    def report(thread: int) -> None:
        for number in range(200):
            reports.add("event", number, thread=thread)

    threads = [threading.Thread(target=report, args=(each,)) for each in range(4)]
    for each in threads:
        each.start()
    found = []
    while any(each.is_alive() for each in threads):
        found += reports.drain()
    found += reports.drain()
    for thread in range(4):
        own = [each.iteration for each in found if each.fields["thread"] == thread]
        assert own == list(range(200))


MIB = 2**20
HINT = "More ranks make them smaller."


def of_rank(
    rank: int = 0,
    *,
    is_first_of_stage: bool = True,
    raises: bool = False,
    clock: Clock | None = None,
) -> Messages:
    return Messages(rank, clock or Clock(), is_first_of_stage=is_first_of_stage, raises=raises)


def drained(told: Messages) -> list[EngineEvent]:
    found: list[EngineEvent] = []
    told.drain(found.append)
    return found


def slow_profile() -> SnapshotProfile:
    """Return that a MiB takes a second, in iterations of two seconds with one of forward and backward."""
    profile = SnapshotProfile()
    for _ in range(3):
        profile.note_iteration(2.0)
        profile.note_forward_backward(1.0)
    profile.note(MIB, 1.0, 1.0, 0.0)
    return profile


def facts(length: int = 2, largest: int = 3 * MIB, **own: Any) -> dict[str, Any]:
    return {"length": length, "bytes": [MIB, 2 * MIB], "largest_bytes": largest, **own}


def test_failure_is_logged_each_time_and_printed_once_in_a_while(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = ManualClock()
    told = of_rank(3, clock=clock)
    for iteration in (1, 2):
        told.reports.degraded(BackgroundPart.PERSIST, iteration, "no room")
        assert [report.iteration for report in drained(told)] == [iteration]
    clock.now = 60.0
    told.reports.degraded(BackgroundPart.PERSIST, 3, "no room")
    drained(told)
    assert capsys.readouterr().err.splitlines() == [
        "WARNING moe_ft: rank 3, iteration 1: persist: no room",
        "WARNING moe_ft: rank 3, iteration 3: persist: no room",
    ]


def test_accused_rank_has_a_line_if_it_is_this_one_or_accused_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = of_rank(3)
    facts = {"where": "rank 3: unit embedding", "reason": "its two tries differ"}
    for ranks, decided, times in (
        ([3, 7], False, 0),
        ([7], True, 1),
        ([7], True, 2),
        ([3], True, 1),
    ):
        told.reports.add("corruption", 5, ranks=ranks, decided=decided, times=times, **facts)
        drained(told)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "WARNING moe_ft: rank 3, iteration 5: rank 7 computes or keeps wrong bits (rank 3: unit embedding; "
        "its two tries differ), found 2 times so far. Training goes on: exclude its node"
    )
    assert "rank 3 computes or keeps wrong bits" in second


def test_every_failure_at_the_end_of_training_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = of_rank()
    for _ in range(2):
        told.reports.degraded(BackgroundPart.PERSIST, 6, "no room")
        told.drain(lambda report: None, is_ending=True)
    assert capsys.readouterr().err.count("iteration 6: persist: no room") == 2


def test_event_that_cannot_be_logged_costs_only_itself(capsys: pytest.CaptureFixture[str]) -> None:
    told, found = of_rank(), list[str]()

    def log(report: EngineEvent) -> None:
        if report.event == "snapshot":
            raise ConnectionError("the logging service is away")
        found.append(report.event)

    told.reports.add("snapshot", 1)
    told.reports.add("persist", 1)
    told.drain(log)
    assert found == ["persist"]
    assert "log: event snapshot: ConnectionError: the logging service is away" in (
        capsys.readouterr().err
    )


def test_failure_ends_training_if_that_is_asked_for_and_is_logged_before() -> None:
    told, found = of_rank(raises=True), list[EngineEvent]()
    told.reports.add("snapshot", 1)
    told.drain(found.append)
    told.reports.degraded(BackgroundPart.PERSIST, 2, "no room")
    with pytest.raises(DegradedError, match="iteration 2: persist: no room"):
        told.drain(found.append)
    assert [report.event for report in found] == ["snapshot", "degraded"]


def test_window_is_logged_with_the_stall_of_this_ranks_largest_snapshot() -> None:
    told = of_rank()
    told.tell_window(7, facts(reordered=True), slow_profile(), HINT)
    (report,) = drained(told)
    assert (report.event, report.iteration) == ("window", 7)
    assert report.fields == facts(reordered=True) | {"expected_stall_s": pytest.approx(1.0)}


def test_stall_of_the_stages_largest_snapshot_is_printed_once_for_each_length(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = of_rank(4)
    for length in (2, 2, 3):
        told.tell_window(7, facts(length), slow_profile(), HINT)
    first, second = capsys.readouterr().err.splitlines()
    assert "rank 4: windows of 2 snapshots with up to 3.0 MiB" in first
    assert "about 2.000 s of 2.000 s" in first
    assert first.endswith(HINT)
    assert "windows of 3 snapshots" in second


DEADLINE_S = 120.0


@pytest.fixture
def worker() -> Iterator[ThreadWorker]:
    worker = ThreadWorker("test")
    worker.start()
    yield worker
    worker.close(DEADLINE_S)


def test_work_is_done_in_the_order_of_its_submission(worker: ThreadWorker) -> None:
    done: list[int] = []
    futures = [worker.submit(lambda each=each: done.append(each)) for each in range(20)]
    futures[-1].result(DEADLINE_S)
    assert done == list(range(20))


def test_result_and_exception_are_those_of_the_work(worker: ThreadWorker) -> None:
    assert worker.submit(lambda: 7).result(DEADLINE_S) == 7
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(DEADLINE_S)
    assert worker.submit(lambda: 8).result(DEADLINE_S) == 8


def test_idle_work_is_done_when_nothing_else_comes(worker: ThreadWorker) -> None:
    done = threading.Event()
    worker.submit(lambda: worker.when_idle(0.01, done.set))
    assert done.wait(DEADLINE_S)


def test_idle_work_may_ask_for_more_of_it(worker: ThreadWorker) -> None:
    done: list[None] = []

    def again() -> None:
        done.append(None)
        worker.when_idle(0.01, again)

    worker.submit(again)
    wait_for(lambda: len(done) > 3, "idle work to be repeated")


def test_idle_work_is_forgotten_when_something_else_comes(worker: ThreadWorker) -> None:
    may_go_on, done = threading.Event(), list[str]()

    def ask() -> None:
        worker.when_idle(0.01, lambda: done.append("idle"))
        may_go_on.wait(DEADLINE_S)

    worker.submit(ask)
    last = worker.submit(lambda: done.append("work"))
    may_go_on.set()
    last.result(DEADLINE_S)
    worker.close(DEADLINE_S)
    assert done == ["work"]


def test_worker_that_hangs_is_left_after_the_timeout_and_its_work_stays_undone() -> None:
    worker, may_end = ThreadWorker("test"), threading.Event()
    worker.start()
    stuck = worker.submit(lambda: may_end.wait(DEADLINE_S))
    worker.close(0.01)
    assert not stuck.done()
    may_end.set()
    assert stuck.result(DEADLINE_S)


def test_worker_that_was_never_started_can_be_closed() -> None:
    ThreadWorker("test").close(DEADLINE_S)
