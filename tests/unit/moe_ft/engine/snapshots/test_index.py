"""The index of a window after each of its snapshots: units, weights, records, and tensors that are absent."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ft.engine.snapshots.index import RecordLog
from tests.unit.moe_ft.builders import make_record
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    DEADLINE_S,
    EMBEDDING,
    EXPERTS,
    FIRST_ITERATION,
    LENGTH,
    Trainer,
)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.writer.close(DEADLINE_S)


def test_index_names_by_snapshot_the_weights_of_units_that_come_later(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        compute = trainer.index().compute
        names = [[EXPERTS[2], EMBEDDING], [EMBEDDING], []][: position + 1]
        assert [sorted(units) for units in compute] == [sorted(each) for each in names]
        for number, units in enumerate(compute):
            assert {unit.level for unit in units.values()} <= {"compute"}
            assert {unit.iteration for unit in units.values()} <= {FIRST_ITERATION + number}


def test_moments_that_do_not_exist_yet_are_marked_where_they_would_be(trainer: Trainer) -> None:
    request = trainer.request(0)
    for local in trainer.state.parameters:
        local.optimizer.optimizer.state.clear()
    trainer.run(request)
    absent = {
        (each.key, each.is_absent)
        for unit in trainer.index().units.values()
        for each in unit.tensors
    }
    assert absent == {("param", False), ("exp_avg", True), ("exp_avg_sq", True)}


def test_moments_that_come_up_in_a_window_are_absent_only_before(trainer: Trainer) -> None:
    request = trainer.request(0)
    for local in trainer.state.parameters:
        local.optimizer.optimizer.state.clear()
    trainer.run(request)
    trainer.take(1)
    units = trainer.index().units
    assert any(each.is_absent for each in units[EXPERTS[0]].tensors)
    assert not any(each.is_absent for each in units[EXPERTS[2]].tensors)


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


def test_record_is_encoded_once_however_often_it_is_read() -> None:
    log = Log()
    for iteration in (4, 5, 6):
        log.add(iteration)
        log.read(4, iteration)
    assert log.encoded == [4, 5, 6]
