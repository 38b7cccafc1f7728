"""Reports from any thread, in order and with tracebacks, and what a user is told of them."""

import threading
from typing import Any

import pytest

from moe_ft.engine.background import BackgroundPart, Messages, Report, Reports, describe
from moe_ft.engine.clock import Clock
from moe_ft.engine.snapshots.profile import SnapshotProfile
from moe_ft.errors import DegradedError
from tests.unit.moe_ft.engine.stand_ins import ManualClock


def test_reports_are_handed_over_once_and_in_order() -> None:
    reports = Reports()
    reports.add("snapshot", 5, bytes=7)
    reports.skipped(BackgroundPart.SNAPSHOT, 6, "no room")
    found = [(each.event, each.iteration, each.fields) for each in reports.drain()]
    assert found == [
        ("snapshot", 5, {"bytes": 7}),
        ("skipped", 6, {"part": "snapshot", "reason": "no room"}),
    ]
    assert reports.drain() == []


def test_failure_keeps_the_traceback_of_what_was_raised() -> None:
    reports = Reports()
    with reports.catching(BackgroundPart.MEMORY, 5):
        raise ValueError("two\nlines")
    (report,) = reports.drain()
    assert (report.event, report.iteration) == ("degraded", 5)
    assert report.fields["part"] == "memory"
    assert report.fields["reason"] == "ValueError: two lines"
    assert 'raise ValueError("two\\nlines")' in report.fields["traceback"]


def test_failure_without_an_exception_has_no_traceback() -> None:
    reports = Reports()
    reports.degraded(BackgroundPart.PERSIST, 5, "no room")
    assert reports.drain()[0].fields == {"part": "persist", "reason": "no room"}


def test_what_is_to_be_done_after_a_failure_is_done_only_then() -> None:
    reports, done = Reports(), list[str]()
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
    reports = Reports()

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


def test_parts_are_named_as_in_the_event_log() -> None:
    expected = "snapshot replicate persist writer memory boundary-log agreement peer-server"
    assert [part.value for part in BackgroundPart] == expected.split()


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


def drained(told: Messages) -> list[Report]:
    found: list[Report] = []
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
        "moe_ft: rank 3, iteration 1: persist: no room",
        "moe_ft: rank 3, iteration 3: persist: no room",
    ]


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

    def log(report: Report) -> None:
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


def test_failure_is_no_error_when_nobody_reads_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("moe_ft.engine.background.print", write, raising=False)
    told = of_rank()
    told.reports.degraded(BackgroundPart.PERSIST, 1, "no room")
    assert len(drained(told)) == 1


def test_failure_ends_training_if_that_is_asked_for_and_is_logged_before() -> None:
    told, found = of_rank(raises=True), list[Report]()
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
