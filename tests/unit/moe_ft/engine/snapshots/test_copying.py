"""Copies of live state into a region, without threads: contents, calls on the way, and errors."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.errors import SnapshotError
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    DEADLINE_S,
    FIRST_ITERATION,
    NUM_ELEMENTS,
    Trainer,
)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.writer.close(DEADLINE_S)


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


def test_tensors_that_do_not_exist_yet_are_named(trainer: Trainer, copier: StateCopier) -> None:
    request = trainer.request(0)
    local = trainer.state.parameters[0]
    local.optimizer.optimizer.state.clear()
    absent = copier.copy(request, None, lambda: None, lambda: None)
    assert absent == {(local.name, "exp_avg"), (local.name, "exp_avg_sq")}


def test_tensor_of_another_type_is_an_error_with_both_types(
    trainer: Trainer, copier: StateCopier
) -> None:
    request = trainer.request(0)
    local = trainer.state.parameters[0]
    state = local.optimizer.optimizer.state[local.master]
    state["exp_avg"] = torch.zeros(NUM_ELEMENTS, dtype=torch.float16)
    with pytest.raises(SnapshotError, match=r"is torch\.float16, expected torch\.float32"):
        copier.copy(request, None, lambda: None, lambda: None)
