"""The storage tier: what makes a checkpoint, and what a killed writer leaves."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.persist.manifests import find_manifests, write_manifest
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import (
    Storage,
    file_tag,
    hide_password,
    rank_path,
)
from moe_ft.format.encoding import encode
from moe_ft.format.identity import Identity
from moe_ft.format.manifest import MANIFEST_NAME
from tests.unit.moe_ft.builders import (
    make_identity,
    make_state,
    manifest_of,
    persist_checkpoint,
    persist_rank,
)
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations, save
from tests.unit.moe_ft.faulty_storage import Injector, KilledError, faulty_urls, install

TWO_RANKS = make_identity(world_size=2)
BACK_ENDS = pytest.mark.parametrize("back_end", ["local", "objects"])


# What is a checkpoint


def test_checkpoint_that_was_written_is_read_back_bit_for_bit(storage: Storage) -> None:
    manifest = persist_checkpoint(storage, 5, TWO_RANKS)
    index, content = make_state(1, 5, TWO_RANKS)
    assert storage.read(manifest.files[1].data) == content
    assert storage.index(manifest.files[1].index).units == index.units


def test_manifest_names_the_files_that_hold_each_unit(storage: Storage) -> None:
    manifest = persist_checkpoint(storage, 5, TWO_RANKS)
    assert manifest_of(storage, 5) == manifest
    assert {source.files for source in manifest.units.values()} == {(0, 1)}
    assert set(manifest.units) == {"embedding", "layer.0.expert.0", "layer.0.expert.1"}


def test_files_without_a_manifest_are_no_checkpoint(storage: Storage) -> None:
    persist_rank(storage, 0, 5, make_identity())
    assert storage.iterations() == [5]
    assert find_manifests(storage, 5) == []
    assert complete_iterations(storage) == []


def test_manifest_while_a_rank_is_missing_is_not_written(storage: Storage) -> None:
    persist_rank(storage, 0, 5, TWO_RANKS)
    with pytest.raises(FileNotFoundError):
        write_manifest(storage, 5, file_tag(TWO_RANKS), 2)
    assert find_manifests(storage, 5) == []


@pytest.mark.parametrize(
    ("rank", "iteration", "identity"),
    [(0, 5, TWO_RANKS), (1, 4, TWO_RANKS), (1, 5, make_identity("run-b", world_size=2))],
    ids=["of another rank", "of another iteration", "of another run"],
)
def test_manifest_of_indexes_that_do_not_belong_together_is_refused(
    storage: Storage, rank: int, iteration: int, identity: Identity
) -> None:
    persist_rank(storage, 0, 5, TWO_RANKS)
    index, _ = make_state(rank, iteration, identity)
    storage.write_atomically(rank_path(5, 1, file_tag(TWO_RANKS), "json"), encode(index))
    with pytest.raises(CorruptStateError, match="does not belong to this checkpoint"):
        write_manifest(storage, 5, file_tag(TWO_RANKS), 2)
    assert find_manifests(storage, 5) == []


def test_manifest_over_a_corrupt_index_is_refused(storage: Storage) -> None:
    persist_rank(storage, 0, 5, make_identity())
    path = rank_path(5, 0, file_tag(make_identity()), "json")
    storage.write_atomically(path, storage.read(path).replace(b"run-a", b"run-b"))
    with pytest.raises(CorruptStateError, match="its checksum does not match"):
        write_manifest(storage, 5, file_tag(make_identity()), 1)


def test_incarnations_that_write_one_iteration_have_files_of_their_own(storage: Storage) -> None:
    first, second = make_identity(), make_identity(history=((0, 0), (1, 3)))
    before = persist_checkpoint(storage, 5, first)
    persist_rank(storage, 0, 5, second)
    assert manifest_of(storage, 5) == before
    assert complete_iterations(storage) == [5]


@BACK_ENDS
def test_manifest_is_the_last_file_that_is_written(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    storage = Storage(faulty_urls(tmp_path)[back_end])
    persist_checkpoint(storage, 5, TWO_RANKS)
    written = [path for name, path in injector.operations if name in ("open", "replace")]
    assert MANIFEST_NAME in written[-1]
    assert sum(MANIFEST_NAME in path for path in written) <= 2  # its parts are one file


def test_local_files_are_synced_before_the_manifest_appears(
    tmp_path: Path, injector: Injector
) -> None:
    persist_checkpoint(Storage(faulty_urls(tmp_path)["local"]), 5, make_identity())
    steps = [name for name, _ in injector.operations if name in ("open", "fsync", "replace")]
    names = ["fsync", "fsync"]  # of the file in its directory, and of that in the persist directory
    data, small_file = ["open", "fsync", *names], ["open", "fsync", "replace", *names]
    index_is_read, manifest = ["open"], small_file
    assert [*data, *small_file, *index_is_read, *manifest] == steps


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../b", ""])
def test_path_outside_of_the_persist_directory_is_refused(storage: Storage, path: str) -> None:
    storage.make_root()
    for use in (storage.read, storage.exists, storage.remove):
        with pytest.raises(CorruptStateError, match="leaves its directory"):
            use(path)
    with pytest.raises(CorruptStateError, match="leaves its directory"):
        storage.write(path, [memoryview(b"x")])


def test_range_of_a_file_is_read_without_the_rest(storage: Storage) -> None:
    storage.write("file", [memoryview(b"0123456789")])
    assert storage.read("file", 3, 4) == b"3456"
    assert storage.read("file", 8, 4) == b"89"
    assert storage.read("file", 4, 0) == b""
    patient = storage.with_patience(60.0)
    assert patient.read("file", 3, 4) == b"3456"
    assert patient.read("file", 4, 0) == b""


def test_empty_file_is_read(storage: Storage) -> None:
    storage.write("file", [])
    assert storage.read("file") == storage.with_patience(60.0).read("file") == b""


def test_iterations_are_newest_first_and_other_names_ignored(storage: Storage) -> None:
    for name in ("iter_0000002", "iter_0000010", "iter_12345678", "iter_x", "iter_5", "notes"):
        storage.write_atomically(f"{name}/file", b"x")
    assert storage.iterations() == [12345678, 10, 2]


def test_directory_that_is_not_there_yet_has_no_iterations(storage: Storage) -> None:
    assert storage.iterations() == []


@BACK_ENDS
def test_directory_that_cannot_be_looked_at_raises_instead_of_seeming_empty(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    storage = Storage(faulty_urls(tmp_path)[back_end])
    persist_checkpoint(storage, 5, make_identity())
    injector.broken = (("info", "persist"), ("info", "p"))
    with pytest.raises(OSError, match="injected failure"):
        storage.iterations()


# A writer that is killed or meets failures


def prepare(url: str) -> Storage:
    """Return storage that holds checkpoints 1 and 2 of a run, of which it keeps two."""
    storage = Storage(url)
    for iteration in (1, 2):
        save(storage, iteration, TWO_RANKS, 2)
    return storage


def count_operations(url: str, injector: Injector, act: Callable[[Storage], object]) -> int:
    storage = prepare(url)
    injector.forget()
    act(storage)
    return len(injector.operations)


def save_third(storage: Storage) -> None:
    save(storage, 3, TWO_RANKS, 2)


def kill(injector: Injector, number: int, storage: Storage) -> None:
    """Kill the writer of the third checkpoint before one of its operations."""
    injector.forget()
    injector.killed_at = number
    with suppress(KilledError):  # fsspec catches even this where it asks whether a file exists
        save_third(storage)
    assert len(injector.operations) > number
    injector.forget()


@BACK_ENDS
def test_writer_killed_before_any_operation_leaves_only_complete_checkpoints(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    num_operations = count_operations(
        faulty_urls(tmp_path / "count")[back_end], injector, save_third
    )
    assert num_operations > 30
    for number in range(num_operations):
        with install():
            url = faulty_urls(tmp_path / str(number))[back_end]
            storage = prepare(url)
            kill(injector, number, storage)
            found = complete_iterations(Storage(url))
        assert found in ([2, 1], [3, 2, 1], [3, 2]), f"killed before operation {number}"


@BACK_ENDS
def test_start_after_a_kill_before_any_operation_ends_with_the_same_files(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    num_operations = count_operations(
        faulty_urls(tmp_path / "count")[back_end], injector, save_third
    )
    later = make_identity(history=((0, 0), (1, 2)), world_size=2)
    for number in range(0, num_operations, 3):
        with install():
            url = faulty_urls(tmp_path / str(number))[back_end]
            storage = prepare(url)
            kill(injector, number, storage)
            storage = Storage(url)
            for iteration in (3, 4):
                save(storage, iteration, later, 2)
            assert complete_iterations(storage) == [4, 3]
            assert storage.iterations() == [4, 3], f"killed before operation {number}"


@BACK_ENDS
def test_failure_of_any_one_operation_leaves_only_complete_checkpoints(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    num_operations = count_operations(
        faulty_urls(tmp_path / "count")[back_end], injector, save_third
    )
    for number in range(num_operations):
        with install():
            storage = prepare(faulty_urls(tmp_path / str(number))[back_end])
            injector.forget()
            injector.fails_at = frozenset({number})
            try_to_save_third(storage)
            injector.forget()
            found = complete_iterations(storage)
        assert found in ([2, 1], [3, 2, 1], [3, 2]), f"operation {number} failed"


@given(st.sets(st.integers(0, 70), max_size=12).map(frozenset))
@settings(max_examples=150)
def test_any_number_of_failures_leaves_only_complete_checkpoints(fails_at: frozenset[int]) -> None:
    with install() as injector:
        storage = prepare(faulty_urls(Path())["objects"])
        injector.forget()
        injector.fails_at = fails_at
        try_to_save_third(storage)
        injector.forget()
        assert complete_iterations(storage) in ([2, 1], [3, 2, 1], [3, 2])


def try_to_save_third(storage: Storage) -> None:
    try:
        save_third(storage)
    except OSError:
        return


# Names, directories and URLs


def test_last_checkpoint_of_an_iteration_has_files_of_its_own() -> None:
    identity = make_identity()
    assert file_tag(identity) != file_tag(identity, is_whole=True)


def test_manifest_of_an_index_that_names_an_unknown_file_is_refused(storage: Storage) -> None:
    persist_rank(storage, 0, 5, make_identity())
    path = rank_path(5, 0, file_tag(make_identity()), "json")
    index = storage.index(path)
    unit = msgspec.structs.replace(index.units["embedding"], file="iter_0000001/x.safetensors")
    units = {**index.units, "embedding": unit}
    storage.write_atomically(path, encode(msgspec.structs.replace(index, units=units)))
    with pytest.raises(CorruptStateError, match="unit embedding is in iter_0000001/x.safetensors"):
        write_manifest(storage, 5, file_tag(make_identity()), 1)


def test_checkpoint_that_is_written_brings_the_names_of_new_directories_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        "moe_ft.files.storage.os.fsync",
        lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")),
    )
    storage = Storage(str(tmp_path / "persist"))
    storage.make_root()
    assert synced == [str(tmp_path)]
    synced.clear()
    storage.write("iter_0000001/data", [memoryview(b"x")])
    directories = [str(tmp_path / "persist/iter_0000001"), str(tmp_path / "persist")]
    assert synced == [f"{directories[0]}/data", *directories]
    synced.clear()
    storage.write_atomically("iter_0000002/index", b"x")
    assert synced[-2:] == [str(tmp_path / "persist/iter_0000002"), str(tmp_path / "persist")]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://key:se%2Fcret@bucket/a", "s3://key:***@bucket/a"),
        ("abfs://container@account.dfs.core.windows.net/a", None),
        ("s3://bucket/a:b@c", None),
        ("/a/b", None),
    ],
)
def test_url_that_is_shown_has_no_password(url: str, shown: str | None) -> None:
    assert hide_password(url) == (shown or url)
