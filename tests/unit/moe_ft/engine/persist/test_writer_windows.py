"""Windows go to storage whole and bit for bit, or not at all."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from moe_ft.engine.memory.regions import Region
from moe_ft.engine.persist.manifests import find_manifests, write_manifest
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Version
from moe_ft.recovery.readers import StorageReader, read_unit
from tests.unit.moe_ft.builders import (
    WindowState,
    fill_window,
    make_identity,
    make_window,
    manifest_of,
)
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.moe_ft.engine.persist.writer_office import request_for

TWO_RANKS = make_identity(world_size=2)


class Office:
    """A worker, and what it leaves on storage."""

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
def office(tmp_path: Path) -> Office:
    return Office(tmp_path)


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
        window=manifest.window,
        file=file,
    )
    return StorageReader(storage, version)


@pytest.mark.parametrize("number", range(7))
def test_flipped_byte_in_any_version_of_a_window_is_found_before_it_is_written(
    office: Office, number: int
) -> None:
    region, window = office.window()
    name, unit = list(window.index.entries())[number]
    region.mapping[unit.offset + unit.num_bytes - 1] ^= 0x10
    with pytest.raises(CorruptStateError, match=f"unit {name} does not match its checksum"):
        office.persist(region)
    assert office.storage.iterations() == []


def test_window_that_was_written_before_the_writer_died_is_not_written_again(
    office: Office,
) -> None:
    region, _ = office.window()
    first = office.persist(region, writes_manifest=False)
    region.data_path.unlink()
    assert office.persist(region) == first
    assert complete_iterations(office.storage) == [7]


def test_window_with_other_weights_than_those_on_storage_is_written_again(office: Office) -> None:
    region, window = office.window()
    office.persist(region, writes_manifest=False)
    unit = window.index.compute[0]["embedding"]
    start, end = unit.offset, unit.offset + unit.num_bytes
    region.mapping[start:end] = bytes(end - start)
    other = msgspec.structs.replace(unit, checksum=checksum(bytes(end - start)))
    compute = ({**window.index.compute[0], "embedding": other}, *window.index.compute[1:])
    index = msgspec.structs.replace(window.index, file=region.data_path.name, compute=compute)
    region.commit(encode(index), 7)
    office.persist(region)
    _, content = read_unit(reader_of(office.storage, 7), "embedding", 0)
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
    office: Office, odd_rank: int, length: int, num_snapshots: int
) -> None:
    write_window(office.storage, 1 - odd_rank, 3, 3)
    write_window(office.storage, odd_rank, length, num_snapshots)
    with pytest.raises(CorruptStateError, match="does not belong to this checkpoint"):
        write_manifest(office.storage, 7, file_tag(TWO_RANKS), 2)
    assert find_manifests(office.storage, 7) == []
