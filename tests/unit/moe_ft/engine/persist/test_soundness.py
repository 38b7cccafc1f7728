"""Checks of checkpoints on storage, and of regions in memory: anything that contradicts itself is found."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.persist.soundness import (
    Listings,
    check_checkpoint,
    check_manifest,
    check_references,
    check_region,
    check_sizes,
    read_file,
)
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, iteration_directory
from moe_ft.format.manifest import Manifest, UnitSource
from tests.unit.moe_ft.builders import fill_region, make_identity, persist_checkpoint
from tests.unit.moe_ft.engine.persist.checkpoints import LOCAL

ITERATION = 5
PATH = f"{iteration_directory(ITERATION)}/manifest.json"


@pytest.fixture
def manifest(storage: Storage) -> Manifest:
    storage.make_root()
    return persist_checkpoint(storage, ITERATION, make_identity(world_size=2))


def test_checkpoint_that_was_just_written_is_sound(storage: Storage, manifest: Manifest) -> None:
    check_manifest(manifest, PATH, "here")
    check_checkpoint(storage, manifest, Listings(storage))
    check_sizes(Listings(storage), manifest)
    indexes = {file.data: read_file(storage, manifest, file) for file in manifest.files}
    check_references(manifest, indexes)
    assert [index.rank for index in indexes.values()] == [0, 1]


def of_another_iteration(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, iteration=ITERATION + 1)


def without_a_rank(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, files=manifest.files[:1])


def without_units(manifest: Manifest) -> Manifest:
    units = {"embedding": UnitSource(iteration=ITERATION, level="full", files=())}
    return msgspec.structs.replace(manifest, units=units)


def with_a_file_elsewhere(manifest: Manifest) -> Manifest:
    file = msgspec.structs.replace(manifest.files[0], data="elsewhere/rank_00000.safetensors")
    return msgspec.structs.replace(manifest, files=(file, manifest.files[1]))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (of_another_iteration, "of iteration 6"),
        (without_a_rank, r"ranks \[1\] is missing"),
        (without_units, "lists no units"),
        (with_a_file_elsewhere, "elsewhere/rank_00000.safetensors as its own"),
    ],
)
def test_manifest_that_contradicts_itself_is_corrupt(
    manifest: Manifest, spoil: Callable[[Manifest], Manifest], expected: str
) -> None:
    with pytest.raises(CorruptStateError, match=expected):
        check_manifest(spoil(manifest), PATH, "here")


@LOCAL
def test_index_that_was_changed_is_not_the_one_that_the_manifest_names(
    storage: Storage, manifest: Manifest
) -> None:
    file = manifest.files[1]
    path = Path(storage.url) / file.index
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CorruptStateError, match="not the index that the manifest names"):
        check_checkpoint(storage, manifest, Listings(storage))


@LOCAL
def test_data_that_was_cut_short_is_found_by_its_size(storage: Storage, manifest: Manifest) -> None:
    file = manifest.files[1]
    path = Path(storage.url) / file.data
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CorruptStateError, match=f"{file.num_bytes - 1} bytes, not {file.num_bytes}"
    ):
        check_sizes(Listings(storage), manifest)


@LOCAL
def test_data_that_is_missing_is_an_error(storage: Storage, manifest: Manifest) -> None:
    (Path(storage.url) / manifest.files[0].data).unlink()
    with pytest.raises(OSError):
        check_checkpoint(storage, manifest, Listings(storage))


def test_index_of_another_run_is_refused(storage: Storage, manifest: Manifest) -> None:
    other = msgspec.structs.replace(manifest, identity=make_identity("run-b", world_size=2))
    with pytest.raises(CorruptStateError, match="run-b|history"):
        check_checkpoint(storage, other, Listings(storage))


def test_region_is_of_the_rank_whose_directory_it_is_in(tmp_path: Path) -> None:
    region, index = fill_region(own_directory(tmp_path, 3), rank=3)
    check_region(index, region.index_path)
    stranger = msgspec.structs.replace(index, rank=4)
    with pytest.raises(CorruptStateError, match="says rank 4, in the directory of rank 3"):
        check_region(stranger, region.index_path)


def test_region_that_is_shorter_than_its_index_says_is_corrupt(tmp_path: Path) -> None:
    region, index = fill_region(own_directory(tmp_path, 3), rank=3)
    region.data_path.write_bytes(b"short")
    with pytest.raises(CorruptStateError, match=f"has 5 bytes, not {index.file_bytes}"):
        check_region(index, region.index_path)
