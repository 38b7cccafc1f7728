"""Snapshots that are packed: errors that are found on the way from the device to the file."""

import threading
from pathlib import Path

import pytest
import torch

from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.format.packings import Packing
from tests.unit.moe_ft.engine.snapshots.packed_rank import (
    EMBEDDING,
    MIXED,
    MakeRank,
    Rank,
)
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import COMPLETE, DEADLINE_S, FAILED
from tests.waiting import wait_for


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank(MIXED)


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


def test_snapshot_after_one_that_could_not_be_packed_is_complete(rank: Rank) -> None:
    weight = rank.parameters[0].parameter
    before = weight.detach().clone()
    with torch.no_grad():
        weight[150_000] += 1.0
        assert rank.take(5) is FAILED
        weight.copy_(before)
    assert rank.take(6) is COMPLETE
    assert rank.odd_tensors() == []


def test_state_that_must_be_packed_is_never_copied_as_it_is(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"exp_avg": Packing.BF16}, staging_bytes=0)
    assert rank.take() is FAILED
