"""Damage that `verify` finds, and that a recovery refuses as well."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.memory.job_directory import own_directory, replica_directory
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import UnitEntry
from moe_ft.recovery.inspect.verification import verify
from moe_ft.recovery.inventory import look_at_memory, look_at_storage
from moe_ft.recovery.readers import StorageReader
from tests.unit.moe_ft.builders import (
    fill_region,
    fill_window,
    make_identity,
    make_window,
    persist_checkpoint,
)
from tests.unit.moe_ft.commands.damaged import change as rewrite
from tests.unit.moe_ft.commands.damaged import flip
from tests.unit.moe_ft.recovery.inspect.test_holdings import in_memory, on_storage

ENTRIES = list(make_window().index.entries())


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("write", [in_memory, on_storage])
def test_window_as_it_was_written_is_right(
    tmp_path: Path, length: int, write: Callable[..., object]
) -> None:
    write(tmp_path, length=length)
    right, wrong = verify(str(tmp_path))
    assert (len(right), wrong) == (1, [])


@pytest.mark.parametrize("num_snapshots", [1, 2])
def test_part_of_a_window_is_right_as_far_as_it_goes(tmp_path: Path, num_snapshots: int) -> None:
    region, window = in_memory(tmp_path, num_snapshots=num_snapshots)
    rest = window.layout.ends[num_snapshots - 1]
    region.mapping[rest:] = bytes(len(window.content) - rest)
    fill_region(own_directory(tmp_path, 1), rank=1)  # something complete
    assert verify(str(tmp_path))[1] == []


@pytest.mark.parametrize("number", range(len(ENTRIES)))
@pytest.mark.parametrize("tier", ["memory", "storage"])
@pytest.mark.parametrize("place", [lambda unit: 0, lambda unit: unit.num_bytes - 1])
def test_flipped_byte_in_any_version_of_a_window_is_found_and_named(
    tmp_path: Path, tier: str, number: int, place: Callable[[UnitEntry], int]
) -> None:
    data = in_memory(tmp_path)[0].data_path if tier == "memory" else on_storage(tmp_path)
    name, unit = ENTRIES[number]
    flip(data, unit.offset + place(unit))
    (problem,) = verify(str(tmp_path))[1]
    assert f"unit {name} does not match its checksum" in problem


@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_window_whose_file_is_cut_off_is_wrong(tmp_path: Path, tier: str) -> None:
    data = in_memory(tmp_path)[0].data_path if tier == "memory" else on_storage(tmp_path)
    os.truncate(data, data.stat().st_size - 1)
    assert len(verify(str(tmp_path))[1]) == 1


def test_window_at_a_peer_is_verified_like_the_ranks_own(tmp_path: Path) -> None:
    region, window = fill_window(replica_directory(tmp_path, 0, 9))
    region.mapping[window.layout.ends[-1] - 1] ^= 0x01
    (problem,) = verify(str(tmp_path))[1]
    assert "replica" in problem


def test_window_and_single_snapshot_side_by_side_are_both_verified(tmp_path: Path) -> None:
    on_storage(tmp_path)
    persist_checkpoint(Storage(str(tmp_path)), 9, make_identity())
    right, wrong = verify(str(tmp_path))
    assert (len(right), wrong) == (2, [])


# What a checksum alone does not show: verify and recovery ask the same code


def recoverable(storage: Storage) -> list[int]:
    """Return the ranks whose part of some checkpoint a recovery would open."""
    ranks = []
    for version in look_at_storage(storage).versions:
        try:
            StorageReader.open(storage, version)
        except OSError:
            continue
        ranks.append(version.rank)
    return ranks


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda body: body.update(iteration=999), "claims iteration 999"),
        (lambda body: body["identity"].update(lineage="other"), "is of run run-a, not other"),
        (lambda body: body["files"][0].update(num_bytes=1), "has size"),
        (lambda body: body.update(units={}), "lists no units"),
        (lambda body: body["files"][0].update(rank=1), r"names files of ranks \[1, 1\]"),
        (
            lambda body: body["files"].reverse(),
            r"names files of ranks \[1, 0\] in this order",
        ),
        (
            lambda body: body["files"][0].update(index_checksum="0123456789abcdef"),
            "is not the index that the manifest names",
        ),
        (
            lambda body: body["identity"]["history"][0].__setitem__(2, "another"),
            "has history",
        ),
    ],
)
def test_manifest_that_contradicts_its_files_is_wrong_and_not_recovered_from(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    storage = Storage(str(tmp_path))
    persist_checkpoint(storage, 7, make_identity(world_size=2))
    assert recoverable(storage) == [0, 1]
    rewrite(tmp_path / "iter_0000007/manifest.json", change)
    right, wrong = verify(str(tmp_path))
    assert right == []
    assert any(re.search(problem, each) for each in wrong), wrong
    lineages = {version.lineage for version in look_at_storage(storage).versions}
    assert recoverable(storage) != [0, 1] or lineages == {"other"}


def test_region_in_another_ranks_directory_is_wrong_and_not_recovered_from(tmp_path: Path) -> None:
    node_dir = tmp_path / "job/node-a"
    fill_region(own_directory(node_dir, 0))
    rewrite(own_directory(node_dir, 0) / "region_0.json", lambda body: body.update(rank=77))
    inventory = look_at_memory(node_dir, "node-a", "job")
    assert (inventory.versions, inventory.has_state) == ([], True)
    assert any("says rank 77" in each for each in verify(str(tmp_path))[1])


def test_numbers_that_are_not_finite_are_wrong(tmp_path: Path) -> None:
    region, index = fill_region(own_directory(tmp_path, 0))
    unit = index.units["embedding"]
    start = unit.offset + unit.tensors[0].offset
    region.mapping[start : start + 4] = b"\x00\x00\xc0\x7f"  # NaN
    content = region.mapping[unit.offset : unit.offset + unit.num_bytes]
    rewrite(
        region.index_path,
        lambda body: body["units"]["embedding"].update(checksum=checksum(bytes(content))),
    )
    (problem,) = verify(str(tmp_path))[1]
    assert "param of embedding.weight in unit embedding holds NaN or infinity" in problem


def test_directory_in_which_nothing_is_complete_is_wrong(tmp_path: Path) -> None:
    persist_checkpoint(Storage(str(tmp_path)), 7, make_identity())
    (tmp_path / "iter_0000007/manifest.json").unlink()
    assert verify(str(tmp_path))[1] == [f"{tmp_path} holds nothing that is complete"]


def test_all_damage_of_a_checkpoint_is_reported(tmp_path: Path) -> None:
    manifest = persist_checkpoint(Storage(str(tmp_path)), 7, make_identity(world_size=3))
    (tmp_path / manifest.files[0].index).unlink()
    os.truncate(tmp_path / manifest.files[1].data, 0)
    flip(tmp_path / manifest.files[2].data, 0)
    assert len(verify(str(tmp_path))[1]) == 3
