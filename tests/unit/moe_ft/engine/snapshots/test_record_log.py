"""The log of records: completed once, encoded once, kept as long as a window needs them."""

from types import SimpleNamespace
from typing import Any

import pytest

from moe_ft.engine.snapshots.record_log import RecordLog
from tests.unit.moe_ft.builders import make_record


def captured(iteration: int) -> Any:
    return SimpleNamespace(iteration=iteration, is_complete=False)


class Log(RecordLog):
    """A log that notes what it encodes."""

    def __init__(self) -> None:
        self.encoded: list[int] = []
        super().__init__(self._mark, self._note)

    def _mark(self, record: Any) -> None:
        record.is_complete = True

    def _note(self, record: Any) -> Any:
        assert record.is_complete
        self.encoded.append(record.iteration)
        return make_record(record.iteration)

    def add(self, iteration: int) -> None:
        """Add a record and complete it."""
        self.append(iteration, captured(iteration))
        self.complete(iteration)


def test_window_reads_the_records_of_its_iterations_in_order() -> None:
    log = Log()
    for iteration in (3, 4, 5, 6):
        log.add(iteration)
    assert log.read(4, 6) == tuple(make_record(each) for each in (4, 5, 6))


def test_record_is_encoded_once_however_often_it_is_read() -> None:
    log = Log()
    for iteration in (4, 5, 6):
        log.add(iteration)
        log.read(4, iteration)
    assert log.encoded == [4, 5, 6]


def test_record_that_is_taken_again_replaces_the_first_one() -> None:
    log = Log()
    log.add(4)
    log.read(4, 4)
    log.add(4)
    log.read(4, 4)
    assert log.encoded == [4, 4]


def test_records_that_no_window_needs_are_forgotten() -> None:
    log = Log()
    for iteration in range(3, 9):
        log.add(iteration)
    log.trim(5, 7)
    assert log.iterations == [5, 6, 7]
    with pytest.raises(KeyError):
        log.read(4, 5)


def test_log_without_a_complete_window_keeps_nothing() -> None:
    log = Log()
    log.add(3)
    log.trim(0, -1)
    assert log.iterations == []
