"""Restored state stays in memory until it is replaced, even if it was read from a peer."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.engine.memory.region_stores import WindowStore
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.memory.restored import FetchedWindow, Handover, keep_restored, replica_to_send
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index, check_units
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.builders import (
    FRESH,
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


def store_for(node_dir: Path, file_bytes: int) -> WindowStore:
    """Return the store of rank 0, which knows what its memory holds."""
    memory = memory_for(node_dir, file_bytes)
    store = WindowStore(memory.regions, memory.pool)
    store.find()
    return store


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


def test_state_that_is_damaged_in_own_memory_is_replaced(tmp_path: Path) -> None:
    damaged, window = fill_window(own_directory(tmp_path, 0), 1)
    unit = next(iter(window.index.compute[0].values()))
    damaged.mapping[unit.offset] ^= 1
    store = store_for(tmp_path, window.index.file_bytes)
    (region,) = keep_restored(store, restored(window.index, window.content))
    assert region.iteration == 7
    assert [path.name for path in tmp_path.rglob("*.json")] == [region.index_path.name]
    found = decode(region.index_path.read_bytes(), Index, "")
    check_units(found, {"": memoryview(region.mapping)}, "region")


def test_of_two_states_of_one_iteration_the_one_that_was_put_back_is_kept_and_sent(
    tmp_path: Path,
) -> None:
    for number, length in ((0, 2), (1, 3)):
        directory = own_directory(tmp_path, 0)
        fill_window(directory, number, first_iteration=8 - length, length=length)
    store = store_for(tmp_path, make_window().index.file_bytes)
    state = restored(peers=frozenset({3}))
    kept = keep_restored(store, state)
    assert [region.number for region in kept] == [1]
    replica = replica_to_send(kept, state)
    assert replica is not None and replica.index.window == 3


def test_state_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, content = sparse_state()
    store = store_for(tmp_path, index.file_bytes)

    def commit(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Region, "commit", commit)
    assert keep_restored(store, restored(index, content)) == []


@STATES
def test_state_of_regions_of_another_size_is_not_brought_back(
    make: Callable[[], State], tmp_path: Path
) -> None:
    index, content = make()
    store = store_for(tmp_path, index.file_bytes + 4096)
    assert keep_restored(store, restored(index, content)) == []


@STATES
def test_state_that_lies_as_this_version_would_not_lay_it_is_not_brought_back(
    make: Callable[[], State], tmp_path: Path
) -> None:
    index, content = make()
    other = msgspec.structs.replace(index, header_checksum="0" * 16)
    store = store_for(tmp_path, index.file_bytes)
    assert keep_restored(store, restored(other, content)) == []
    assert not list(tmp_path.rglob("*.json"))
