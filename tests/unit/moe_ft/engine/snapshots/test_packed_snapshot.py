"""Snapshots that are packed: regions and slots hold every tensor as its format keeps it."""

import threading
from pathlib import Path

import pytest
import torch

from moe_ft.config.precision import PARTS
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.format.packings import Packing
from tests.unit.moe_ft.engine.snapshots.packed_rank import (
    EMBEDDING,
    EXPERTS,
    MIXED,
    ROUTER,
    MakeRank,
    Packings,
    Rank,
    request_with_slot,
)
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import COMPLETE, DEADLINE_S, FAILED
from tests.waiting import wait_for

EXACT: Packings = {}
LOSSY: list[Packings] = [dict.fromkeys(PARTS, each) for each in Packing if each.is_lossy]


@pytest.fixture
def rank(make_rank: MakeRank) -> Rank:
    return make_rank(MIXED)


def name_of(packings: Packings) -> str:
    return "-".join(dict.fromkeys(packings.values())) or "exact"


# Contents of a region


@pytest.mark.parametrize("packings", [EXACT, MIXED, *LOSSY], ids=name_of)
def test_region_holds_every_tensor_as_its_format_keeps_it(
    make_rank: MakeRank, packings: Packings
) -> None:
    rank = make_rank(packings)
    assert rank.take() is COMPLETE
    assert rank.odd_tensors() == []


def test_region_is_a_valid_file_with_the_pieces_of_packed_tensors(rank: Rank) -> None:
    rank.take()
    of_expert = f"{EXPERTS[1]}/full/{EXPERTS[1]}.weight[0:8193]"
    of_router = f"{ROUTER}/full/{ROUTER}.weight[0:129]"
    found = rank.header()
    assert {name: found[name] for name in found if name.startswith((of_expert, of_router))} == {
        f"{of_expert}/param.weight": ("BF16", 8193),
        f"{of_expert}/param.remainder": ("I16", 8193),
        f"{of_expert}/param.carry": ("U8", 1025),
        f"{of_expert}/exp_avg": ("BF16", 8193),
        f"{of_expert}/exp_avg_sq": ("F8_E4M3", 8193),
        f"{of_expert}/exp_avg_sq.scale": ("F32", 65),
        f"{of_router}/param": ("F32", 129),
        f"{of_router}/exp_avg": ("BF16", 129),
        f"{of_router}/exp_avg_sq": ("F8_E4M3", 129),
        f"{of_router}/exp_avg_sq.scale": ("F32", 2),
    }


@pytest.mark.parametrize("region", [0, 1])
def test_exact_state_is_byte_for_byte_what_it_is_without_staging(
    make_rank: MakeRank, region: int
) -> None:
    packed, plain = make_rank(EXACT), make_rank(EXACT, staging_bytes=0)
    for iteration in (5, 6):
        for rank in (packed, plain):
            rank.train()
            assert rank.take(iteration, region=region) is COMPLETE
    found, expected = packed.regions[region], plain.regions[region]
    assert found.mapping[:] == expected.mapping[:]
    assert found.index_path.read_bytes() == expected.index_path.read_bytes()


# From snapshot to snapshot


def test_moments_that_do_not_exist_yet_are_absent_and_the_rest_arrives(rank: Rank) -> None:
    for local in rank.parameters[1:]:
        local.optimizer.optimizer.state.clear()
    assert rank.take() is COMPLETE
    absent = {
        name: [each.key for each in entry.tensors if each.is_absent]
        for name, entry in rank.index().units.items()
    }
    moments = ["exp_avg", "exp_avg_sq"]
    assert absent == {
        str(EMBEDDING): [],
        **{str(each): moments for each in (ROUTER, *EXPERTS)},
    }
    assert rank.odd_tensors() == []


def test_snapshot_that_breaks_off_in_the_middle_leaves_the_next_one_whole(rank: Rank) -> None:
    def break_off(iteration: int) -> None:
        raise RuntimeError("the copy breaks here")

    rank.take(5)
    rank.hook = break_off
    rank.train()
    assert rank.take(6) is FAILED
    rank.hook = lambda iteration: None
    assert rank.take(7) is COMPLETE
    assert rank.odd_tensors() == []


# Windows and slots


def test_moments_that_are_absent_in_a_region_are_marked_although_slots_lack_none(
    rank: Rank,
) -> None:
    rank.parameters[0].optimizer.optimizer.state.clear()
    assert rank.run(request_with_slot(rank, 0)).state is COMPLETE
    absent = {
        name
        for name, entry in rank.index().units.items()
        for each in entry.tensors
        if each.is_absent
    }
    assert absent == {str(EMBEDDING)}


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
