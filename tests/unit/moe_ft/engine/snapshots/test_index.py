"""The index of a window after each of its snapshots: units, weights, records, and tensors that are absent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.moe_ft.builders import make_record
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    COMPLETE,
    DEADLINE_S,
    EMBEDDING,
    EXPERTS,
    FAILED,
    FIRST_ITERATION,
    LENGTH,
    Trainer,
    fail_at,
)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.writer.close(DEADLINE_S)


def test_index_has_the_snapshots_that_were_taken_so_far(trainer: Trainer) -> None:
    found = []
    for position in range(LENGTH):
        assert trainer.take(position) is COMPLETE
        index = trainer.index()
        found.append((index.iteration, index.num_snapshots, index.window, index.is_whole))
    assert found == [(5, 1, 3, False), (6, 2, 3, False), (7, 3, 3, True)]


def test_index_names_each_unit_at_full_with_the_iteration_of_its_snapshot(trainer: Trainer) -> None:
    expected: dict[str, int] = {}
    for position, names in enumerate([EXPERTS[:2], EXPERTS[2:], [EMBEDDING]]):
        trainer.take(position)
        expected |= dict.fromkeys(names, FIRST_ITERATION + position)
        units = trainer.index().units
        assert {name: unit.iteration for name, unit in units.items()} == expected
        assert {unit.level for unit in units.values()} == {"full"}


def test_index_names_by_snapshot_the_weights_of_units_that_come_later(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        compute = trainer.index().compute
        names = [[EXPERTS[2], EMBEDDING], [EMBEDDING], []][: position + 1]
        assert [sorted(units) for units in compute] == [sorted(each) for each in names]
        for number, units in enumerate(compute):
            assert {unit.level for unit in units.values()} <= {"compute"}
            assert {unit.iteration for unit in units.values()} <= {FIRST_ITERATION + number}


def test_index_has_the_records_of_all_snapshots(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        expected = [make_record(FIRST_ITERATION + each) for each in range(position + 1)]
        assert list(trainer.index().records) == expected


def test_window_of_one_snapshot_is_whole_at_once_and_has_no_weights(trainer: Trainer) -> None:
    trainer.take(0, length=1)
    index = trainer.index()
    assert (index.window, index.num_snapshots, index.compute) == (1, 1, ())
    assert {unit.iteration for unit in index.units.values()} == {FIRST_ITERATION}


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


@pytest.mark.parametrize("region", [0, 1])
def test_second_window_has_nothing_of_the_first(trainer: Trainer, region: int) -> None:
    for position in range(LENGTH):
        trainer.take(position)
    for position in range(LENGTH):
        trainer.take(position, first=8, region=region)
        index = trainer.index(region)
        assert [record.iteration for record in index.records] == [8, 9, 10][: position + 1]
        assert all(trainer.holds(entry, name, region) for name, entry in index.entries())


@pytest.mark.parametrize("position", [0, 1])
def test_snapshots_after_one_that_failed_fail_too(trainer: Trainer, position: int) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + position)
    for each in range(position + 1):
        trainer.take(each)
    trainer.reasons()
    for each in range(position + 1, LENGTH):
        assert trainer.take(each) is FAILED
        (reason,) = trainer.reasons()
        assert reason.endswith("the snapshot before it in its window has failed")


def test_snapshot_without_the_ones_before_it_fails(trainer: Trainer) -> None:
    assert trainer.take(1) is FAILED
    (reason,) = trainer.reasons()
    assert reason == "SnapshotError: the snapshot before it in its window has failed"


def test_snapshot_that_skips_one_fails(trainer: Trainer) -> None:
    trainer.take(0)
    assert trainer.take(2) is FAILED
    assert trainer.index().num_snapshots == 1
