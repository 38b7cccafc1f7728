"""Snapshots that are packed: regions and slots hold every tensor as its format keeps it."""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from moe_ft.config.strategy import PARTS
from moe_ft.engine.memory.regions import MappedFile, Region, UnitPool
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.job import SnapshotRequest, SnapshotState
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.format.entries import TensorEntry, UnitEntry, tensor_bytes, tensor_pieces
from moe_ft.format.packings import Packing
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.slices import live_tensor
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_optimizer, make_parameter
from tests.unit.moe_ft.engine.snapshots.snapshot_rank import (
    COMPLETE,
    DEADLINE_S,
    FAILED,
    SnapshotRank,
)
from tests.unit.moe_ft.engine.snapshots.test_packed import image_of
from tests.waiting import wait_for

EMBEDDING, ROUTER = UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.ROUTER, layer=0)
EXPERTS = [UnitId(kind=UnitKind.EXPERT, layer=0, expert=each) for each in range(2)]
# The embedding is larger than a buffer, the router has fp32 weights.
SIZES = {EMBEDDING: 200_000, ROUTER: 129, EXPERTS[0]: 1, EXPERTS[1]: 8193}
STAGING_BYTES = 1 << 20
SLACK_BYTES = 1 << 15  # for windows of several snapshots
Packings = Mapping[str, Packing]
MIXED: Packings = {
    "master": Packing.SPLIT,
    "exp_avg": Packing.BF16,
    "exp_avg_sq": Packing.E4M3_BLOCKS,
}


class Rank(SnapshotRank):
    """A rank with random state, which may be packed."""

    def __init__(
        self, directory: Path, packings: Packings, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.parameters = []
        for unit, size in SIZES.items():
            short = torch.float32 if unit is ROUTER else torch.bfloat16
            master = torch.zeros(size)
            self.parameters.append(
                make_parameter(
                    unit,
                    parameter=torch.zeros(size, dtype=short),
                    optimizer=make_optimizer(master),
                    master=master,
                )
            )
        self.catalog = UnitCatalog(self.parameters, leaves_out_frozen=False, packings=packings)
        self.layouts = UnitLayouts(self.catalog, 0)
        self.pool = UnitPool(directory, self.layouts.place(EXPERTS[1], 0).num_bytes, num_slots=2)
        self.pool.open()
        plans = [SnapshotPlan(levels=dict.fromkeys(SIZES, Level.FULL))]
        self.window(plans)
        self.layouts.region_bytes = self.layout.num_bytes + SLACK_BYTES
        self.window(plans)
        regions = [Region(directory, each, self.layout.num_bytes) for each in range(2)]
        super().__init__(self.parameters, regions, pool=self.pool, staging_bytes=staging_bytes)
        self.train()

    def window(self, plans: list[SnapshotPlan]) -> None:
        """Have windows of these snapshots from now on."""
        self.plans, self.layout = plans, self.layouts.lay_out(WindowPlan(snapshots=tuple(plans)))

    def train(self) -> None:
        """Have new state; weights are rounded from their masters."""
        for local in self.parameters:
            assert local.master is not None
            self.draw(local.master)
            local.parameter.data.copy_(local.master)
            for key in ("exp_avg", "exp_avg_sq"):
                state = local.optimizer.optimizer.state[local.master]
                self.draw(state.setdefault(key, torch.zeros_like(local.master)))

    def draw(self, tensor: torch.Tensor) -> None:
        """Fill a tensor with random numbers."""
        tensor.copy_(torch.randn(tensor.shape, generator=self.random))

    def request(
        self, iteration: int = 5, *, position: int = 0, region: int = 0, **changes: Any
    ) -> SnapshotRequest:
        """Return the request for a snapshot of the state as it is."""
        layout = self.layout
        request = SnapshotRequest(
            region=self.regions[region],
            window=lambda: layout,
            position=position,
            iteration=iteration,
            keep_iteration=None,
            plan=self.plans[position],
        )
        return replace(request, **changes)

    def take(self, iteration: int = 5, **which: int) -> SnapshotState:
        """Take a snapshot and return how it ended."""
        return self.run(self.request(iteration, **which)).state

    def header(self) -> dict[str, tuple[str, int]]:
        """Return the type and the size of every tensor in a region's file, as safetensors reads it."""
        found = safetensors.deserialize(bytes(self.regions[0].mapping))  # type: ignore[no-untyped-call]
        return {name: (each["dtype"], *each["shape"]) for name, each in found}

    def odd_tensors(self, region: int = 0) -> list[str]:
        """Return the tensors in a region, or in the pool, that are not those of the state as it is."""
        odd = []
        for name, entry in self.index(region).entries():
            file: MappedFile = self.pool if entry.file else self.regions[region]
            odd += [
                f"{name}/{tensor.key}"
                for tensor in entry.tensors
                if not tensor.is_absent and not self.has_arrived(file, entry, tensor)
            ]
        return odd

    def has_arrived(self, file: MappedFile, entry: UnitEntry, tensor: TensorEntry) -> bool:
        """Return whether a file has of a tensor what packing it as it is now would write."""
        (local,) = [each for each in self.parameters if each.name == tensor.parameter]
        live, packing = live_tensor(local, tensor.key), Packing(tensor.packing)
        assert live is not None
        image = image_of(packing, live, live_tensor(local, "weight")).numpy().tobytes()
        at = entry.offset + tensor.offset
        return all(
            file.mapping[at + each.offset : at + each.offset + each.num_bytes]
            == image[each.offset : each.offset + each.num_bytes]
            for each in tensor_pieces(tensor)
        )


MakeRank = Callable[..., Rank]


def request_with_slot(rank: Rank, slot: int) -> SnapshotRequest:
    """Return a request that has an expert in the pool."""
    levels = {unit: Level.FULL for unit in SIZES if unit != EXPERTS[1]}
    rank.window([SnapshotPlan(levels=levels)])
    return rank.request(slots=[rank.layouts.place(EXPERTS[1], rank.pool.offset_of(slot))])


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


@pytest.mark.parametrize("staging_bytes", [0, STAGING_BYTES])
def test_bytes_that_others_have_left_between_tensors_become_zeros(
    make_rank: MakeRank, staging_bytes: int
) -> None:
    rank = make_rank(EXACT, staging_bytes=staging_bytes)
    for file in (rank.pool, rank.regions[0]):
        file.mapping[:] = b"\xff" * file.num_bytes
    assert rank.run(request_with_slot(rank, 1)).state is COMPLETE
    for name, entry in rank.index().entries():
        content = bytes((rank.pool if entry.file else rank.regions[0]).mapping)
        between = [
            content[entry.offset + end : entry.offset + after.offset]
            for tensor, after in pairwise(entry.tensors)
            if (end := tensor.offset + tensor_bytes(tensor)) < after.offset
        ]
        assert bool(between) == (name != str(EMBEDDING))
        assert not any(map(any, between)), name


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
