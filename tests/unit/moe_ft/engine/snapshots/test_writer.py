"""Snapshots of a window, one after the other: the region and its index after each of them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch

from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.snapshots.job import SnapshotJob
from moe_ft.engine.snapshots.windows import UnitLayouts
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    DEADLINE_S,
    EMBEDDING,
    FAILED,
    FIRST_ITERATION,
    LENGTH,
    NUM_ELEMENTS,
    Trainer,
    fail_at,
)
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


def test_tensor_of_another_type_than_at_start_fails(trainer: Trainer) -> None:
    request = trainer.request(0)
    local = trainer.state.parameters[0]
    local.optimizer.optimizer.state[local.master]["exp_avg"] = torch.zeros(
        NUM_ELEMENTS, dtype=torch.float16
    )
    assert trainer.run(request).state is FAILED
    (reason,) = trainer.reasons()
    assert f"{local.name}/exp_avg is torch.float16, expected torch.float32" in reason


def test_copy_that_fails_lets_the_optimizer_step(trainer: Trainer) -> None:
    trainer.hook = fail_at(FIRST_ITERATION)
    assert trainer.run(trainer.request(0)).copied.is_set()
