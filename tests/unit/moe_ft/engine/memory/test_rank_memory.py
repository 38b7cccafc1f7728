"""A rank's share of a node's memory: what it opens, what it cleans up, what it leaves alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.engine.memory.job_directory import (
    INDEX_NAME,
    is_breakpoint,
    own_directory,
    replica_directory,
)
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.builders import (
    fill_region,
    make_identity,
    make_state,
)

SIZE = len(make_state()[1])
START, OTHER_START = make_identity("run-a").start, make_identity("run-b").start


def info(rank: int, node: str, *, num_slots: int = 3, region_bytes: int = SIZE) -> RankInfo:
    return RankInfo(
        rank=rank,
        node=node,
        stage=0,
        pid=1,
        address=None,
        region_bytes=region_bytes,
        slot_bytes=64 if num_slots else 0,
        num_slots=num_slots,
    )


TWO_NODES = Topology(ranks=(info(0, "a"), info(1, "a", num_slots=0), info(2, "b")))


def memory_of(
    tmp_path: Path, topology: Topology = TWO_NODES, *, rank: int = 0, persists: bool = False
) -> RankMemory:
    """Return the memory of a rank on node a, which keeps replicas of rank 2 if it is rank 0."""
    sources = [2] if rank == 0 else []
    return RankMemory(tmp_path / "a", rank, topology, sources, persists=persists)


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_memory_has_the_regions_and_the_pool_that_the_topology_says(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, persists=True)
    memory.open(None)
    own, replica = own_directory(tmp_path / "a", 0), replica_directory(tmp_path / "a", 2, 0)
    regions = {f"region_{number}.safetensors" for number in range(3)}
    assert files(own) == regions | {"pool_3x64.safetensors"}
    assert files(replica) == {
        "region_0.safetensors",
        "region_1.safetensors",
        "pool_3x64.safetensors",
    }
    assert {(own / name).stat().st_size for name in regions} == {SIZE}


def test_regions_and_replicas_of_the_recovered_state_get_its_iteration(tmp_path: Path) -> None:
    fill_region(own_directory(tmp_path / "a", 0), 1, iteration=5)
    fill_region(own_directory(tmp_path / "a", 0), 0, iteration=4)
    fill_region(replica_directory(tmp_path / "a", 2, 0), 0, rank=2, iteration=5)
    memory = memory_of(tmp_path)
    memory.open((START, 5))
    assert [region.iteration for region in memory.regions] == [None, 5]
    assert [region.iteration for region in memory.replicas[2].regions] == [5, None]


def test_regions_of_another_size_stay_beside_the_new_ones_until_they_are_left_over(
    tmp_path: Path,
) -> None:
    own = own_directory(tmp_path / "a", 0)
    fill_region(own, 0, num_elements=99)
    memory = memory_of(tmp_path)
    memory.open(None)
    assert [region.number for region in memory.regions] == [1, 2]
    assert (own / "region_0.json").exists()
    memory.remove_left_overs()
    assert files(own) == {"region_1.safetensors", "region_2.safetensors", "pool_3x64.safetensors"}


@pytest.mark.parametrize(("rank", "stays"), [(0, False), (1, True)])
def test_memory_of_ranks_that_are_on_other_nodes_now_is_removed_by_the_lowest_rank(
    tmp_path: Path, rank: int, stays: bool
) -> None:
    orphan = own_directory(tmp_path / "a", 2)
    orphan.mkdir(parents=True)
    memory = memory_of(tmp_path, rank=rank)
    memory.open(None)
    memory.remove_left_overs()
    assert orphan.exists() == stays


def with_breakpoint(num_bytes: int = 4096) -> Topology:
    own = replace(TWO_NODES.ranks[0], breakpoint_bytes=num_bytes)
    return Topology(ranks=(own, *TWO_NODES.ranks[1:]))


def test_breakpoint_keeps_what_it_holds_and_goes_when_it_is_no_longer_asked_for(
    tmp_path: Path,
) -> None:
    memory = memory_of(tmp_path, with_breakpoint())
    memory.open(None)
    assert memory.breakpoint is not None
    memory.breakpoint.commit(b"{}", 5)
    memory.close()
    again = memory_of(tmp_path, with_breakpoint())
    again.open(None)
    again.remove_left_overs()
    assert again.breakpoint is not None and again.breakpoint.index_path.exists()
    again.close()
    other = memory_of(tmp_path)
    other.open(None)
    assert memory.breakpoint.index_path.exists()
    other.remove_left_overs()
    assert not list(own_directory(tmp_path / "a", 0).glob("breakpoint*"))
    other.close()


def logging_rank(slots: int, slot_bytes: int = 4096) -> Topology:
    plain = info(0, "a", num_slots=0)
    own = replace(plain, boundary_slot_bytes=slot_bytes, num_boundary_slots=slots)
    return Topology(ranks=(own,))


def test_slots_of_the_boundary_log_are_opened_and_those_of_another_log_removed(
    tmp_path: Path,
) -> None:
    directory = own_directory(tmp_path / "a", 0)
    before = RankMemory(tmp_path / "a", 0, logging_rank(3), [], persists=False)
    before.open(None)
    for slot in before.boundary:
        slot.commit(b"index", 0)
    before.close()
    memory = RankMemory(tmp_path / "a", 0, logging_rank(2), [], persists=False)
    memory.open(None)
    assert "boundary_2.json" in files(directory)  # it may still be needed
    memory.remove_left_overs()
    left = {name for name in files(directory) if name.startswith("boundary_")}
    assert left == {
        f"boundary_{each}.{kind}" for each in (0, 1) for kind in ("json", "safetensors")
    }
    assert memory.num_own_bytes == 2 * SIZE  # of state
    memory.remove()
    assert not directory.exists()


def test_breakpoint_of_another_size_stays_until_what_others_have_left_is_removed(
    tmp_path: Path,
) -> None:
    """A start in another layout recovers from it, and may fail before there is anything newer."""
    memory = memory_of(tmp_path, with_breakpoint())
    memory.open(None)
    assert memory.breakpoint is not None
    memory.breakpoint.commit(b"{}", 5)
    memory.close()
    other = memory_of(tmp_path, with_breakpoint(8192))
    assert other.breakpoint is not None
    assert other.num_missing_bytes == 8192
    other.open(None)
    assert memory.breakpoint.index_path.exists()
    assert is_breakpoint(other.breakpoint.index_path)
    assert INDEX_NAME.fullmatch(other.breakpoint.index_path.name)
    assert other.num_missing_bytes == 0
    other.remove_left_overs()
    assert files(own_directory(tmp_path / "a", 0)) >= {other.breakpoint.data_path.name}
    assert not memory.breakpoint.data_path.exists()


def test_the_one_region_of_a_replica_stays_clear_of_another_layout_and_is_found_again(
    tmp_path: Path,
) -> None:
    topology = Topology(ranks=(info(0, "a"), info(1, "b", num_slots=0)))

    def memory_here() -> RankMemory:
        return RankMemory(tmp_path / "a", 0, topology, [1], persists=False, replica_regions=1)

    def names(memory: RankMemory) -> list[str]:
        return [region.data_path.name for region in memory.replicas[1].regions]

    memory = memory_here()
    memory.open(None)
    assert names(memory) == ["region_0.safetensors"]
    memory.close()
    clear = memory_here()
    clear.stay_clear()
    assert names(clear) == ["region_1.safetensors"]
    clear.open(None)
    assert files(replica_directory(tmp_path / "a", 1, 0)) == {
        "region_0.safetensors",
        "region_1.safetensors",
    }
    clear.remove_left_overs()
    clear.close()
    assert names(memory_here()) == ["region_1.safetensors"]
