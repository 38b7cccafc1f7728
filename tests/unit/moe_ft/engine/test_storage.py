"""The storage tier: what makes a checkpoint, what retention removes, and what a killed writer leaves."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.storage import (
    LOCK_NAME,
    Lock,
    Storage,
    file_tag,
    iteration_directory,
    rank_path,
)
from moe_ft.errors import CorruptStateError
from moe_ft.formats import MANIFEST_NAME, Identity, Manifest, encode
from tests.unit.moe_ft.builders import (
    complete_iterations,
    make_identity,
    make_state,
    persist_checkpoint,
    persist_rank,
)
from tests.unit.moe_ft.faulty_storage import Injector, KilledError, faulty_urls, install

TWO_RANKS = make_identity(world_size=2)
OTHER_RUN = make_identity("run-b")
BACK_ENDS = pytest.mark.parametrize("back_end", ["local", "objects"])


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "persist"))


@pytest.fixture
def injector() -> Iterator[Injector]:
    with install() as injector:
        yield injector


def save(storage: Storage, iteration: int, identity: Identity, keep: int) -> Manifest:
    """Do all that one checkpoint takes, as the writer process does."""
    manifest = persist_checkpoint(storage, iteration, identity)
    storage.retain(manifest, keep)
    return manifest


def names(storage: Storage, iteration: int) -> set[str]:
    directory = Path(storage.url) / iteration_directory(iteration)
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


def manifest_path(iteration: int) -> str:
    return f"{iteration_directory(iteration)}/{MANIFEST_NAME}"


# What is a checkpoint


def test_checkpoint_that_was_written_is_read_back_bit_for_bit(storage: Storage) -> None:
    manifest = persist_checkpoint(storage, 5, TWO_RANKS)
    index, content = make_state(1, 5, TWO_RANKS)
    assert storage.read(manifest.files[1].data) == content
    assert storage.index(manifest.files[1].index).units == index.units


def test_manifest_names_the_files_that_hold_each_unit(storage: Storage) -> None:
    manifest = persist_checkpoint(storage, 5, TWO_RANKS)
    assert storage.manifest(5) == manifest
    assert {source.files for source in manifest.units.values()} == {(0, 1)}
    assert set(manifest.units) == {"embedding", "layer.0.expert.0", "layer.0.expert.1"}


def test_files_without_a_manifest_are_no_checkpoint(storage: Storage) -> None:
    persist_rank(storage, 0, 5, make_identity())
    assert storage.iterations() == [5]
    assert not storage.has_manifest(5)
    with pytest.raises(OSError, match="manifest"):
        storage.manifest(5)


def test_manifest_while_a_rank_is_missing_is_not_written(storage: Storage) -> None:
    persist_rank(storage, 0, 5, TWO_RANKS)
    with pytest.raises(FileNotFoundError):
        storage.write_manifest(5, file_tag(TWO_RANKS), 2)
    assert not storage.has_manifest(5)


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
        storage.write_manifest(5, file_tag(TWO_RANKS), 2)
    assert not storage.has_manifest(5)


def test_manifest_over_a_corrupt_index_is_refused(storage: Storage) -> None:
    persist_rank(storage, 0, 5, make_identity())
    path = rank_path(5, 0, file_tag(make_identity()), "json")
    storage.write_atomically(path, storage.read(path).replace(b"run-a", b"run-b"))
    with pytest.raises(CorruptStateError, match="its checksum does not match"):
        storage.write_manifest(5, file_tag(make_identity()), 1)


def test_incarnations_that_write_one_iteration_have_files_of_their_own(storage: Storage) -> None:
    first, second = make_identity(), make_identity(history=((0, 0), (1, 3)))
    before = persist_checkpoint(storage, 5, first)
    persist_rank(storage, 0, 5, second)
    assert storage.manifest(5) == before
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
    data, small_file = ["open", "fsync"], ["open", "fsync", "replace", "fsync"]
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


def test_iterations_are_newest_first_and_other_names_ignored(storage: Storage) -> None:
    for name in ("iter_0000002", "iter_0000010", "iter_12345678", "iter_x", "iter_5", "notes"):
        (Path(storage.url) / name).mkdir(parents=True)
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


# Retention


@given(
    keep=st.integers(1, 4),
    iterations=st.lists(st.integers(1, 30), unique=True, min_size=1, max_size=8).map(sorted),
)
@settings(max_examples=30)
def test_retention_of_a_run_keeps_the_newest_and_all_that_they_name(
    keep: int, iterations: list[int]
) -> None:
    with install():
        storage = Storage(faulty_urls(Path())["objects"])
        for iteration in iterations:
            save(storage, iteration, TWO_RANKS, keep)
        kept = sorted(iterations, reverse=True)[:keep]
        assert complete_iterations(storage) == kept
        assert storage.iterations() == kept


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
            # Those from beyond it stay until the run passes them; another run's is replaced.
            newer = {each for each in expected[lineage] if each > iteration}
            older = sorted(each for each in expected[lineage] if each < iteration)
            kept = older[len(older) - min(keep - 1, len(older)) :]
            for other in expected.values():
                other.discard(iteration)
            expected[lineage] = {iteration, *kept, *newer}
            assert set(complete_iterations(storage)) == set.union(*expected.values())


def test_removed_checkpoints_are_named(storage: Storage) -> None:
    for iteration in (1, 2, 3):
        persist_checkpoint(storage, iteration, make_identity())
    assert storage.retain(storage.manifest(3), 1) == [2, 1]


def test_checkpoint_is_unmade_before_its_files_are_removed(
    tmp_path: Path, injector: Injector
) -> None:
    storage = Storage(faulty_urls(tmp_path)["local"])
    save(storage, 1, TWO_RANKS, 1)
    injector.forget()
    save(storage, 2, TWO_RANKS, 1)
    removed = [path for name, path in injector.operations if name == "rm_file"]
    assert removed[0].endswith(manifest_path(1))
    assert len(removed) == 5


def test_checkpoints_beyond_the_one_that_a_run_went_back_behind_stay_until_it_passes_them(
    storage: Storage,
) -> None:
    for iteration in (4, 6, 8):
        persist_checkpoint(storage, iteration, make_identity())
    again = make_identity(history=((0, 0), (1, 4)))
    save(storage, 5, again, 2)
    assert complete_iterations(storage) == [8, 6, 5, 4]
    save(storage, 9, again, 2)
    assert complete_iterations(storage) == [9, 8]


def test_checkpoint_of_an_earlier_incarnation_is_replaced_at_the_same_iteration(
    storage: Storage,
) -> None:
    save(storage, 5, make_identity(), 2)
    again = make_identity(history=((0, 0), (1, 3)))
    save(storage, 5, again, 2)
    assert storage.manifest(5).identity == again
    assert len(names(storage, 5)) == 3


def test_checkpoints_of_another_lineage_stay(storage: Storage) -> None:
    for iteration in (1, 2, 9):
        persist_checkpoint(storage, iteration, make_identity())
    for iteration in (3, 4):
        save(storage, iteration, OTHER_RUN, 1)
    assert complete_iterations(storage) == [9, 4, 2, 1]


def test_checkpoint_of_another_lineage_is_replaced_at_the_same_iteration_only(
    storage: Storage,
) -> None:
    for iteration in (4, 5):
        persist_checkpoint(storage, iteration, make_identity())
    save(storage, 5, OTHER_RUN, 1)
    assert storage.manifest(5).identity == OTHER_RUN
    assert storage.manifest(4).identity == make_identity()
    assert complete_iterations(storage) == [5, 4]


def rewritten(storage: Storage, iteration: int, older: Manifest) -> Manifest:
    """Return a manifest of an iteration whose units lie in the directory of an older one."""
    manifest = msgspec.structs.replace(older, iteration=iteration)
    storage.write_atomically(manifest_path(iteration), encode(manifest))
    return manifest


def test_older_files_that_a_kept_manifest_names_stay(storage: Storage) -> None:
    older = persist_checkpoint(storage, 1, make_identity())
    rewritten(storage, 2, older)
    save(storage, 3, make_identity(), 2)
    assert not storage.has_manifest(1)
    assert complete_iterations(storage) == [3, 2]


def test_older_files_that_a_manifest_of_another_lineage_names_stay(storage: Storage) -> None:
    older = persist_checkpoint(storage, 1, make_identity())
    storage.retain(rewritten(storage, 2, older), 1)
    save(storage, 3, OTHER_RUN, 1)
    assert complete_iterations(storage) == [3, 2]


def test_older_files_that_a_kept_manifest_names_are_not_incomplete(storage: Storage) -> None:
    older = persist_checkpoint(storage, 1, make_identity())
    storage.retain(rewritten(storage, 2, older), 1)
    storage.remove_incomplete(before=3)
    assert complete_iterations(storage) == [2]


def test_files_that_never_became_a_checkpoint_are_removed(storage: Storage) -> None:
    for rank in (0, 1):
        persist_rank(storage, rank, 3, TWO_RANKS)
    storage.remove_incomplete(before=4)
    assert storage.iterations() == []


def test_files_of_this_or_a_newer_iteration_are_not_removed_as_incomplete(
    storage: Storage,
) -> None:
    for iteration in (4, 5):
        persist_rank(storage, 0, iteration, make_identity())
    storage.remove_incomplete(before=4)
    assert storage.iterations() == [5, 4]


@BACK_ENDS
def test_checkpoint_whose_manifest_cannot_be_looked_at_is_not_incomplete(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    storage = Storage(faulty_urls(tmp_path)[back_end])
    persist_checkpoint(storage, 1, make_identity())
    injector.broken = (("info", manifest_path(1)),)
    with suppress(OSError):
        storage.remove_incomplete(before=2)
    injector.forget()
    assert complete_iterations(storage) == [1]


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


def test_older_iteration_that_was_never_completed_is_removed(storage: Storage) -> None:
    persist_rank(storage, 0, 3, TWO_RANKS)
    (Path(storage.url) / rank_path(3, 1, "0123abcd", "safetensors.part")).touch()
    save(storage, 4, TWO_RANKS, 2)
    assert storage.iterations() == [4]


def test_older_iteration_whose_manifest_was_being_written_is_removed(storage: Storage) -> None:
    persist_rank(storage, 0, 3, make_identity())
    (Path(storage.url) / f"{manifest_path(3)}.part").write_bytes(b'{"xxh3_64"')
    save(storage, 4, make_identity(), 2)
    assert storage.iterations() == [4]


def test_newer_iteration_that_is_not_complete_yet_stays(storage: Storage) -> None:
    persist_rank(storage, 0, 6, TWO_RANKS)
    before = names(storage, 6)
    save(storage, 5, TWO_RANKS, 1)
    assert names(storage, 6) == before


def test_corrupt_manifest_and_its_files_are_not_deleted(storage: Storage) -> None:
    persist_checkpoint(storage, 3, make_identity())
    spoiled = storage.read(manifest_path(3))[:-9]
    storage.write_atomically(manifest_path(3), spoiled)
    before = names(storage, 3)
    for iteration in (4, 5, 6):
        save(storage, iteration, make_identity(), 1)
    assert names(storage, 3) == before
    assert storage.read(manifest_path(3)) == spoiled


def test_corrupt_checkpoint_does_not_count_among_those_that_are_kept(storage: Storage) -> None:
    for iteration in (1, 2):
        persist_checkpoint(storage, iteration, make_identity())
    storage.write_atomically(manifest_path(2), b"{}")
    save(storage, 3, make_identity(), 2)
    assert storage.has_manifest(1)


@BACK_ENDS
def test_checkpoint_whose_manifest_cannot_be_looked_at_stays(
    tmp_path: Path, injector: Injector, back_end: str
) -> None:
    storage = Storage(faulty_urls(tmp_path)[back_end])
    persist_checkpoint(storage, 1, OTHER_RUN)
    manifest = persist_checkpoint(storage, 2, make_identity())
    injector.broken = (("info", manifest_path(1)),)
    with suppress(OSError):
        storage.retain(manifest, 1)
    injector.forget()
    assert complete_iterations(storage) == [2, 1]


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


# The lock


def test_last_checkpoint_of_an_iteration_has_files_of_its_own() -> None:
    identity = make_identity()
    assert file_tag(identity) != file_tag(identity, is_last=True)


def test_manifest_of_an_index_that_names_an_unknown_file_is_refused(storage: Storage) -> None:
    persist_rank(storage, 0, 5, make_identity())
    path = rank_path(5, 0, file_tag(make_identity()), "json")
    index = storage.index(path)
    unit = msgspec.structs.replace(index.units["embedding"], file="iter_0000001/x.safetensors")
    units = {**index.units, "embedding": unit}
    storage.write_atomically(path, encode(msgspec.structs.replace(index, units=units)))
    with pytest.raises(CorruptStateError, match="unit embedding is in iter_0000001/x.safetensors"):
        storage.write_manifest(5, file_tag(make_identity()), 1)


def test_lock_that_was_written_says_who_and_when(storage: Storage) -> None:
    before = time.time()
    storage.write_lock("job", "run-a", "host")
    lock = storage.lock()
    assert lock is not None
    assert (lock.job_id, lock.lineage, lock.host) == ("job", "run-a", "host")
    assert before <= lock.heartbeat_s <= time.time()


def test_lock_that_is_renewed_says_when_it_was_renewed(storage: Storage) -> None:
    old = Lock(job_id="job", lineage="run-a", host="host", heartbeat_s=1.0)
    storage.write_atomically(LOCK_NAME, msgspec.json.encode(old))
    storage.write_lock("job", "run-a", "host")
    lock = storage.lock()
    assert lock is not None
    assert lock.heartbeat_s > 1.0


def test_directory_without_a_lock_has_none(storage: Storage) -> None:
    assert storage.lock() is None


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b'{"job_id": 1}'])
def test_lock_that_cannot_be_understood_is_none(storage: Storage, content: bytes) -> None:
    storage.write_atomically(LOCK_NAME, content)
    assert storage.lock() is None


def test_lock_of_this_job_is_released(storage: Storage) -> None:
    storage.write_lock("job", "run-a", "host")
    storage.release_lock("job")
    assert not storage.exists(LOCK_NAME)


def test_lock_of_another_job_is_not_released(storage: Storage) -> None:
    storage.write_lock("other job", "run-a", "host")
    storage.release_lock("job")
    assert storage.lock() is not None


def test_lock_is_neither_an_iteration_nor_removed_by_retention(storage: Storage) -> None:
    storage.write_lock("job", "run-a", "host")
    save(storage, 1, make_identity(), 1)
    assert storage.iterations() == [1]
    assert storage.lock() is not None


def test_readers_during_renewals_see_a_whole_lock(storage: Storage) -> None:
    for count in range(20):
        storage.write_lock("job", "x" * 5000 * count, "host")
        lock = storage.lock()
        assert lock is not None
        assert len(lock.lineage) == 5000 * count
