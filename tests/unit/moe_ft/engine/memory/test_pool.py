"""Slots: a valid file, and what a recovery puts there."""

from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open

from moe_ft.engine.memory.region_stores import FetchedVersion, WindowStore
from moe_ft.engine.memory.regions import UnitPool
from moe_ft.format.entries import UnitEntry
from tests.unit.moe_ft.builders import put_in_slot

CHECKSUM = "0" * 16


@pytest.fixture
def pool(tmp_path: Path) -> UnitPool:
    pool = UnitPool(tmp_path, 132, 4)
    pool.open()
    return pool


def entry(pool: UnitPool, slot: int, *, iteration: int = 1) -> UnitEntry:
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


def test_pool_is_a_safetensors_file_that_declares_its_slots(pool: UnitPool) -> None:
    with safe_open(pool.data_path, framework="numpy") as file:
        assert sorted(file.keys()) == [f"slot/{slot}" for slot in range(4)]


def test_pool_that_is_opened_again_keeps_its_versions(tmp_path: Path, pool: UnitPool) -> None:
    name, unit = put_in_slot(pool, 2, 7)
    before = bytes(pool.mapping)
    pool.close()
    again = UnitPool(tmp_path, 132, 4)
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
    pool: UnitPool, wrong: dict[str, object]
) -> None:
    assert pool.has_place(entry(pool, 0))
    assert not pool.has_place(msgspec.structs.replace(entry(pool, 0), **wrong))


# What a recovery puts back


def content_of(pool: UnitPool, unit: UnitEntry) -> bytes:
    return bytes(pool.mapping[unit.offset : unit.offset + unit.num_bytes])


def restored(
    pool: UnitPool, slot: int, expert: int, *, is_in_pool: bool
) -> tuple[str, FetchedVersion]:
    name, unit = put_in_slot(pool, slot, expert)
    content = memoryview(content_of(pool, unit))
    return name, FetchedVersion(entry=unit, content=content, is_in_pool=is_in_pool)


def test_version_whose_slot_is_taken_gets_another_one(tmp_path: Path, pool: UnitPool) -> None:
    replica = UnitPool(tmp_path / "replica", 132, 4)
    replica.open()
    other, elsewhere = restored(replica, 2, 1, is_in_pool=False)
    name, own = restored(pool, 2, 8, is_in_pool=True)
    store = WindowStore([], pool)
    store.keep_recovered([], {other: elsewhere, name: own})
    assert store.newest[name] == own.entry
    moved = store.newest[other]
    assert moved.offset != own.entry.offset
    assert content_of(pool, moved) == bytes(elsewhere.content)
