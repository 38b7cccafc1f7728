"""Regions and slots of a rank: what a recovery rests on, and what is written, outlives later windows."""

from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.memory.region_stores import FetchedVersion, WindowStore
from moe_ft.engine.memory.regions import Region, UnitPool
from tests.unit.moe_ft.builders import add_units, make_state, put_in_slot, rotating_unit

NUM_EXPERTS, K = 3, 1
NAMES = [str(rotating_unit(expert)) for expert in range(NUM_EXPERTS)]


class Memory:
    """Three regions and a pool, as a rank has them whose snapshots hold one expert each."""

    def __init__(self, directory: Path) -> None:
        self.pool = UnitPool(directory, 4 * 33, NUM_EXPERTS + 2 * K)
        self.pool.open()
        size = len(make_state()[1])
        self.regions = [Region(directory, number, size) for number in range(3)]
        for region in self.regions:
            region.open()
        self.store = self.restart()

    def restart(self) -> WindowStore:
        """Have another start find what is there."""
        self.store = WindowStore(self.regions, self.pool)
        self.store.find()
        return self.store

    def take(self, iteration: int, experts: Collection[int]) -> Region:
        """Take a window that holds these experts; other ranks may lack it."""
        region = self.store.take_region()
        index, region.mapping[:] = make_state(iteration=iteration)
        index = msgspec.structs.replace(index, file=region.data_path.name)
        slots = map(self.pool.slot_at, self.store.take_slots(len(experts)))
        units = dict(
            put_in_slot(self.pool, slot, expert, iteration=iteration)
            for expert, slot in zip(experts, slots, strict=True)
        )
        self.units = {**self.store.carried(units), **units}
        add_units(region, index, self.units)
        return region

    def complete(self, iteration: int, experts: Collection[int]) -> Region:
        """Take a window that all ranks get."""
        region = self.take(iteration, experts)
        self.store.complete(region, self.units, {}, None)
        return region


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    memory = Memory(tmp_path)
    for expert in range(NUM_EXPERTS):
        memory.complete(expert, [expert])
    return memory


def test_index_that_is_written_stays_until_the_writer_is_done_if_other_slots_of_it_are_filled(
    memory: Memory,
) -> None:
    persisting = memory.complete(3, [0])
    assert memory.store.keep_persisting(persisting, NAMES[:1]) == NAMES[:1]
    for iteration in range(4, 8):
        memory.complete(iteration, [1 + iteration % 2])
        assert persisting.index_path.exists()
    memory.store.end_persisting()
    assert not persisting.index_path.exists()


def test_window_that_another_rank_lacks_frees_its_memory_and_keeps_the_one_before(
    memory: Memory,
) -> None:
    before = memory.complete(3, [0])
    for iteration in range(4, 8):
        assert memory.store.has_room(K, [], {})
        memory.store.give_up(memory.take(iteration, [1]))
    assert before.index_path.exists()
    assert memory.store.newest[NAMES[1]].iteration == 1


def test_recovered_versions_are_kept_by_the_next_start_until_a_window_is_complete(
    memory: Memory,
) -> None:
    recovered = memory.regions[2]
    versions = dict(memory.store.newest)
    fetched = {
        name: FetchedVersion(entry=entry, content=memoryview(b""), is_in_pool=True)
        for name, entry in versions.items()
    }
    memory.restart().keep_recovered([recovered], fetched)
    for iteration in range(3, 7):
        memory.store.give_up(memory.take(iteration, [0]))
        assert recovered.index_path.exists()
        assert memory.store.newest == versions
    memory.complete(7, [0])
    assert memory.store.has_room(K, [], {})
