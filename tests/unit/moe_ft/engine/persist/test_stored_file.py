"""A rank's file of a checkpoint holds the bytes of memory; the rest is found in older files."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.engine.persist.writer import PreviousCheckpoint, StoredFile, assemble
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index, check_units
from tests.unit.moe_ft.builders import add_units, fill_region, put_in_slot

NAME = "rank_00000_01234567.safetensors"
CHECKSUM = "0" * 16


class Memory:
    """A region and a pool with three experts, of which each has its own iteration."""

    def __init__(self, tmp_path: Path) -> None:
        self.pool = UnitPool(tmp_path, 4 * 33, 5)
        self.pool.open()
        pooled = dict(put_in_slot(self.pool, n + 1, n, iteration=n + 1) for n in range(3))
        self.region: Region
        self.region, index = fill_region(tmp_path)
        self.index = add_units(self.region, index, pooled)
        self.names = list(pooled)

    def contents(self) -> dict[str, memoryview]:
        """Return the files in memory."""
        return {"": memoryview(self.region.mapping), self.pool.name: memoryview(self.pool.mapping)}

    def file_of(self, stored: StoredFile) -> bytes:
        """Return what is written to storage."""
        return b"".join(stored.pieces(self.index, self.contents()))

    def content_of(self, name: str) -> bytes:
        """Return the bytes of a unit in memory."""
        unit = self.index.units[name]
        return bytes(self.contents()[unit.file][unit.offset : unit.offset + unit.num_bytes])


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def in_file(index: Index) -> dict[str, UnitEntry]:
    return {name: unit for name, unit in index.units.items() if not unit.file}


def checkpoint(stored: StoredFile, iteration: int) -> PreviousCheckpoint:
    path = f"iter_{iteration:07d}/rank_00000_01234567.json"
    return PreviousCheckpoint(index=stored.index, path=path, checksum=CHECKSUM)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_file_with_rotating_units_has_the_bytes_and_checksums_of_its_index(
    memory: Memory, count: int
) -> None:
    stored = assemble(memory.index, memory.names[:count], None, NAME)
    content = memory.file_of(stored)
    assert len(content) == stored.index.file_bytes
    check_units(stored.index, {"": memoryview(content)}, NAME)
    for name, unit in in_file(stored.index).items():
        assert content[unit.offset : unit.offset + unit.num_bytes] == memory.content_of(name)


def test_file_with_rotating_units_is_a_safetensors_file(memory: Memory, tmp_path: Path) -> None:
    stored = assemble(memory.index, memory.names, None, NAME)
    (tmp_path / NAME).write_bytes(memory.file_of(stored))
    with safe_open(tmp_path / NAME, framework="numpy") as file:
        keys = [key for key in file.keys() if not key.startswith("__")]  # noqa: SIM118
        assert len(keys) == sum(len(unit.tensors) for unit in stored.index.units.values())


def test_unit_that_is_not_written_is_found_in_the_file_of_the_checkpoint_before(
    memory: Memory,
) -> None:
    before = assemble(memory.index, memory.names[:1], None, NAME)
    after = assemble(memory.index, memory.names[1:2], checkpoint(before, 4), NAME)
    found = after.index.units[memory.names[0]]
    assert found.file == f"iter_0000004/{NAME}"
    assert found.offset == before.index.units[memory.names[0]].offset
    assert [entry.data for entry in after.index.older] == [found.file]


def test_part_that_now_belongs_to_another_rank_is_not_taken_from_an_older_file(
    memory: Memory,
) -> None:
    before = assemble(memory.index, memory.names, None, NAME)
    gone = next(name for name, unit in memory.index.units.items() if not unit.file)
    units = {name: unit for name, unit in memory.index.units.items() if name != gone}
    now = msgspec.structs.replace(memory.index, units=units)
    after = assemble(now, memory.names[:1], checkpoint(before, 4), NAME)
    assert set(after.index.units) == set(units)


@given(st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=8))
def test_checkpoint_of_any_history_names_the_file_that_each_unit_was_last_written_to(
    tmp_path_factory: pytest.TempPathFactory, history: list[set[int]]
) -> None:
    memory = Memory(tmp_path_factory.mktemp("memory"))
    last: dict[str, int] = {}
    previous = None
    for iteration, chosen in enumerate(history):
        names = [memory.names[expert] for expert in sorted(chosen)]
        stored = assemble(memory.index, names, previous, NAME)
        previous = checkpoint(stored, iteration)
        last.update(dict.fromkeys(names, iteration))
        for name in memory.names:
            found = stored.index.units.get(name)
            own = last.get(name) == iteration
            expected = "" if own else f"iter_{last.get(name, -1):07d}/{NAME}"
            assert (None if name not in last else expected) == (found.file if found else None)
        needed = {unit.file for unit in stored.index.units.values() if unit.file}
        assert {entry.data for entry in stored.index.older} == needed
