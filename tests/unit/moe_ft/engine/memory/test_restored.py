"""Restored state stays in memory until it is replaced, even if it was read from a peer."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.rank_memory import RankMemory, holds
from moe_ft.engine.memory.regions import Region, Role
from moe_ft.engine.memory.restored import FetchedWindow, Handover, keep_restored, replica_to_send
from moe_ft.format.encoding import decode, encode
from moe_ft.format.index import Index, check_units
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.builders import (
    FRESH,
    fill_region,
    fill_window,
    make_history,
    make_state,
    make_window,
)

State = tuple[Index, bytes]
START = make_history(FRESH)[-1]


def sparse_state() -> State:
    """Return the index and the bytes of a window that ends at iteration 7."""
    window = make_window()
    return window.index, window.content


def dense_state() -> State:
    return make_state(iteration=7)


STATES = pytest.mark.parametrize("make", [sparse_state, dense_state])


def memory_for(node_dir: Path, file_bytes: int) -> RankMemory:
    """Return the memory of rank 0, open."""
    info = RankInfo(
        rank=0,
        node="a",
        stage=0,
        pid=1,
        address=None,
        region_bytes=file_bytes,
        slot_bytes=0,
        num_slots=0,
    )
    memory = RankMemory(node_dir, 0, Topology(ranks=(info,)), [], persists=False)
    memory.open((START, 7))
    return memory


def restored(
    index: Index | None = None, content: bytes = b"", peers: frozenset[int] = frozenset()
) -> Handover:
    """Return that a state was read from a peer, or from this rank's own memory."""
    window = None
    if index is not None:
        contents = {
            unit.offset: memoryview(content)[unit.offset : unit.offset + unit.num_bytes]
            for _, unit in index.entries()
        }
        window = FetchedWindow(index=index, contents=contents)
    return Handover(
        indexes=frozenset(),
        rotating={},
        persisted_index="",
        family=(7, -3 if index is None else -index.window, START),
        window=window,
        peers_without=peers,
    )


@STATES
def test_state_that_was_read_from_a_peer_is_a_region_of_this_rank_again(
    make: Callable[[], State], tmp_path: Path
) -> None:
    index, content = make()
    memory = memory_for(tmp_path, index.file_bytes)
    (region,) = keep_restored(memory, restored(index, content))
    assert holds(region.index_path, START, 7)
    assert (region.role, region.iteration) == (Role.RECOVERY, 7)
    found = decode(region.index_path.read_bytes(), Index, "")
    assert found == msgspec.structs.replace(index, file=region.data_path.name)
    assert region.mapping[: index.header_bytes] == content[: index.header_bytes]
    check_units(found, {"": memoryview(region.mapping)}, "region")
    assert [other.iteration for other in memory.regions if other is not region] == [None]


def test_state_that_is_in_own_memory_is_kept_where_it_is(tmp_path: Path) -> None:
    _, window = fill_window(own_directory(tmp_path, 0), 1)
    memory = memory_for(tmp_path, window.index.file_bytes)
    (region,) = keep_restored(memory, restored())
    assert region.number == 1
    assert memory.regions[0].iteration is None
    assert not memory.regions[0].index_path.exists()


def test_state_that_is_damaged_in_own_memory_is_repaired_in_its_place(tmp_path: Path) -> None:
    damaged, window = fill_window(own_directory(tmp_path, 0), 1)
    unit = next(iter(window.index.compute[0].values()))
    damaged.mapping[unit.offset] ^= 1
    memory = memory_for(tmp_path, window.index.file_bytes)
    (region,) = keep_restored(memory, restored(window.index, window.content))
    assert (region.number, region.iteration) == (1, 7)
    assert not memory.regions[0].index_path.exists()
    found = decode(region.index_path.read_bytes(), Index, "")
    check_units(found, {"": memoryview(region.mapping)}, "region")


def test_of_two_states_of_one_iteration_the_one_that_was_put_back_is_kept_and_sent(
    tmp_path: Path,
) -> None:
    for number, length in ((0, 2), (1, 3)):
        directory = own_directory(tmp_path, 0)
        fill_window(directory, number, first_iteration=8 - length, length=length)
    memory = memory_for(tmp_path, make_window().index.file_bytes)
    state = restored(peers=frozenset({3}))
    kept = keep_restored(memory, state)
    assert [region.number for region in kept] == [1]
    replica = replica_to_send(kept, state)
    assert replica is not None and replica.index.window == 3


def test_state_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, content = sparse_state()
    memory = memory_for(tmp_path, index.file_bytes)

    def commit(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Region, "commit", commit)
    assert keep_restored(memory, restored(index, content)) == []


@STATES
def test_state_of_regions_of_another_size_is_not_brought_back(
    make: Callable[[], State], tmp_path: Path
) -> None:
    index, content = make()
    memory = memory_for(tmp_path, index.file_bytes + 4096)
    assert keep_restored(memory, restored(index, content)) == []


@STATES
def test_state_that_lies_as_this_version_would_not_lay_it_is_not_brought_back(
    make: Callable[[], State], tmp_path: Path
) -> None:
    index, content = make()
    other = msgspec.structs.replace(index, header_checksum="0" * 16)
    memory = memory_for(tmp_path, index.file_bytes)
    assert keep_restored(memory, restored(other, content)) == []
    assert not list(tmp_path.rglob("*.json"))


def test_one_region_stays_free_to_be_filled(tmp_path: Path) -> None:
    for number in range(2):
        fill_window(own_directory(tmp_path, 0), number)
    memory = memory_for(tmp_path, make_window().index.file_bytes)
    assert len(keep_restored(memory, restored())) == 1


def test_peers_that_lack_the_state_get_all_of_it(tmp_path: Path) -> None:
    window = make_window()
    memory = memory_for(tmp_path, window.index.file_bytes)
    state = restored(window.index, window.content, frozenset({3}))
    (region,) = kept = keep_restored(memory, state)
    replica = replica_to_send(kept, state)
    assert replica is not None
    assert (replica.region, replica.peers, replica.start_byte) == (region, frozenset({3}), 0)
    assert replica.end_byte == window.layout.ends[-1]
    assert replica.index.iteration == 7
    assert replica.keep_iteration is None


def test_rank_that_has_no_region_with_the_state_sends_nothing(tmp_path: Path) -> None:
    assert replica_to_send([], restored(peers=frozenset({3}))) is None
    region, _ = fill_window(own_directory(tmp_path, 0), first_iteration=4)
    assert replica_to_send([region], restored(peers=frozenset({3}))) is None


def test_state_that_is_in_more_than_its_region_is_not_sent(tmp_path: Path) -> None:
    region, index = fill_region(own_directory(tmp_path, 0), iteration=7)
    name, unit = next(iter(index.units.items()))
    pooled = msgspec.structs.replace(unit, file="pool_1x64.safetensors")
    index = msgspec.structs.replace(index, units={**index.units, name: pooled})
    region.commit(encode(index), 7)
    state = restored(index, bytes(region.mapping), frozenset({3}))
    assert replica_to_send([region], state) is None
