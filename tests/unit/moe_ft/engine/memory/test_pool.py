"""Slots: a valid file, never one that is needed, and enough of them whatever happens."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from moe_ft.engine.memory.pool import FetchedVersion, Pool, PoolVersions
from moe_ft.errors import SnapshotError
from moe_ft.format.entries import UnitEntry
from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.host_memory import num_slots
from moe_ft.planning.lost_tokens import limit_of_k
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.experts_per_layer import PlannedRun
from moe_ft.strategies.partial.selection import RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import put_in_slot

CHECKSUM = "0" * 16


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    pool = Pool(tmp_path, 132, 4)
    pool.open()
    return pool


def entry(pool: Pool, slot: int, *, iteration: int = 1) -> UnitEntry:
    return UnitEntry(
        offset=pool.offset_of(slot),
        num_bytes=1,
        iteration=iteration,
        level="full",
        checksum=CHECKSUM,
        tensors=(),
        file=pool.name,
    )


# The file


def test_pool_is_a_safetensors_file_that_declares_its_slots(pool: Pool) -> None:
    with safe_open(pool.data_path, framework="numpy") as file:
        assert sorted(file.keys()) == [f"slot/{slot}" for slot in range(4)]


def test_pool_that_is_opened_again_keeps_its_versions(tmp_path: Path, pool: Pool) -> None:
    name, unit = put_in_slot(pool, 2, 7)
    before = bytes(pool.mapping)
    pool.close()
    again = Pool(tmp_path, 132, 4)
    again.open()
    assert bytes(again.mapping) == before
    assert again.has_place(unit), name


@pytest.mark.parametrize(
    "wrong",
    [
        {"file": ""},
        {"file": "pool_5x192.safetensors"},
        {"offset": 0},
        {"offset": 4096 + 64},
        {"offset": 4096 + 4 * 192},
        {"num_bytes": 193},
    ],
)
def test_version_that_does_not_lie_in_one_slot_has_no_place(
    pool: Pool, wrong: dict[str, object]
) -> None:
    assert pool.has_place(entry(pool, 0))
    assert not pool.has_place(msgspec.structs.replace(entry(pool, 0), **wrong))


def test_pool_without_enough_free_slots_says_how_many_there_are(pool: Pool) -> None:
    with pytest.raises(SnapshotError, match="3 slots are needed, 2 of 4 are free"):
        pool.find_free(3, {0, 2})


# Which slots may be used again


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ExpertLayout, PartialConfig]:
    ep_size = draw(st.integers(1, 3))
    experts = ExpertLayout(
        num_layers=draw(st.integers(1, 3)),
        num_experts=ep_size * draw(st.integers(1, 4)),
        ep_size=ep_size,
    )
    k = draw(st.integers(1, experts.num_experts))
    return experts, PartialConfig(
        k_snapshot=draw(st.sampled_from([str(k), "auto"])),
        k_persist=draw(st.integers(1, k)),
        selection=draw(st.sampled_from(["sequential", "load-aware"])),
        dynamic_k=draw(st.booleans()),
        plt_limit=0.04,
    )


class Rank:
    """Slots of one rank as the engine uses them, without copying anything."""

    def __init__(self, directory: Path, experts: ExpertLayout, options: PartialConfig) -> None:
        units = [
            UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
            for layer in range(experts.num_layers)
            for expert in range(experts.num_local)
        ]
        share = RankShare(always_bytes=0, unit_bytes=1)
        layers = [f"layer.{layer}" for layer in range(experts.num_layers)]
        run = PlannedRun(interval=1, planned_tokens=10**9, tokens_per_iteration=1)
        self.strategy = PartialStrategy([], units, layers, experts, options, run, share)
        count = num_slots(len(units), self.strategy.most_rotating)
        self.pool = Pool(directory, 1, count)
        self.versions = PoolVersions(self.pool)
        self.iteration = 0
        self.job: dict[str, UnitEntry] | None = None
        self.names: dict[str, UnitEntry] = {}
        self.persisting: dict[str, UnitEntry] = {}

    def take(self) -> None:
        """Begin a snapshot unless one is under way."""
        if self.job is not None:
            return
        self.iteration += 1
        self.window = self.strategy.plan_window(self.iteration)
        (plan,) = self.window.snapshots
        slots = self.versions.find_free(len(plan.rotating))
        assert len(set(slots)) == len(plan.rotating)
        needed = {*self.versions.newest.values(), *self.persisting.values()}
        assert not set(slots) & {self.pool.slot_at(each.offset) for each in needed}
        self.job = {
            str(unit): entry(self.pool, slot, iteration=self.iteration)
            for unit, slot in zip(plan.rotating, slots, strict=True)
        }

    def settle(self) -> None:
        """All ranks have it."""
        if self.job is not None:
            carried = self.versions.carried(self.job)
            self.versions.settle(Path("region_0.json"), {**carried, **self.job})
            self.strategy.note_complete(self.window, self.iteration)
            self.job = None

    def fail(self) -> None:
        """Not all ranks have it."""
        self.job = None

    def persist(self) -> None:
        """Begin to write to storage unless that is under way."""
        if not self.persisting:
            self.persist_plan = self.strategy.plan_persist()
            units = [str(unit) for unit in self.persist_plan.units]
            self.persisting = {name: self.versions.newest[name] for name in units}
            assert self.versions.keep_persisting(units) == sorted(units)

    def end(self) -> None:
        """Note that a checkpoint was written."""
        if self.persisting:
            self.strategy.note_persisted(self.persist_plan)
        self.persisting = {}
        self.versions.end_persisting()

    def raise_k(self) -> None:
        """Double k, as after a recovery."""
        k, num_experts = self.strategy.k.snapshot, self.strategy._experts.num_experts
        self.strategy.k.raise_for(limit_of_k(k, num_experts, 0.04) + 1e-6, 0.0, 1)


STEPS = ("take", "settle", "fail", "persist", "end", "raise_k")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(jobs(), st.lists(st.sampled_from(STEPS), min_size=20, max_size=60))
def test_slots_that_are_needed_are_never_handed_out_and_there_are_always_enough(
    tmp_path: Path, job: tuple[ExpertLayout, PartialConfig], steps: list[str]
) -> None:
    rank = Rank(tmp_path, *job)
    for step in steps:
        getattr(rank, step)()


# What a recovery puts back


def content_of(pool: Pool, unit: UnitEntry) -> bytes:
    return bytes(pool.mapping[unit.offset : unit.offset + unit.num_bytes])


def restored(pool: Pool, slot: int, expert: int, *, is_in_pool: bool) -> tuple[str, FetchedVersion]:
    name, unit = put_in_slot(pool, slot, expert)
    content = memoryview(content_of(pool, unit))
    return name, FetchedVersion(entry=unit, content=content, is_in_pool=is_in_pool)


def test_version_whose_slot_is_taken_gets_another_one(tmp_path: Path, pool: Pool) -> None:
    replica = Pool(tmp_path / "replica", 132, 4)
    replica.open()
    other, elsewhere = restored(replica, 2, 1, is_in_pool=False)
    name, own = restored(pool, 2, 8, is_in_pool=True)
    versions = PoolVersions(pool)
    versions.adopt({other: elsewhere, name: own})
    assert versions.newest[name] == own.entry
    moved = versions.newest[other]
    assert moved.offset != own.entry.offset
    assert content_of(pool, moved) == bytes(elsewhere.content)
