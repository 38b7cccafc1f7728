"""The writer: requests become checkpoints, with the units of the pool that they name."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.memory.pool import Pool
from moe_ft.engine.persist.manifests import find_manifests, read_manifest
from moe_ft.engine.persist.writer import (
    PersistRequest,
    PersistWorker,
)
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, rank_path
from moe_ft.format.encoding import encode
from moe_ft.format.entries import FileEntry
from moe_ft.format.manifest import Manifest
from moe_ft.planning.recovery import Version
from moe_ft.recovery.readers import StorageReader, read_unit
from tests.unit.moe_ft.builders import (
    add_units,
    fill_region,
    make_identity,
    put_in_slot,
    rotating_unit,
)
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations
from tests.unit.moe_ft.engine.persist.writer_office import (
    FAR_S,
    TWO_RANKS,
    Office,
    opened,
    request_for,
    tag_of,
)


def manifest_of(storage: Storage, iteration: int) -> Manifest:
    """Return the only manifest of an iteration."""
    (path,) = find_manifests(storage, iteration)
    return read_manifest(storage, path)


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with opened(tmp_path, str(tmp_path / "storage")) as office:
        yield office


# From a request to files


def test_request_becomes_a_complete_checkpoint(tmp_path: Path, office: Office) -> None:
    region, _ = fill_region(tmp_path / "rank", iteration=5)
    office.ask(region)
    assert office.result().error == ""
    assert complete_iterations(office.storage) == [5]


def test_result_says_what_was_written_where(tmp_path: Path, office: Office) -> None:
    region, index = fill_region(tmp_path / "rank", iteration=5)
    office.ask(region)
    result = office.result()
    assert (result.rank, result.iteration, result.num_units) == (0, 5, 3)
    assert (result.num_bytes, result.path) == (index.file_bytes, office.storage.url)


def test_request_from_before_the_worker_started_is_served(tmp_path: Path) -> None:
    region, _ = fill_region(tmp_path / "rank", iteration=5)
    with opened(tmp_path, str(tmp_path / "storage"), starts=False) as office:
        office.ask(region)
        office.start()
        assert office.result().error == ""


def test_request_without_the_manifest_writes_only_the_ranks_own_files(
    tmp_path: Path, office: Office
) -> None:
    region, _ = fill_region(tmp_path / "rank", rank=1, identity=TWO_RANKS)
    office.ask(region, rank=1)
    assert office.result(1).error == ""
    assert office.storage.iterations() == [5]
    assert not find_manifests(office.storage, 5)


# Units of the pool


class Rotation:
    """A rank with three experts in a pool, and what its persists leave on storage."""

    def __init__(self, tmp_path: Path, keep: int = 2) -> None:
        self.tmp_path, self.storage = tmp_path, Storage(str(tmp_path / "storage"))
        self.worker = PersistWorker(tmp_path, self.storage, keep)
        self.pool = Pool(tmp_path / "rank", 4 * 33, 6)
        self.pool.open()
        self.at: dict[int, int] = {}
        self.previous = ""

    def request(self, iteration: int, experts: Sequence[int]) -> PersistRequest:
        """Save all experts at an iteration, and ask for some of them to be written."""
        region, index = fill_region(self.tmp_path / "rank", iteration % 2, iteration=iteration)
        slots = [3 * (iteration % 2) + expert for expert in range(3)]
        units = dict(
            put_in_slot(self.pool, slot, expert, iteration=iteration)
            for expert, slot in enumerate(slots)
        )
        add_units(region, index, units)
        self.at.update(dict.fromkeys(experts, iteration))
        return PersistRequest(
            rank=0,
            iteration=iteration,
            index=str(region.index_path),
            data=str(region.data_path),
            rotating=tuple(str(rotating_unit(expert)) for expert in experts),
            previous=self.previous,
            tag=tag_of(region),
            writes_manifest=True,
            deadline_s=FAR_S,
        )

    def persist(self, iteration: int, experts: Sequence[int]) -> None:
        """Write a checkpoint, which the next one goes back to."""
        request = self.request(iteration, experts)
        self.worker.persist(request)
        self.previous = rank_path(iteration, 0, request.tag, "json")

    def readable(self, iteration: int) -> dict[int, int]:
        """Return the iteration of each expert that a checkpoint has, after reading all of its units."""
        (file,) = manifest_of(self.storage, iteration).files
        reader = StorageReader(self.storage, version_of(file, iteration))
        for name in reader.index.units:
            read_unit(reader, name)
        units = reader.index.units
        names = {expert: str(rotating_unit(expert)) for expert in range(3)}
        return {number: units[name].iteration for number, name in names.items() if name in units}


def version_of(file: FileEntry, iteration: int) -> Version:
    return Version(
        rank=0,
        iteration=iteration,
        lineage="run-a",
        history=make_identity().history,
        node=None,
        path=file.index,
        file=file,
    )


@pytest.fixture
def rotation(tmp_path: Path) -> Rotation:
    return Rotation(tmp_path)


def test_manifest_says_how_old_each_expert_is_and_where_it_lies(rotation: Rotation) -> None:
    for iteration, experts in ((1, [0]), (2, [1])):
        rotation.persist(iteration, experts)
    manifest = manifest_of(rotation.storage, 2)
    files = [file.data for file in (*manifest.files, *manifest.older)]
    source = manifest.units[str(rotating_unit(0))]
    assert source.iteration == 1
    assert [files[position] for position in source.files] == [manifest.older[0].data]
    assert str(rotating_unit(2)) not in manifest.units


@given(st.lists(st.sets(st.integers(0, 2), max_size=2), min_size=1, max_size=6), st.integers(1, 3))
@settings(max_examples=30)
def test_retention_never_deletes_what_a_checkpoint_finds_in_older_files(
    history: list[set[int]], keep: int
) -> None:
    with TemporaryDirectory() as directory:
        rotation = Rotation(Path(directory), keep)
        for iteration, experts in enumerate(history, 1):
            rotation.persist(iteration, sorted(experts))
            complete = [
                i for i in rotation.storage.iterations() if find_manifests(rotation.storage, i)
            ]
            assert len(complete) == min(keep, iteration)
            for each in complete:
                rotation.readable(each)
            assert rotation.readable(iteration) == rotation.at


def test_expert_with_a_flipped_byte_in_its_slot_is_not_written(rotation: Rotation) -> None:
    request = rotation.request(1, [0])
    rotation.pool.mapping[rotation.pool.offset_of(3)] ^= 0x40
    with pytest.raises(CorruptStateError, match=r"unit layer\.9\.expert\.0 does not match"):
        rotation.worker.persist(request)
    assert complete_iterations(rotation.storage) == []


def test_rank_of_which_other_ranks_save_everything_writes_its_record(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "storage"))
    worker = PersistWorker(tmp_path, storage, keep=1)
    other, _ = fill_region(tmp_path / "rank_1", rank=1, identity=TWO_RANKS)
    changes = {"rank": 1, "writes_manifest": False}
    worker.persist(msgspec.structs.replace(request_for(other), **changes))
    region, index = fill_region(tmp_path / "rank", identity=TWO_RANKS)
    region.commit(encode(msgspec.structs.replace(index, units={})), index.iteration)
    worker.persist(request_for(region))
    assert complete_iterations(storage) == [5]
