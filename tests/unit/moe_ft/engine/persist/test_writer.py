"""The writer: requests become checkpoints, and whatever fails becomes an error and harms no older one."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.manifests import find_checkpoint, find_manifests, write_manifest
from moe_ft.engine.persist.requests import confirmed_path, request_path
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.errors import CorruptStateError, LockLostError
from moe_ft.files.private_files import write_atomically
from moe_ft.files.storage import Storage, file_tag, iteration_directory, rank_path
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest
from moe_ft.planning.recovery import Version
from moe_ft.planning.tiers import STORAGE
from moe_ft.recovery.readers import StorageReader, read_unit
from tests.unit.moe_ft.builders import (
    WindowState,
    fill_region,
    fill_window,
    make_identity,
    make_window,
    manifest_of,
)
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.moe_ft.engine.persist.writer_office import (
    TWO_RANKS,
    Office,
    confirm,
    opened,
    request_for,
    tag_of,
)
from tests.unit.moe_ft.faulty_storage import Injector, faulty_urls
from tests.waiting import wait_for


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with opened(tmp_path, str(tmp_path / "storage")) as office:
        yield office


# Failures


def spoil_data(region: Region, position: int) -> None:
    region.mapping[position] ^= 0x10


def spoil_header(region: Region) -> None:
    spoil_data(region, 9)


def spoil_index(region: Region) -> None:
    region.index_path.write_bytes(region.index_path.read_bytes()[:-10])


def remove_index(region: Region) -> None:
    region.index_path.unlink()


def truncate_data(region: Region) -> None:
    os.truncate(region.data_path, region.num_bytes // 2)


def empty_data(region: Region) -> None:
    os.truncate(region.data_path, 0)


@pytest.mark.parametrize(
    "spoil", [spoil_header, spoil_index, remove_index, truncate_data, empty_data]
)
def test_region_that_is_damaged_becomes_an_error_and_no_checkpoint(
    tmp_path: Path, office: Office, spoil: Callable[[Region], None]
) -> None:
    region, _ = fill_region(tmp_path / "rank")
    spoil(region)
    office.ask(region)
    assert office.result().error != ""
    assert complete_iterations(office.storage) == []


def test_state_that_is_not_finite_becomes_an_error_and_the_last_finite_ones_stay(
    tmp_path: Path, office: Office
) -> None:
    for iteration in (3, 4):
        office.ask(fill_region(tmp_path / "rank", iteration=iteration)[0])
        assert office.result().error == ""
    region, index = fill_region(tmp_path / "rank", iteration=5)
    unit = index.units["embedding"]
    at = unit.offset + unit.tensors[0].offset
    region.mapping[at : at + 4] = b"\x00\x00\x80\xff"  # minus infinity
    content = region.mapping[unit.offset : unit.offset + unit.num_bytes]
    unit = msgspec.structs.replace(unit, checksum=checksum(bytes(content)))
    units = {**index.units, "embedding": unit}
    region.commit(encode(msgspec.structs.replace(index, units=units)), 5)
    office.ask(region)
    assert office.result().error == (
        "CorruptStateError: iteration 5 is not written to storage: param of embedding.weight in unit "
        "embedding holds NaN or infinity"
    )
    assert complete_iterations(office.storage) == [4, 3]
    assert office.storage.names_in("iter_0000005") == []


def test_ranks_that_do_not_write_until_the_deadline_are_named(
    tmp_path: Path, office: Office
) -> None:
    region, _ = fill_region(tmp_path / "rank", identity=make_identity(world_size=3))
    office.ask(region, waits_s=0.0)
    error = office.result().error
    assert "ranks [1, 2] did not write their part of iteration 5 in time" in error
    assert not find_manifests(office.storage, 5)


@pytest.mark.parametrize("back_end", ["local", "objects"])
def test_request_that_is_served_again_and_fails_does_not_harm_its_checkpoint(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    # The first writer was killed after the manifest and before its answer; the next serves it again.
    storage = Storage(faulty_urls(tmp_path)[back_end])
    worker = PersistWorker(tmp_path, storage, keep=1)
    region, _ = fill_region(tmp_path / "rank")
    request = request_for(region)
    worker.persist(request)
    harmed = []
    for number in range(40):
        injector.forget()
        injector.fails_at = frozenset({number})
        with suppress(OSError):
            worker.persist(request)
        injector.forget()
        try:
            assert complete_iterations(storage) == [5]
        except OSError as error:
            harmed.append(f"operation {number}: {error}")
            worker.persist(request)
    assert harmed == []


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"rank": "x"}'])
def test_request_that_cannot_be_understood_does_not_stop_the_others(
    tmp_path: Path, office: Office, content: bytes
) -> None:
    write_atomically(request_path(office.directory, 7), content)
    region, _ = fill_region(tmp_path / "rank")
    office.ask(region)
    assert office.result().error == ""


def test_request_that_arrives_while_the_last_one_is_removed_is_served(
    tmp_path: Path, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The rank reads a result and asks again while the worker is about to remove what it has served.
    first, _ = fill_region(tmp_path / "rank", number=0, iteration=5)
    second, _ = fill_region(tmp_path / "rank", number=1, iteration=6)
    path, remove = request_path(office.directory, 0), Path.unlink
    has_read, has_asked = threading.Event(), threading.Event()

    def remove_late(target: Path, missing_ok: bool = False) -> None:
        if target == path and not has_asked.is_set() and has_read.wait(0.5):
            has_asked.set()
            office.ask(second)
        remove(target, missing_ok)

    monkeypatch.setattr(Path, "unlink", remove_late)
    office.ask(first)
    assert office.result().iteration == 5
    has_read.set()
    wait_for(lambda: has_asked.is_set() or not path.exists(), "the end of the first request")
    if not has_asked.is_set():
        office.ask(second)  # the first was removed before the rank could know of its result
    assert office.result().iteration == 6


# The lock


def locked_worker(tmp_path: Path) -> tuple[Storage, StorageLock, PersistWorker]:
    storage = Storage(str(tmp_path / "storage"))
    storage.make_root()
    lock = StorageLock(storage)
    assert lock.take("job", None)
    return storage, lock, PersistWorker(tmp_path, storage, 1, lock)


def test_lock_that_is_lost_while_ranks_write_leaves_no_manifest(tmp_path: Path) -> None:
    storage, lock, worker = locked_worker(tmp_path)
    region, _ = fill_region(tmp_path / "rank")

    def lose() -> bool:
        assert StorageLock(storage).take("other", lock.look())
        return True

    with pytest.raises(LockLostError):
        worker.persist(request_for(region), is_wanted=lose)
    assert complete_iterations(storage) == []


def test_lock_that_is_lost_before_old_checkpoints_are_deleted_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, lock, worker = locked_worker(tmp_path)
    requests = [
        request_for(fill_region(tmp_path / "rank", number=each, iteration=each)[0])
        for each in (5, 6, 7)
    ]
    for request in requests[:2]:
        worker.persist(request)

    def find_and_lose(*arguments: Any) -> Manifest:
        assert StorageLock(storage).take("other", lock.look())
        return find_checkpoint(*arguments)

    monkeypatch.setattr("moe_ft.engine.persist.writer.find_checkpoint", find_and_lose)
    confirm(worker, rank_path(6, 0, requests[1].tag, "json"))
    assert complete_iterations(storage) == [6, 5]
    with pytest.raises(LockLostError):
        worker.persist(requests[2])


# From a request to files


def test_request_becomes_a_complete_checkpoint(tmp_path: Path, office: Office) -> None:
    region, _ = fill_region(tmp_path / "rank", iteration=5)
    office.ask(region)
    assert office.result().error == ""
    assert complete_iterations(office.storage) == [5]


def test_older_checkpoints_go_as_soon_as_rank_0_names_one_that_all_have_read_back(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, str(tmp_path / "storage"), keep=1) as office:
        for iteration in (5, 6):
            region, _ = fill_region(tmp_path / "rank", iteration=iteration)
            office.ask(region)
            assert office.result().error == ""
        assert complete_iterations(office.storage) == [6, 5]
        newest = rank_path(6, 0, tag_of(region), "json")
        write_atomically(confirmed_path(office.directory), newest.encode())
        wait_for(lambda: office.storage.iterations() == [6], "the older one to go")


def test_request_without_the_manifest_writes_only_the_ranks_own_files(
    tmp_path: Path, office: Office
) -> None:
    region, _ = fill_region(tmp_path / "rank", rank=1, identity=TWO_RANKS)
    office.ask(region, rank=1)
    assert office.result(1).error == ""
    assert office.storage.iterations() == [5]
    assert not find_manifests(office.storage, 5)


class Desk:
    """A worker that is called, and what it leaves on storage."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path, self.storage = tmp_path, Storage(str(tmp_path / "storage"))
        self.worker = PersistWorker(tmp_path, self.storage, 2)

    def persist(self, region: Region, **changes: Any) -> Index:
        """Write a region, and the manifest."""
        request = msgspec.structs.replace(request_for(region), **changes)
        index, warning = self.worker.persist(request)
        assert warning == ""
        return index

    def window(self) -> tuple[Region, WindowState]:
        """Have a region that holds a window."""
        return fill_window(self.tmp_path / "rank")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def reader_of(storage: Storage, iteration: int) -> StorageReader:
    manifest = manifest_of(storage, iteration)
    (file,) = manifest.files
    version = Version(
        rank=0,
        iteration=iteration,
        lineage="run-a",
        history=manifest.identity.history,
        node=None,
        path=file.index,
        tier=STORAGE,
        window=manifest.window,
        file=file,
    )
    return StorageReader.open(storage, version)


@pytest.mark.parametrize("number", range(7))
def test_flipped_byte_in_any_version_of_a_window_is_found_before_it_is_written(
    desk: Desk, number: int
) -> None:
    region, window = desk.window()
    name, unit = list(window.index.entries())[number]
    region.mapping[unit.offset + unit.num_bytes - 1] ^= 0x10
    with pytest.raises(CorruptStateError, match=f"unit {name} does not match its checksum"):
        desk.persist(region)
    assert desk.storage.names_in(iteration_directory(7)) == []


def test_window_that_was_written_before_the_writer_died_is_not_written_again(
    desk: Desk,
) -> None:
    region, _ = desk.window()
    first = desk.persist(region, writes_manifest=False)
    region.data_path.unlink()
    assert desk.persist(region) == first
    assert complete_iterations(desk.storage) == [7]


def test_window_with_other_weights_than_those_on_storage_is_written_again(desk: Desk) -> None:
    region, window = desk.window()
    desk.persist(region, writes_manifest=False)
    unit = window.index.compute[0]["embedding"]
    start, end = unit.offset, unit.offset + unit.num_bytes
    region.mapping[start:end] = bytes(end - start)
    other = msgspec.structs.replace(unit, checksum=checksum(bytes(end - start)))
    compute = ({**window.index.compute[0], "embedding": other}, *window.index.compute[1:])
    index = msgspec.structs.replace(window.index, file=region.data_path.name, compute=compute)
    region.commit(encode(index), 7)
    desk.persist(region)
    _, content = read_unit(reader_of(desk.storage, 7), "embedding", 0)
    assert content == bytes(end - start)


# Manifests over the files of several ranks


def write_window(storage: Storage, rank: int, length: int, num_snapshots: int) -> None:
    """Write a rank's files: the first snapshots of a window, up to iteration 7."""
    data_path = rank_path(7, rank, file_tag(TWO_RANKS), "safetensors")
    first = 7 - num_snapshots + 1
    window = make_window(rank, first, length, TWO_RANKS, file=data_path.rpartition("/")[2])
    storage.write(data_path, [memoryview(window.content)])
    path = rank_path(7, rank, file_tag(TWO_RANKS), "json")
    storage.write_atomically(path, encode(window.up_to(num_snapshots)))


@pytest.mark.parametrize("odd_rank", [0, 1])
@pytest.mark.parametrize(("length", "num_snapshots"), [(2, 2), (1, 1), (4, 3), (3, 2)])
def test_manifest_over_windows_of_different_lengths_or_without_an_end_is_refused(
    desk: Desk, odd_rank: int, length: int, num_snapshots: int
) -> None:
    write_window(desk.storage, 1 - odd_rank, 3, 3)
    write_window(desk.storage, odd_rank, length, num_snapshots)
    with pytest.raises(CorruptStateError, match="does not belong to this checkpoint"):
        write_manifest(desk.storage, 7, file_tag(TWO_RANKS), 2)
    assert find_manifests(desk.storage, 7) == []
