"""State that a start finds in memory and on storage, and its problems with the rest."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.memory.job_directory import own_directory, replica_directory
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import UnsafePathError
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import encode
from moe_ft.recovery.inventory import (
    Inventory,
    Problem,
    look_at_memory,
    look_at_storage,
    merge_packed,
    pack,
)
from moe_ft.recovery.readers import MemoryReader
from tests.unit.moe_ft.builders import (
    fill_region,
    fill_window,
    make_identity,
    persist_checkpoint,
    persist_rank,
    persist_window,
)
from tests.unit.moe_ft.faulty_storage import faulty_urls, install
from tests.unit.moe_ft.planning.test_local_recovery import failure, found_logs
from tests.unit.moe_ft.planning.test_recovery import make_version


def look(node_dir: Path, job_id: str = "job") -> Inventory:
    return look_at_memory(node_dir, "node-a", job_id)


# Memory


def test_version_says_where_it_is_and_which_run_it_belongs_to(tmp_path: Path) -> None:
    identity = make_identity("run-b", ((0, 0), (1, 4)))
    fill_region(own_directory(tmp_path, 2), 1, rank=2, iteration=5, identity=identity)
    (version,) = look(tmp_path).versions
    assert (version.node, version.path) == ("node-a", "rank_00002/region_1.json")
    assert (version.lineage, version.history) == ("run-b", identity.history)


@pytest.mark.parametrize("is_replica", [False, True])
def test_version_says_whether_it_is_a_replica(tmp_path: Path, is_replica: bool) -> None:
    directory = replica_directory(tmp_path, 2, 9) if is_replica else own_directory(tmp_path, 2)
    fill_region(directory, rank=2)
    (version,) = look(tmp_path).versions
    assert (version.rank, version.is_replica) == (2, is_replica)


def test_state_of_another_job_is_rejected_by_name(tmp_path: Path) -> None:
    fill_region(own_directory(tmp_path, 0), identity=make_identity(job_id="other"))
    inventory = look(tmp_path)
    assert inventory.versions == []
    assert inventory.identities == []
    text = "memory of node node-a: rank_00000/region_0.json is of another job, 'other'"
    assert inventory.problems == [Problem(text=text, is_state=False)]


def truncate_index(region: Region) -> None:
    region.index_path.write_bytes(region.index_path.read_bytes()[:-1])


def flip_index(region: Region) -> None:
    content = bytearray(region.index_path.read_bytes())
    content[100] ^= 1
    region.index_path.write_bytes(content)


def truncate_data(region: Region) -> None:
    os.truncate(region.data_path, region.num_bytes - 1)


def empty_data(region: Region) -> None:
    os.truncate(region.data_path, 0)


def remove_data(region: Region) -> None:
    region.data_path.unlink()


def hide_index_in_directory(region: Region) -> None:
    region.index_path.unlink()
    region.index_path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (truncate_index, "is not a complete file of moe_ft"),
        (flip_index, "its checksum does not match"),
        (truncate_data, r"region_0\.safetensors has \d+ bytes, not \d+"),
        (empty_data, r"region_0\.safetensors has 0 bytes, not \d+"),
        (remove_data, "No such file"),
        (hide_index_in_directory, "is not a regular file"),
    ],
)
def test_state_that_is_damaged_is_a_problem_with_its_place_and_reason(
    tmp_path: Path, spoil: Callable[[Region], None], reason: str
) -> None:
    region, _ = fill_region(own_directory(tmp_path, 0))
    fill_region(own_directory(tmp_path, 1), rank=1)
    spoil(region)
    inventory = look(tmp_path)
    assert [version.rank for version in inventory.versions] == [1]
    (problem,) = inventory.problems
    assert problem.text.startswith("memory of node node-a: rank_00000/region_0.json")
    assert re.search(reason, problem.text)
    assert inventory.has_state


@pytest.mark.parametrize("num_snapshots", [1, 3])
@pytest.mark.parametrize("complete_iteration", [None, 4])
def test_memory_is_state_that_is_lost_only_if_all_ranks_had_one(
    tmp_path: Path, num_snapshots: int, complete_iteration: int | None
) -> None:
    region, window = fill_window(own_directory(tmp_path, 0))
    index = msgspec.structs.replace(
        window.up_to(num_snapshots),
        file=region.data_path.name,
        complete_iteration=complete_iteration,
    )
    region.commit(encode(index), index.iteration)
    assert look(tmp_path).has_state == (complete_iteration is not None)


def test_look_at_memory_changes_nothing(tmp_path: Path) -> None:
    fill_region(own_directory(tmp_path, 0), identity=make_identity(job_id="other"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    look(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# Storage


def test_iteration_without_a_manifest_is_a_problem_and_no_version(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    persist_rank(storage, 0, 5, make_identity())
    inventory = look_at_storage(storage)
    assert inventory.versions == []
    text = f"{tmp_path}/iter_0000005 has no manifest: it was never completed"
    assert inventory.problems == [Problem(text=text, is_state=False)]


def test_manifest_that_is_corrupt_is_a_problem_and_others_are_found(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    for iteration in (5, 6):
        persist_checkpoint(storage, iteration, make_identity())
    manifest = tmp_path / "iter_0000006" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-2])
    inventory = look_at_storage(storage)
    assert [version.iteration for version in inventory.versions] == [5]
    (problem,) = inventory.problems
    assert "iter_0000006/manifest.json is not a complete file" in problem.text
    assert problem.is_state


@pytest.mark.parametrize("back_end", ["local", "objects"])
def test_storage_that_cannot_be_looked_at_is_a_problem_instead_of_empty(
    tmp_path: Path, back_end: str
) -> None:
    with install() as injector:
        storage = Storage(faulty_urls(tmp_path)[back_end])
        persist_checkpoint(storage, 5, make_identity())
        injector.broken = (("info", ""),)
        inventory = look_at_storage(storage)
    assert [problem for problem in inventory.problems if "injected failure" in problem.text]
    assert inventory.is_unreadable


# Windows


@pytest.mark.parametrize("num_snapshots", [1, 2])
@pytest.mark.parametrize("is_replica", [False, True])
def test_window_that_is_not_whole_is_a_problem_and_no_version(
    tmp_path: Path, num_snapshots: int, is_replica: bool
) -> None:
    directory = replica_directory(tmp_path, 0, 9) if is_replica else own_directory(tmp_path, 0)
    fill_window(directory, num_snapshots=num_snapshots)
    inventory = look(tmp_path)
    assert inventory.versions == []
    (problem,) = inventory.problems
    assert f"has {num_snapshots} of the 3 snapshots of a window" in problem.text
    assert problem.text.startswith(f"memory of node node-a: {directory.name}/region_0.json")


@pytest.mark.parametrize("tier", ["memory", "storage"])
def test_window_says_with_which_settings_it_must_be_replayed(tmp_path: Path, tier: str) -> None:
    replay_settings = {"--seq-length": 64, "--lr": 1e-3}
    identity = msgspec.structs.replace(make_identity(), replay_settings=replay_settings)
    if tier == "memory":
        fill_window(own_directory(tmp_path, 0), identity=identity)
        (version,) = look(tmp_path).versions
    else:
        persist_window(Storage(str(tmp_path)), 7, identity)
        (version,) = look_at_storage(Storage(str(tmp_path))).versions
    assert json.loads(version.replay_settings) == replay_settings


# Several looks, other jobs


def test_run_with_other_settings_is_listed_again() -> None:
    inventory = Inventory()
    inventory.add_identity("here", make_identity())
    inventory.add_identity("there", make_identity(world_size=8))
    other = msgspec.structs.replace(make_identity(), fingerprint={"--seed": 2})
    inventory.add_identity("elsewhere", other)
    assert [where for where, _ in inventory.identities] == ["here", "there", "elsewhere"]


def test_what_nodes_have_found_is_the_same_after_it_has_travelled() -> None:
    found = []
    for node, world_size in (("a", 1), ("b", 8)):
        each = Inventory(
            versions=[
                make_version(0, 5, node=node),
                make_version(1, 6, node=node, is_replica=True),
            ],
            logs=[replace(log, node=node) for log in found_logs(failure({1}))],
            problems=[Problem(text=f"memory of node {node}", is_state=True, iteration=7)],
            lineages={f"run-{node}"},
        )
        each.add_identity(node, make_identity(world_size=world_size))
        each.add_identity(node, msgspec.structs.replace(make_identity(), superseded=("old",)))
        found.append(each)
    expected = Inventory()
    for each in found:
        expected.merge(each)
    assert merge_packed(map(pack, found)) == expected


def test_ranks_that_do_not_plan_know_starts_and_above_all_what_could_not_be_read() -> None:
    inventory = Inventory(versions=[make_version(0, 5)], lineages={"run-a"})
    inventory.add_identity("here", make_identity())
    inventory.problems = [Problem(text=str(each), is_state=True) for each in range(1000)]
    inventory.problems.append(Problem(text="away", is_state=True, is_unread=True))
    summary = inventory.summary()
    assert summary.is_unreadable and summary.names == inventory.names
    assert summary.starts == inventory.starts and not summary.versions
    assert len(summary.problems) < 100


STRANGER = 65534


def link(path: Path) -> None:
    """Put a link in the place of something, to the same elsewhere."""
    target = path.parent.parent.parent / f"elsewhere_{path.name}"
    shutil.move(path, target)
    path.symlink_to(target)


def open_to_others(path: Path) -> None:
    path.chmod(0o777)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, STRANGER, STRANGER)


@pytest.mark.parametrize("name", ["", "region_0.json", "region_0.safetensors"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (link, "is a symbolic link"),
        (open_to_others, "can be written by other users"),
        (give_away, f"belongs to user {STRANGER}"),
    ],
)
def test_state_that_is_not_safely_ours_is_not_used_and_said_to_be_there(
    tmp_path: Path, name: str, spoil: Callable[[Path], None], reason: str
) -> None:
    region, _ = fill_region(own_directory(tmp_path / "node", 0))
    spoil(region.directory / name)
    found = look_at_memory(tmp_path / "node", "node-a", "job")
    assert found.versions == []
    (problem,) = found.problems
    assert reason in problem.text
    assert "memory of node node-a: rank_00000" in problem.text
    with pytest.raises(UnsafePathError, match=reason):
        MemoryReader(region.index_path).read_header()
