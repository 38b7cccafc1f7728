"""Reports: from any thread, in order, with the traceback of what was raised."""

import threading

import pytest

from moe_ft.engine.background import BackgroundPart, Reports, describe


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
