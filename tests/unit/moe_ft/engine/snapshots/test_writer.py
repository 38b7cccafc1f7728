"""Snapshots of a window, one after the other: the region and its index after each of them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch

from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import RecordLog
from moe_ft.engine.snapshots.job import SnapshotJob
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.errors import SnapshotError
from tests.unit.moe_ft.builders import make_record
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    DEADLINE_S,
    EMBEDDING,
    EXPERTS,
    FAILED,
    FIRST_ITERATION,
    LENGTH,
    NUM_ELEMENTS,
    Trainer,
    fail_at,
)
from tests.unit.moe_ft.format.test_checksums import meeting
from tests.unit.moe_ft.small_rank import window_plan
from tests.waiting import wait_for


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.writer.close(DEADLINE_S)


# A window of three snapshots: experts 0 and 1, expert 2, the embedding


def test_every_version_in_a_window_is_the_state_of_its_iteration(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        entries = list(trainer.index().entries())
        assert len(entries) == [4, 6, 7][position]
        assert all(trainer.holds(entry, name) for name, entry in entries)


def test_region_is_a_valid_file_after_every_snapshot(trainer: Trainer) -> None:
    trainer.layouts[LENGTH] = full_size(trainer)
    for position in range(LENGTH):
        trainer.take(position)
        found = dict(safetensors.deserialize(bytes(trainer.regions[0].mapping)))  # type: ignore[no-untyped-call]
        assert f"{EMBEDDING}/full/{EMBEDDING}.weight[0:9]/param" in found


def test_units_of_a_snapshot_are_hashed_by_several_threads(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = meeting(monkeypatch, 2)
    trainer.take(0)  # experts 0 and 1, and the weights of the two other units
    assert len(threads) > 1
    assert all(trainer.holds(entry, name) for name, entry in trainer.index().entries())


def full_size(trainer: Trainer) -> FileLayout:
    """Return the layout of a window in a region that is larger than the window."""
    layouts = UnitLayouts(trainer.catalog, 0)
    layouts.region_bytes = trainer.regions[0].num_bytes
    return layouts.lay_out(window_plan(LENGTH))


def test_snapshot_writes_nothing_outside_of_its_stretch(trainer: Trainer) -> None:
    trainer.take(0)
    for position in (1, 2):
        request = trainer.request(position)
        start, end = request.stretch
        before = bytes(trainer.regions[0].mapping)
        trainer.run(request)
        after = bytes(trainer.regions[0].mapping)
        assert (after[:start], after[end:]) == (before[:start], before[end:])
        assert after[start:end] != before[start:end]


def test_snapshot_is_reported_with_its_bytes_and_levels(trainer: Trainer) -> None:
    for position in range(2):
        trainer.take(position)
    first, second = trainer.reports.drain()
    assert (first.event, first.iteration, second.iteration) == ("snapshot", 5, 6)
    assert first.fields["level"] == {"full": 2, "compute": 2}
    assert second.fields["level"] == {"full": 1, "compute": 1}
    assert [each.fields["experts"]["layer.0"] for each in (first, second)] == [[0, 1], [2]]
    assert first.fields["num_units"] == 4
    places = trainer.layout(LENGTH).snapshots[0]
    assert first.fields["bytes"] == sum(place.num_bytes for place in places)


# Windows one after the other


# Snapshots that fail


@pytest.mark.parametrize("position", [0, 1])
def test_snapshot_that_took_too_long_is_not_committed(trainer: Trainer, position: int) -> None:
    for each in range(position):
        trainer.take(each)
    may_give_up, jobs = threading.Event(), list[SnapshotJob]()

    def give_up(iteration: int) -> None:
        assert may_give_up.wait(DEADLINE_S)
        jobs[0].abandoned.set()

    trainer.hook = give_up
    jobs.append(trainer.submit(trainer.request(position)))
    may_give_up.set()
    wait_for(lambda: jobs[0].state is FAILED, "the snapshot to fail")
    assert trainer.reasons() == ["SnapshotError: the copy took longer than the fence waits"]
    assert trainer.regions[0].index_path.exists() == (position > 0)
    trainer.hook = lambda iteration: None
    assert trainer.take(position + 1) is FAILED


def test_copy_that_fails_lets_the_optimizer_step(trainer: Trainer) -> None:
    trainer.hook = fail_at(FIRST_ITERATION)
    assert trainer.run(trainer.request(0)).copied.is_set()


@pytest.fixture
def copier(trainer: Trainer) -> StateCopier:
    copier = StateCopier(trainer.state.parameters, None, 0)
    copier.start()
    return copier


def copied(trainer: Trainer, copier: StateCopier, **which: int) -> list[torch.Tensor]:
    """Copy a snapshot and return all tensors of its places."""
    request = trainer.request(0, **which)
    copier.copy(request, None, lambda: None, lambda: None)
    return [
        torch.frombuffer(
            request.region.mapping,
            dtype=torch.bfloat16 if tensor.dtype == "BF16" else torch.float32,
            count=NUM_ELEMENTS,
            offset=place.offset + tensor.offset,
        )
        for place in request.places
        for tensor in place.tensors
    ]


def expected(trainer: Trainer, iteration: int) -> list[float]:
    return [
        trainer.state.value(str(place.unit), tensor.key, iteration)
        for place in trainer.layout(3).snapshots[0]
        for tensor in place.tensors
    ]


def test_moment_that_was_replaced_is_followed(trainer: Trainer, copier: StateCopier) -> None:
    copied(trainer, copier)
    found = copied(trainer, copier, first=FIRST_ITERATION + 3)  # `train` makes other moments
    assert [each[0].item() for each in found] == expected(trainer, FIRST_ITERATION + 3)


def test_others_are_called_in_the_middle_and_at_the_end(
    trainer: Trainer, copier: StateCopier
) -> None:
    request = trainer.request(0)
    tensors = [(place, each) for place in request.places for each in place.tensors]
    copied_then: list[list[bool]] = []

    def look() -> None:
        content = request.region.mapping
        zero = bytes(4)
        starts = [place.offset + each.offset for place, each in tensors]
        copied_then.append([content[start : start + 4] != zero for start in starts])

    copier.copy(request, None, look, look)
    half, whole = copied_then
    assert half.count(True) == len(tensors) // 2
    assert all(whole)


def test_copy_that_outlives_the_memory_of_its_start_writes_where_nobody_reads(
    trainer: Trainer, copier: StateCopier
) -> None:
    request = trainer.request(0)
    copier.copy(request, None, lambda: None, lambda: None)
    request.region.close()
    assert str(request.region.data_path) in Path("/proc/self/maps").read_text()
    copier.copy(request, None, lambda: None, lambda: None)


def test_tensor_of_another_type_is_an_error_with_both_types(
    trainer: Trainer, copier: StateCopier
) -> None:
    request = trainer.request(0)
    local = trainer.state.parameters[0]
    state = local.optimizer.optimizer.state[local.master]
    state["exp_avg"] = torch.zeros(NUM_ELEMENTS, dtype=torch.float16)
    with pytest.raises(SnapshotError, match=r"is torch\.float16, expected torch\.float32"):
        copier.copy(request, None, lambda: None, lambda: None)


def test_index_names_by_snapshot_the_weights_of_units_that_come_later(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        compute = trainer.index().compute
        names = [[EXPERTS[2], EMBEDDING], [EMBEDDING], []][: position + 1]
        assert [sorted(units) for units in compute] == [sorted(each) for each in names]
        for number, units in enumerate(compute):
            assert {unit.level for unit in units.values()} <= {"compute"}
            assert {unit.iteration for unit in units.values()} <= {FIRST_ITERATION + number}


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
