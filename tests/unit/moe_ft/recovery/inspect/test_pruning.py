"""Pruning by hand: what stays, and that what stays is whole, also after a failure in between."""

import ctypes
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.persist import storage_lock
from moe_ft.engine.persist.manifests import find_manifests, write_manifest
from moe_ft.engine.persist.storage_lock import LOCK_NAME
from moe_ft.errors import ConfigError
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import encode
from moe_ft.format.entries import FileEntry
from moe_ft.format.identity import Identity
from moe_ft.recovery.inspect.pruning import Checkpoint, Rules, prune
from moe_ft.recovery.persist_directory import take_lock
from tests.unit.moe_ft.builders import (
    make_identity,
    manifest_of,
    persist_checkpoint,
    persist_rank,
)
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations, manifest_path, names
from tests.unit.moe_ft.faulty_storage import Injector, faulty_urls, install

RUN = make_identity(world_size=2)
OTHER_RUN = make_identity("run-b", world_size=2)
_MS_PRIVATE, _MS_REC = 1 << 18, 1 << 14  # of mount(2)
BRANCH = make_identity(world_size=2, history=((0, 0), (1, 4)))  # continues iteration 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ft.engine.persist.storage_lock._SETTLE_S", 0.0)


@pytest.fixture(params=["local", "objects"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    with install():
        yield Storage(faulty_urls(tmp_path)[request.param])


def fill(storage: Storage, *iterations: int, identity: Identity = RUN) -> None:
    for iteration in iterations:
        persist_checkpoint(storage, iteration, identity)


def left(storage: Storage, **rules: float) -> list[int]:
    """Prune; return the iterations that are left, all of whose files were read."""
    prune(storage.url, Rules(**rules), removes=True)  # type: ignore[arg-type]
    return complete_iterations(storage)


def reasons(found: list[Checkpoint]) -> dict[int, str]:
    return {each.iteration: each.reason for each in found}


def test_newest_stay_and_the_others_go_with_their_files(storage: Storage) -> None:
    fill(storage, 2, 4, 6, 8)
    assert left(storage, keep=2) == [8, 6]
    assert storage.iterations() == [8, 6]


def test_nothing_goes_without_being_asked_to(storage: Storage) -> None:
    fill(storage, 2, 4)
    found = prune(storage.url, Rules(keep=1), removes=False)
    assert reasons(found) == {4: "the newest, read and verified", 2: ""}
    assert complete_iterations(storage) == [4, 2]
    assert not storage.exists(LOCK_NAME)


def test_iterations_that_a_number_divides_stay(storage: Storage) -> None:
    fill(storage, 2, 4, 5, 6, 8, 9)
    assert left(storage, keep=1, every=4) == [9, 8, 4]


def test_young_checkpoints_stay(storage: Storage) -> None:
    fill(storage, 2, 4, 6)
    old = msgspec.structs.replace(manifest_of(storage, 2), created_s=time.time() - 3 * 86_400)
    storage.write_atomically(manifest_path(2), encode(old))
    assert left(storage, keep=1, days=2) == [6, 4]


def test_runs_in_one_directory_are_pruned_apart(storage: Storage) -> None:
    fill(storage, 2, 4)
    fill(storage, 3, 5, identity=OTHER_RUN)
    assert left(storage, keep=1) == [5, 4]


def test_newest_of_each_branch_stays(storage: Storage) -> None:
    fill(storage, 2, 4, 6)
    fill(storage, 5, identity=BRANCH)
    assert left(storage, keep=1) == [6, 5]


def test_checkpoint_that_another_run_shares_an_iteration_with_goes_alone(storage: Storage) -> None:
    fill(storage, 2, 4)
    fill(storage, 2, identity=OTHER_RUN)
    assert left(storage, keep=1) == [4, 2]
    assert len(find_manifests(storage, 2)) == 1


def test_damaged_checkpoint_is_left_and_does_not_count(storage: Storage) -> None:
    fill(storage, 2, 4, 6)
    (data,) = [
        name for name in _names(storage, 6) if name.startswith("rank_00001") and "safet" in name
    ]
    storage.remove(f"iter_0000006/{data}")
    found = prune(storage.url, Rules(keep=1), removes=True)
    assert "damaged" in reasons(found)[6]
    assert reasons(found)[4] == "the newest, read and verified"
    assert storage.iterations() == [6, 4]


def test_checkpoint_with_a_flipped_bit_is_left_and_does_not_count(storage: Storage) -> None:
    fill(storage, 2, 4, 6, 8)
    for iteration in (8, 4):
        flip(storage, iteration)
    for removes in (False, True):
        found = reasons(prune(storage.url, Rules(keep=1), removes=removes))
        assert "damaged, and left for you to look at" in found[8]
        assert found | {8: ""} == {8: "", 6: "the newest, read and verified", 4: "", 2: ""}
    assert storage.iterations() == [8, 6]


def test_checkpoint_that_needs_a_damaged_file_of_an_older_one_does_not_count(
    storage: Storage,
) -> None:
    fill(storage, 2, 4)
    persist_with_parts_of(storage, 6, 4)
    assert complete_iterations(storage) == [6, 4, 2]
    flip(storage, 4)
    found = reasons(prune(storage.url, Rules(keep=1), removes=True))
    assert "damaged" in found[6]
    assert "damaged" in found[4]
    assert found[2] == "the newest"  # for which nothing goes
    assert storage.iterations() == [6, 4, 2]


def test_data_are_not_read_where_nothing_goes(storage: Storage) -> None:
    fill(storage, 2, 4)
    flip(storage, 4)
    assert reasons(prune(storage.url, Rules(keep=2), removes=True)) == {
        4: "among the newest 2",
        2: "among the newest 2",
    }


def persist_with_parts_of(storage: Storage, iteration: int, older: int) -> None:
    """Write a checkpoint that has the last unit of each rank in the files of an older one."""
    for there in manifest_of(storage, older).files:
        persist_rank(storage, there.rank, iteration, RUN)
        path = rank_path(iteration, there.rank, file_tag(RUN), "json")
        index, last = storage.index(path), last_unit(storage, there)
        unit = msgspec.structs.replace(storage.index(there.index).units[last], file=there.data)
        units = {**index.units, last: unit}
        index = msgspec.structs.replace(index, units=units, older=(there,))
        storage.write_atomically(path, encode(index))
    write_manifest(storage, iteration, file_tag(RUN), RUN.world_size)


def last_unit(storage: Storage, file: FileEntry) -> str:
    units = storage.index(file.index).units
    return max(units, key=lambda name: units[name].offset)


def flip(storage: Storage, iteration: int) -> None:
    """Flip a bit in the last unit of a rank's data."""
    own = manifest_of(storage, iteration).files[-1]
    unit = storage.index(own.index).units[last_unit(storage, own)]
    content = bytearray(storage.read(own.data))
    content[unit.offset] ^= 1
    storage.write_atomically(own.data, bytes(content))


def _names(storage: Storage, iteration: int) -> list[str]:
    return storage.names_in(f"iter_{iteration:07d}")


def test_pruning_that_is_interrupted_anywhere_leaves_whole_checkpoints_and_can_be_repeated(
    tmp_path: Path,
) -> None:
    with install() as injector:
        url = faulty_urls(tmp_path)["objects"]
        fill(Storage(url), 2, 4, 6)
        injector.forget()
        prune(url, Rules(keep=3), removes=True)
        num_operations = len(injector.operations) + 8
        for number in range(0, num_operations, 3):
            _prune_and_fail(url, injector, number)
            assert 6 in complete_iterations(Storage(url))
        assert left(Storage(url), keep=1) == [6]


def _prune_and_fail(url: str, injector: Injector, number: int) -> None:
    injector.forget()
    injector.fails_at = frozenset([number])
    with suppress(OSError):
        prune(url, Rules(keep=1), removes=True)
    injector.forget()
    Storage(url).remove(LOCK_NAME)  # may stay if removing it failed


def test_directory_that_a_job_writes_to_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_lock, "_LOOK_POLL_S", 0.01)
    monkeypatch.setattr(storage_lock, "LOCK_RENEWAL_S", 0.02)
    storage = Storage(str(tmp_path))
    fill(storage, 2, 4)
    lock = take_lock("a-job", storage)
    with pytest.raises(ConfigError, match="used by job 'a-job'"):
        prune(storage.url, Rules(keep=1), removes=True)
    lock.release()
    assert names(storage, 2)
    assert left(storage, keep=1) == [4]
    assert not storage.exists(LOCK_NAME)


def prune_full_disk(folder: str) -> tuple[dict[int, str], list[int], list[str]]:
    """Fill a file system of this process's own with checkpoints and more, and prune it."""
    os.unshare(os.CLONE_NEWNS)
    libc = ctypes.CDLL(None, use_errno=True)
    for source, place, kind, flags, options in (
        (b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        (b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=128k"),
    ):
        if libc.mount(source, place, kind, flags, options):
            raise OSError(ctypes.get_errno(), "mount")
    storage = Storage(folder)
    fill(storage, 2, 4, 6)
    with suppress(OSError), Path(folder, "other").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    found = prune(folder, Rules(keep=1), removes=True)
    return reasons(found), complete_iterations(storage), os.listdir(folder)


def test_disk_that_is_full_is_pruned(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as other:
        try:
            found, iterations, names = other.submit(prune_full_disk, str(tmp_path)).result()
        except PermissionError:
            pytest.skip("only root can mount a file system")
    assert found == {6: "the newest, read and verified", 4: "", 2: ""}
    assert iterations == [6]
    assert sorted(names) == ["iter_0000006", "other"]


def test_directory_without_checkpoints_is_refused(tmp_path: Path) -> None:
    for removes in (False, True):
        with pytest.raises(ConfigError, match="holds no checkpoint"):
            prune(str(tmp_path / "nowhere"), Rules(keep=1), removes=removes)
    assert not (tmp_path / "nowhere").exists()
