"""Snapshots that are packed: regions and slots hold every tensor as its format keeps it."""

from collections.abc import Callable

import pytest
import torch

from moe_ft.config.precision import PARTS
from moe_ft.engine.snapshots.packed import unpack_into
from moe_ft.format.index import check_units
from moe_ft.format.packings import Packing
from moe_ft.strategies.interface import SnapshotPlan
from moe_ft.units import Level
from tests.unit.moe_ft.engine.snapshots.packed_rank import (
    EMBEDDING,
    EXPERTS,
    MIXED,
    ROUTER,
    SIZES,
    MakeRank,
    Packings,
    Rank,
    request_with_slot,
)
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import COMPLETE, FAILED

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


@pytest.mark.parametrize("packings", [EXACT, MIXED, *LOSSY], ids=name_of)
def test_region_matches_its_index(make_rank: MakeRank, packings: Packings) -> None:
    rank = make_rank(packings)
    rank.take()
    check_units(rank.index(), {"": memoryview(rank.regions[0].mapping)}, "the region")


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


def test_index_says_how_each_tensor_is_kept_and_of_which_type_it_is(rank: Rank) -> None:
    rank.take()
    units = rank.index().units
    kept = {
        unit: {each.key: (each.dtype, each.packing) for each in units[str(unit)].tensors}
        for unit in (EXPERTS[0], ROUTER)
    }
    moments = {"exp_avg": ("F32", "bf16"), "exp_avg_sq": ("F32", "fp8-e4m3-block")}
    assert kept == {
        EXPERTS[0]: {"param": ("F32", "split"), **moments},
        ROUTER: {"param": ("F32", "exact"), **moments},
    }


def test_split_masters_are_read_back_bit_for_bit(rank: Rank) -> None:
    rank.take()
    for unit, local in zip(SIZES, rank.parameters, strict=True):
        entry = rank.index().units[str(unit)]
        content = memoryview(rank.regions[0].mapping)[entry.offset :][: entry.num_bytes]
        assert local.master is not None
        target = torch.zeros_like(local.master)
        unpack_into(target, entry.tensors[0], content)
        assert torch.equal(target, local.master)


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


def test_each_region_holds_the_state_of_its_snapshot(rank: Rank) -> None:
    for iteration in range(5, 10):
        rank.train()
        assert rank.take(iteration, region=iteration % 2) is COMPLETE
        assert rank.index(iteration % 2).iteration == iteration
        assert rank.odd_tensors(iteration % 2) == []


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


def test_moments_that_come_up_are_in_the_next_snapshot(rank: Rank) -> None:
    for local in rank.parameters:
        local.optimizer.optimizer.state.clear()
    rank.take(5)
    rank.train()
    assert rank.take(6) is COMPLETE
    entries = rank.index().units.values()
    assert not any(tensor.is_absent for entry in entries for tensor in entry.tensors)
    assert rank.odd_tensors() == []


def replace_moments(rank: Rank) -> None:
    """Have other tensors in the optimizer's state."""
    for local in rank.parameters:
        state = local.optimizer.optimizer.state[local.master]
        for key, moment in state.items():
            state[key] = torch.zeros_like(moment)


def replace_masters(rank: Rank) -> None:
    """Have the same masters with other memory."""
    for local in rank.parameters:
        assert local.master is not None
        local.master.data = torch.zeros_like(local.master)


def replace_weights(rank: Rank) -> None:
    """Have the same parameters with other memory."""
    for local in rank.parameters:
        local.parameter.data = torch.zeros_like(local.parameter)


@pytest.mark.parametrize("replace", [replace_moments, replace_masters, replace_weights])
def test_tensors_that_were_replaced_are_followed(
    rank: Rank, replace: Callable[[Rank], None]
) -> None:
    rank.take(5)
    replace(rank)
    rank.train()
    assert rank.take(6) is COMPLETE
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


def window_of_two(rank: Rank) -> None:
    """Have an expert at COMPUTE in the first snapshot, and at FULL in the second one."""
    first = {**dict.fromkeys(SIZES, Level.FULL), EXPERTS[1]: Level.COMPUTE}
    second = {EXPERTS[1]: Level.FULL}
    rank.window([SnapshotPlan(levels=first), SnapshotPlan(levels=second)])


def test_weights_at_compute_are_as_forward_uses_them(rank: Rank) -> None:
    window_of_two(rank)
    rank.take(5)
    (weights,) = rank.index().compute
    (tensor,) = weights[str(EXPERTS[1])].tensors
    assert (tensor.key, tensor.dtype, tensor.packing) == ("weight", "BF16", "exact")
    assert rank.odd_tensors() == []


def test_second_snapshot_of_a_window_writes_nothing_outside_of_its_stretch(rank: Rank) -> None:
    window_of_two(rank)
    rank.take(5)
    rank.train()
    request = rank.request(6, position=1)
    start, end = request.stretch
    before = rank.regions[0].mapping[:]
    assert rank.run(request).state is COMPLETE
    after = rank.regions[0].mapping[:]
    assert (after[:start], after[end:]) == (before[:start], before[end:])
    check_units(rank.index(), {"": memoryview(after)}, "the region")


def test_window_that_lies_otherwise_may_follow_in_the_same_region(rank: Rank) -> None:
    rank.take(5)
    rank.window([SnapshotPlan(levels=dict.fromkeys(reversed(SIZES), Level.FULL))])
    assert rank.take(6) is COMPLETE
    assert rank.odd_tensors() == []


@pytest.mark.parametrize("slot", [0, 1])
def test_unit_in_a_slot_is_packed_as_in_a_region(rank: Rank, slot: int) -> None:
    assert rank.run(request_with_slot(rank, slot)).state is COMPLETE
    entry = rank.index().units[str(EXPERTS[1])]
    assert (entry.file, rank.pool.slot_at(entry.offset)) == (rank.pool.name, slot)
    assert [each.packing for each in entry.tensors] == ["split", "bf16", "fp8-e4m3-block"]
    assert rank.odd_tensors() == []


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
