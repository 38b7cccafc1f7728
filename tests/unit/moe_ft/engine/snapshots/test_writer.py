"""Snapshots of a window, one after the other: the region and its index after each of them."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch

from moe_ft.engine.memory.layout import FileLayout, LazyLayout
from moe_ft.engine.memory.unit_layouts import UnitLayouts
from moe_ft.engine.snapshots.job import SnapshotJob
from moe_ft.format.index import check_units
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    COMPLETE,
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


def test_region_matches_its_index_after_every_snapshot(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        check_units(trainer.index(), {"": memoryview(trainer.regions[0].mapping)}, "the region")


def test_region_is_a_valid_file_after_every_snapshot(trainer: Trainer) -> None:
    trainer.layouts[LENGTH] = full_size(trainer)
    for position in range(LENGTH):
        trainer.take(position)
        found = dict(safetensors.deserialize(bytes(trainer.regions[0].mapping)))
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


def test_stretches_of_a_window_are_all_that_is_in_use_of_a_region(trainer: Trainer) -> None:
    stretches = [trainer.request(position).stretch for position in range(LENGTH)]
    assert stretches[0][0] == 0
    assert [start for start, _ in stretches[1:]] == [end for _, end in stretches[:-1]]
    assert tuple(end for _, end in stretches) == trainer.layout(LENGTH).ends


def test_region_says_at_which_iteration_it_is(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        assert trainer.regions[0].iteration == FIRST_ITERATION + position


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


def test_region_holds_nothing_while_a_window_begins_in_it(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
    found = []
    trainer.hook = lambda iteration: found.append(trainer.regions[0].index_path.exists())
    trainer.take(0, first=8)
    assert found == [False]


def test_region_keeps_its_snapshots_while_another_is_added(trainer: Trainer) -> None:
    trainer.take(0)
    found = []
    trainer.hook = lambda iteration: found.append(trainer.index().num_snapshots)
    trainer.take(1)
    assert found == [1]


@pytest.mark.parametrize("length", [1, 2, 4])
def test_window_of_another_length_may_follow_in_the_same_region(
    trainer: Trainer, length: int
) -> None:
    for position in range(LENGTH):
        trainer.take(position)
    for position in range(length):
        assert trainer.take(position, first=8, length=length) is COMPLETE
    index = trainer.index()
    assert index.is_whole
    assert all(trainer.holds(entry, name) for name, entry in index.entries())


def test_window_that_was_not_finished_is_replaced_by_the_next(trainer: Trainer) -> None:
    trainer.take(0)
    trainer.take(1)
    for position in range(LENGTH):
        assert trainer.take(position, first=9) is COMPLETE
    assert [record.iteration for record in trainer.index().records] == [9, 10, 11]


# Snapshots that fail


@pytest.mark.parametrize("position", [0, 1, 2])
def test_snapshot_that_fails_is_reported_and_its_window_is_not_whole(
    trainer: Trainer, position: int
) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + position)
    states = [trainer.take(each) for each in range(position + 1)]
    assert states == [COMPLETE] * position + [FAILED]
    assert trainer.reasons() == ["RuntimeError: the copy breaks here"]
    if position == 0:
        assert not trainer.regions[0].index_path.exists()
    else:
        assert trainer.index().num_snapshots == position


def test_what_was_committed_before_a_failure_stays_readable(trainer: Trainer) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + 1)
    for position in range(LENGTH):
        trainer.take(position)
    index = trainer.index()
    check_units(index, {"": memoryview(trainer.regions[0].mapping)}, "the region")
    assert all(trainer.holds(entry, name) for name, entry in index.entries())


@pytest.mark.parametrize("position", [0, 1, 2])
def test_first_snapshot_of_the_next_window_works_after_a_failure(
    trainer: Trainer, position: int
) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + position)
    for each in range(LENGTH):
        trainer.take(each)
    for each in range(LENGTH):
        assert trainer.take(each, first=8) is COMPLETE
    assert trainer.index().is_whole


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


def test_snapshot_that_cannot_be_committed_fails_and_so_do_those_after_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.take(0)
    shutil.rmtree(tmp_path)
    assert [trainer.take(1), trainer.take(2)] == [FAILED, FAILED]
    first, second = trainer.reasons()
    assert first.startswith("FileNotFoundError")
    assert second.endswith("the snapshot before it in its window has failed")


def test_window_that_does_not_fit_into_its_region_fails_and_training_continues(
    trainer: Trainer,
) -> None:
    layouts = UnitLayouts(trainer.catalog, 0)
    layouts.region_bytes = 4096
    window = LazyLayout(lambda: layouts.lay_out(window_plan(LENGTH)))
    job = trainer.run(trainer.request(0, window=window))
    assert job.state is FAILED
    (reason,) = trainer.reasons()
    assert reason.endswith("its region has 4096")
    assert job.copied.is_set()


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
