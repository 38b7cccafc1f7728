"""Checks of checkpoints on storage, and of regions in memory: anything that contradicts itself is found."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.persist import soundness
from moe_ft.engine.persist.soundness import (
    Listings,
    check_checkpoint,
    check_is_finite,
    check_manifest,
    check_region,
    check_sizes,
)
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, iteration_directory
from moe_ft.format.entries import TensorEntry, UnitEntry
from moe_ft.format.manifest import Manifest, UnitSource
from moe_ft.state.slices import DTYPES
from tests.unit.moe_ft.builders import fill_region, make_identity, persist_checkpoint
from tests.unit.moe_ft.engine.persist.checkpoints import LOCAL

ITERATION = 5
PATH = f"{iteration_directory(ITERATION)}/manifest.json"


@pytest.fixture
def manifest(storage: Storage) -> Manifest:
    storage.make_root()
    return persist_checkpoint(storage, ITERATION, make_identity(world_size=2))


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


def with_more_ranks_than_a_machine_can_count(manifest: Manifest) -> Manifest:
    identity = msgspec.structs.replace(manifest.identity, world_size=1 << 62)
    return msgspec.structs.replace(manifest, identity=identity)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            with_more_ranks_than_a_machine_can_count,
            r"not one of each of \d+ ranks.* \[2, 3, 4, 5, 6",
        ),
        (of_another_iteration, "claims iteration 6"),
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


FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]


def check(content: bytes, dtype: str, packing: str = "exact", count: int | None = None) -> None:
    count = len(content) // DTYPES[dtype].itemsize if count is None else count
    tensor = TensorEntry("a.weight", "param", 0, count, dtype, 0, packing=packing)
    entry = UnitEntry(
        offset=0, num_bytes=len(content), iteration=5, level="full", checksum="", tensors=(tensor,)
    )
    check_is_finite("embedding", entry, memoryview(content))


def is_refused(content: bytes, dtype: str) -> bool:
    try:
        check(content, dtype)
    except CorruptStateError:
        return True
    return False


@pytest.mark.parametrize("dtype", [name for name in FLOATS if DTYPES[name].itemsize <= 2])
def test_every_number_of_a_short_format_is_judged_as_torch_does(dtype: str) -> None:
    kind = {1: np.uint8, 2: np.uint16}[DTYPES[dtype].itemsize]
    every = np.arange(2 ** (8 * DTYPES[dtype].itemsize)).astype(kind)
    are_finite = torch.isfinite(torch.from_numpy(every).view(DTYPES[dtype]).float()).numpy()
    check(every[are_finite].tobytes(), dtype)
    assert all(is_refused(each.tobytes(), dtype) for each in every[~are_finite])


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_every_kind_of_number_of_a_long_format_is_judged_as_torch_does(dtype: str) -> None:
    limits = torch.finfo(DTYPES[dtype])
    kinds = [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 2]
    kinds += [float("inf"), -float("inf"), float("nan"), -float("nan")]
    numbers = torch.tensor(kinds, dtype=DTYPES[dtype])
    found = [is_refused(each.numpy().tobytes(), dtype) for each in numbers]
    assert found == (~torch.isfinite(numbers)).tolist()


@pytest.mark.parametrize("position", [0, 3, 4, 9])
def test_number_that_is_not_finite_is_found_in_every_block(
    monkeypatch: pytest.MonkeyPatch, position: int
) -> None:
    monkeypatch.setattr(soundness, "_BLOCK_BYTES", 16)
    numbers = np.ones(10, np.float32)
    check(numbers.tobytes(), "F32")
    numbers[position] = np.nan
    with pytest.raises(CorruptStateError, match=r"param of a\.weight in unit embedding holds NaN"):
        check(numbers.tobytes(), "F32")


def test_scale_that_is_not_finite_is_found_after_its_packed_numbers() -> None:
    content = bytearray(128 + 4)
    check(bytes(content), "F32", "fp8-e4m3-block", 128)
    content[128:] = np.float32(np.inf).tobytes()
    with pytest.raises(CorruptStateError, match="holds NaN or infinity"):
        check(bytes(content), "F32", "fp8-e4m3-block", 128)


def test_integers_and_tensors_without_numbers_are_finite() -> None:
    check(b"\xff" * 64, "I64")
    check(b"\xff" * 64, "U8")
    check(b"", "F32")
