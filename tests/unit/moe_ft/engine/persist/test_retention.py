"""Retention: what is deleted from a persist directory, and what never is."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.persist.manifests import find_manifests
from moe_ft.engine.persist.retention import Retention
from moe_ft.engine.persist.soundness import Listings, check_checkpoint
from moe_ft.errors import LockLostError
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import encode
from moe_ft.format.identity import Identity
from moe_ft.format.manifest import MANIFEST_NAME, Manifest
from tests.object_store import ObjectStore
from tests.unit.moe_ft.builders import (
    make_identity,
    manifest_of,
    persist_checkpoint,
    persist_rank,
    persist_window,
)
from tests.unit.moe_ft.engine.persist.checkpoints import (
    LOCAL,
    complete_iterations,
    manifest_path,
    names,
    save,
)
from tests.unit.moe_ft.faulty_storage import Injector, faulty_urls, install

TWO_RANKS = make_identity(world_size=2)
OTHER_RUN = make_identity("run-b")
BACK_ENDS = pytest.mark.parametrize("back_end", ["local", "objects"])


def data_path(storage: Storage, iteration: int, identity: Identity) -> Path:
    return Path(storage.url) / rank_path(iteration, 0, file_tag(identity), "safetensors")


@given(
    keep=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["run-a", "run-b"]), st.integers(1, 15)),
        unique_by=lambda step: step[1],
        max_size=10,
    ),
)
@settings(max_examples=50)
def test_retention_of_runs_in_one_directory_follows_the_rule_for_the_writing_run_only(
    keep: int, steps: list[tuple[str, int]]
) -> None:
    expected: dict[str, set[int]] = {"run-a": set(), "run-b": set()}
    with install():
        storage = Storage(faulty_urls(Path())["objects"])
        for lineage, iteration in steps:
            save(storage, iteration, make_identity(lineage), keep)
            # Those from beyond it stay until the run passes them.
            newer = {each for each in expected[lineage] if each > iteration}
            older = sorted(each for each in expected[lineage] if each < iteration)
            kept = older[len(older) - min(keep - 1, len(older)) :]
            expected[lineage] = {iteration, *kept, *newer}
            assert set(complete_iterations(storage)) == set.union(*expected.values())


def test_checkpoint_is_unmade_before_its_files_are_removed(
    tmp_path: Path, injector: Injector
) -> None:
    storage = Storage(faulty_urls(tmp_path)["local"])
    save(storage, 1, TWO_RANKS, 1)
    injector.forget()
    save(storage, 2, TWO_RANKS, 1)
    removed = [path for name, path in injector.operations if name == "unlink"]
    assert removed[0].endswith(manifest_path(1))
    assert len(removed) == 5


def rewritten(storage: Storage, iteration: int, older: Manifest) -> Manifest:
    """Return a checkpoint of an iteration that also needs the files of an older one."""
    manifest = persist_checkpoint(storage, iteration, older.identity)
    manifest = msgspec.structs.replace(manifest, older=older.files)
    storage.write_atomically(manifest_path(iteration), encode(manifest))
    return manifest


def test_files_that_never_became_a_checkpoint_are_removed(storage: Storage) -> None:
    for rank in (0, 1):
        persist_rank(storage, rank, 3, TWO_RANKS)
    Retention(storage, 1).remove_incomplete(before=4)
    assert storage.iterations() == []


@LOCAL
def test_files_that_are_not_of_moe_ft_stay(storage: Storage) -> None:
    persist_checkpoint(storage, 1, make_identity())
    foreign = [
        Path(storage.url) / "iter_0000001" / name
        for name in ("notes.txt", "rank_00000.safetensors", "rank_00000_0123abcd.pt")
    ]
    foreign += [Path(storage.url) / "latest", Path(storage.url) / "iter_0000001.tar"]
    for path in foreign:
        path.write_text("mine")
    save(storage, 2, make_identity(), 1)
    assert [path.read_text() for path in foreign] == ["mine"] * len(foreign)
    assert names(storage, 1) == {path.name for path in foreign[:3]}


def test_corrupt_manifest_and_its_files_are_not_deleted(storage: Storage) -> None:
    persist_checkpoint(storage, 3, make_identity())
    spoiled = storage.read(manifest_path(3))[:-9]
    storage.write_atomically(manifest_path(3), spoiled)
    before = names(storage, 3)
    for iteration in (4, 5, 6):
        save(storage, iteration, make_identity(), 1)
    assert names(storage, 3) == before
    assert storage.read(manifest_path(3)) == spoiled


@BACK_ENDS
def test_checkpoint_whose_manifest_cannot_be_looked_at_stays(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    storage = Storage(faulty_urls(tmp_path)[back_end])
    persist_checkpoint(storage, 1, OTHER_RUN)
    manifest = persist_checkpoint(storage, 2, make_identity())
    injector.broken = (("info", manifest_path(1)),)
    with suppress(OSError):
        Retention(storage, 1).remove_incomplete(before=2)
    with suppress(OSError):
        Retention(storage, 1).retain(manifest)
    injector.forget()
    assert complete_iterations(storage) == [2, 1]


@LOCAL
def test_checkpoint_that_was_sound_once_is_looked_at_again(storage: Storage) -> None:
    retention = Retention(storage, 2)
    for iteration in (1, 2):
        retention.retain(persist_checkpoint(storage, iteration, make_identity()))
    data_path(storage, 2, make_identity()).unlink()
    assert retention.retain(persist_checkpoint(storage, 3, make_identity())) == [2]
    assert complete_iterations(storage) == [3, 1]


def read_files(injector: Injector) -> list[str]:
    """Return the files that were read since the last `forget`, without their directories."""
    return [Path(path).name for name, path in injector.operations if name == "cat_file"]


def test_checkpoint_whose_manifest_was_just_written_is_not_read_again(
    tmp_path: Path, injector: Injector
) -> None:
    storage = Storage(faulty_urls(tmp_path)["objects"])
    manifest = persist_checkpoint(storage, 1, TWO_RANKS)
    injector.forget()
    Retention(storage, 1).retain(manifest)
    assert set(read_files(injector)) == {MANIFEST_NAME}


def test_older_checkpoint_is_read_once_by_a_new_writer(tmp_path: Path, injector: Injector) -> None:
    storage = Storage(faulty_urls(tmp_path)["objects"])
    older = persist_checkpoint(storage, 1, TWO_RANKS)
    retention = Retention(storage, 3)
    injector.forget()
    for iteration in (2, 3):
        retention.retain(persist_checkpoint(storage, iteration, TWO_RANKS))
    indexes = sorted(Path(file.index).name for file in older.files)
    read = [
        path for name, path in injector.operations if name == "cat_file" and "_0000001/" in path
    ]
    assert sorted(Path(path).name for path in read if MANIFEST_NAME not in path) == indexes


@pytest.mark.parametrize("world_size", [1, 9])
def test_operations_that_only_look_do_not_become_more_with_the_ranks(
    tmp_path: Path, injector: Injector, world_size: int
) -> None:
    storage = Storage(faulty_urls(tmp_path)["objects"])
    retention, identity = Retention(storage, 2), make_identity(world_size=world_size)
    retention.retain(persist_checkpoint(storage, 1, identity))
    newest = persist_checkpoint(storage, 2, identity)
    injector.forget()
    retention.retain(newest)
    assert len(injector.operations) < 35


@LOCAL
def test_data_file_in_the_place_of_which_is_a_link_to_it_is_there(
    tmp_path: Path, storage: Storage
) -> None:
    for iteration in (1, 2):
        persist_checkpoint(storage, iteration, make_identity())
    path = data_path(storage, 1, make_identity())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    Retention(storage, 2).retain(manifest_of(storage, 2))
    assert complete_iterations(storage) == [2, 1]


def test_directory_that_changes_while_it_is_listed_leaves_all_checkpoints(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (1, 2, 3):
        persist_checkpoint(storage, iteration, make_identity())
    list_directory = storage._file_system.ls

    def fail(path: str, detail: bool = False) -> Any:
        if detail:
            raise FileNotFoundError(path)
        return list_directory(path, detail=detail)

    monkeypatch.setattr(storage._file_system, "ls", fail)
    with pytest.raises(OSError, match="changed while it was listed"):
        Retention(storage, 1).retain(manifest_of(storage, 3))
    assert complete_iterations(storage) == [3, 2, 1]


@pytest.mark.parametrize("num_checks", range(4))
def test_lock_that_is_lost_during_deleting_ends_it_before_the_next_step(
    storage: Storage, num_checks: int
) -> None:
    for iteration in (1, 2, 3):
        persist_checkpoint(storage, iteration, make_identity())
    left = iter(range(num_checks))

    def check() -> None:
        if next(left, None) is None:
            raise LockLostError("another start has it")

    with pytest.raises(LockLostError):
        Retention(storage, 1, check).retain(manifest_of(storage, 3))
    num_manifests = sum(len(find_manifests(storage, iteration)) for iteration in (1, 2, 3))
    assert num_manifests == max(1, 3 - num_checks)  # the manifests first, then the directories
    assert len(storage.iterations()) == 3 - max(0, num_checks - 2)


def test_files_that_a_manifest_may_name_which_nobody_can_read_stay(storage: Storage) -> None:
    older = persist_checkpoint(storage, 1, make_identity())
    rewritten(storage, 2, older)
    spoiled = storage.read(manifest_path(2))[:-9]
    storage.write_atomically(manifest_path(2), spoiled)
    storage.remove(manifest_path(1))
    for iteration in (3, 4, 5):
        save(storage, iteration, make_identity(), 1)
    assert storage.exists(older.files[0].data)
    assert storage.iterations() == [5, 2, 1]


RUN, OTHER = make_identity(world_size=2), make_identity("run-b", world_size=2)


@pytest.fixture
def objects(s3: ObjectStore) -> Storage:
    return Storage(f"{s3.bucket()}/persist")


def test_manifest_that_is_not_listed_is_found_by_its_name(
    objects: Storage, s3: ObjectStore
) -> None:
    persist_checkpoint(objects, 5, RUN)
    with s3.listing_late("iter_0000005"):
        assert find_manifests(objects, 5) == [manifest_path(5)]
        assert find_manifests(objects, 4) == []


def test_files_of_an_older_checkpoint_whose_manifest_is_not_listed_stay(
    objects: Storage, s3: ObjectStore
) -> None:
    older, newest = persist_checkpoint(objects, 4, RUN), persist_checkpoint(objects, 5, RUN)
    with s3.listing_late("iter_0000004/manifest"):
        Retention(objects, 2).retain(newest)
    for each in (older, newest):
        check_checkpoint(objects, each, Listings(objects))


def test_files_of_the_newest_checkpoint_stay_whatever_name_its_manifest_has(
    objects: Storage, s3: ObjectStore
) -> None:
    persist_checkpoint(objects, 5, RUN)
    newest = persist_checkpoint(objects, 5, OTHER)
    with s3.listing_late("manifest_run-b"):
        Retention(objects, 1).retain(newest)
    check_checkpoint(objects, newest, Listings(objects))


RUN = make_identity()


def kept(
    storage: Storage,
    whole: Sequence[int],
    last: int,
    *,
    keep: int = 2,
    keeps_whole: bool = True,
) -> list[int]:
    """Return what stays of a run with windows that end at 3, 6, ..., and states of one iteration."""
    retention = Retention(storage, keep, keeps_whole=keeps_whole)
    for iteration in range(1, last + 1):
        if iteration in whole:
            retention.retain(persist_window(storage, iteration, RUN, length=1))
        elif iteration % 3 == 0:
            retention.retain(persist_window(storage, iteration, RUN))
    return complete_iterations(storage)


@pytest.mark.parametrize(
    ("last", "expected"), [(7, [7, 6]), (9, [9, 7]), (12, [12, 9, 7]), (21, [21, 18, 14])]
)
def test_newest_whole_state_stays_until_there_is_a_newer_one(
    storage: Storage, last: int, expected: list[int]
) -> None:
    assert kept(storage, [2, 7, 14], last) == expected


def test_whole_states_go_like_others_unless_they_are_wanted(storage: Storage) -> None:
    assert kept(storage, [2, 7], 12, keeps_whole=False) == [12, 9]


@LOCAL
def test_damaged_whole_state_does_not_stay(storage: Storage) -> None:
    assert kept(storage, [2, 4], 6) == [6, 4]
    manifest = manifest_of(storage, 4)
    (Path(storage.url) / manifest.files[0].data).write_bytes(b"")
    Retention(storage, 1, keeps_whole=True).retain(persist_window(storage, 9, RUN))
    assert complete_iterations(storage) == [9]


def test_state_that_lacks_units_is_not_whole(storage: Storage) -> None:
    retention = Retention(storage, 1, keeps_whole=True)
    for manifest in (persist_checkpoint(storage, 1, RUN), persist_window(storage, 6, RUN)):
        retention.retain(manifest)  # as of `partial`, which has not saved all experts at first
    assert complete_iterations(storage) == [6]
