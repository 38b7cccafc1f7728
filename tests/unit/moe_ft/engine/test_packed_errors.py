"""Snapshots that are packed: errors that are found on the way from the device to the file."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ft.engine.copying import StateCopier
from moe_ft.engine.regions import MappedFile
from moe_ft.format.files import TensorEntry, tensor_pieces
from moe_ft.format.packings import Packing
from tests.unit.moe_ft.engine.packed_rank import (
    EMBEDDING,
    EXPERTS,
    MIXED,
    MakeRank,
    Packings,
    Rank,
    request_with_slot,
)
from tests.unit.moe_ft.engine.snapshots import COMPLETE, DEADLINE_S, FAILED
from tests.waiting import wait_for


@pytest.fixture
def make_rank(tmp_path: Path) -> Iterator[MakeRank]:
    """Return what makes ranks, each with a directory of its own."""
    ranks: list[Rank] = []

    def make(packings: Packings, **others: Any) -> Rank:
        ranks.append(Rank(tmp_path / str(len(ranks)), packings, **others))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.writer.close(DEADLINE_S)


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank(MIXED)


def flip_before_check(
    monkeypatch: pytest.MonkeyPatch, file: MappedFile, byte: Callable[[], int]
) -> None:
    """Flip a bit of a file between the copy from the device and the check of what has arrived."""
    check = StateCopier.check

    def flip_and_check(copier: StateCopier) -> None:
        file.mapping[byte()] ^= 0x10
        check(copier)

    monkeypatch.setattr(StateCopier, "check", flip_and_check)


def last_byte(entry_offset: int, tensor: TensorEntry, piece: int) -> int:
    found = tensor_pieces(tensor)[piece]
    return entry_offset + tensor.offset + found.offset + found.num_bytes - 1


@pytest.mark.parametrize(
    ("key", "piece"),
    [
        ("param", 0),
        ("param", 1),
        ("param", 2),
        ("exp_avg", 0),
        ("exp_avg_sq", 0),
        ("exp_avg_sq", 1),
    ],
)
def test_byte_that_was_changed_on_its_way_fails_the_snapshot(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, key: str, piece: int
) -> None:
    (place,) = [each for each in rank.layout.units if each.unit == EMBEDDING]
    (tensor,) = [each for each in place.tensors if each.key == key]
    at = last_byte(place.offset, tensor, piece)
    flip_before_check(monkeypatch, rank.regions[0], lambda: at)
    assert rank.take() is FAILED
    assert rank.reasons() == [
        f"SnapshotError: {EMBEDDING}.weight/{key} was changed on its way from the device to the host"
    ]
    assert not rank.regions[0].index_path.exists()


def test_byte_that_was_changed_on_its_way_to_a_slot_fails_the_snapshot(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_with_slot(rank, 1)
    tensor = request.slots[0].tensors[-1]
    at = last_byte(request.slots[0].offset, tensor, 1)
    flip_before_check(monkeypatch, rank.pool, lambda: at)
    assert rank.run(request).state is FAILED
    (reason,) = rank.reasons()
    assert reason.startswith(f"SnapshotError: {EXPERTS[1]}.weight/exp_avg_sq was changed")


def test_snapshot_after_one_that_was_changed_on_its_way_is_complete(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        (place, *_) = rank.layout.units
        flip_before_check(patch, rank.regions[0], lambda: place.offset)
        assert rank.take(5) is FAILED
    assert rank.take(6) is COMPLETE
    assert rank.odd_tensors() == []


def test_optimizer_may_step_before_what_was_copied_is_checked(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, may_step = StateCopier.check, threading.Event()

    def step_and_check(copier: StateCopier) -> None:
        assert may_step.wait(DEADLINE_S)
        rank.train()
        check(copier)

    monkeypatch.setattr(StateCopier, "check", step_and_check)
    job = rank.submit(rank.request())
    assert job.copied.wait(DEADLINE_S)
    may_step.set()
    wait_for(lambda: job.state is COMPLETE, "the snapshot to be complete")


def test_weights_that_were_not_rounded_from_their_masters_fail_the_snapshot(rank: Rank) -> None:
    with torch.no_grad():
        rank.parameters[0].parameter[150_000] += 1.0
    assert rank.take() is FAILED
    assert rank.reasons() == [
        f"SnapshotError: 1 weights of {EMBEDDING}.weight/param are not their fp32 masters rounded to "
        "BF16, so these cannot be split: use master=exact"
    ]
    assert not rank.regions[0].index_path.exists()


def test_state_that_must_be_packed_is_never_copied_as_it_is(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"exp_avg": Packing.BF16}, staging_bytes=0)
    assert rank.take() is FAILED
