"""Storage does what checkpoints need, a living start's lock is seen, nodes share it; nothing stays."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from moe_ft.doctor.rows import Result
from moe_ft.doctor.storage import (
    ProbeDirectory,
    ProbeFile,
    check_lock,
    check_read,
    check_semantics,
    check_space,
    check_write,
    is_path_of_a_probe,
    write_file,
)
from moe_ft.engine.persist import storage_lock
from moe_ft.engine.persist.storage_lock import StorageLock, own_origin
from moe_ft.files.storage import Storage
from moe_ft.launches import launch_of
from tests.object_store import ObjectStore

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_lock, "_SETTLE_S", 0.0)
    monkeypatch.setattr(storage_lock, "_LOOK_POLL_S", 0.01)


def test_local_directory_passes_and_nothing_stays(tmp_path: Path) -> None:
    probe = ProbeDirectory(str(tmp_path / "a" / "b"))
    probe.open()
    (row,) = check_semantics(probe.storage)
    assert (row.result, row.found) == (Result.PASS, "create, replace, list, lock, delete")
    probe.root.write(probe.speed_path, [memoryview(b"left")])
    for path in ("iter_0000001/data", "small"):
        probe.storage.write(path, [memoryview(b"left")])
    StorageLock(probe.storage).take("left", None)
    probe.close()
    assert list(tmp_path.iterdir()) == []


def test_file_of_somebody_else_in_the_probe_directory_stays(tmp_path: Path) -> None:
    probe = ProbeDirectory(str(tmp_path))
    probe.open()
    check_semantics(probe.storage)
    (own,) = tmp_path.iterdir()
    (own / "iter_0000001").mkdir()
    for path in (own / "manifest.json", own / "iter_0000001" / "manifest.json"):
        path.touch()
    probe.close()
    assert {path.name for path in own.rglob("*.json")} == {"manifest.json"}
    assert len(list(own.rglob("*.json"))) == 2


def test_probe_directory_that_is_there_is_neither_used_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "0" * 16)
    found = tmp_path / f".moe_ft_doctor_{'0' * 16}" / "small"
    found.parent.mkdir()
    found.touch()
    probe = ProbeDirectory(str(tmp_path))
    with pytest.raises(FileExistsError):
        probe.open()
    probe.close()
    assert found.exists()


@pytest.mark.parametrize(
    "path",
    [
        "iter_0000001/manifest.json",
        ".moe_ft_doctor_0123456789abcdef/../iter_0000001/data",
        ".moe_ft_doctor_0123456789abcde/data",
        ".moe_ft_doctor_0123456789abcdef/small",
        "/.moe_ft_doctor_0123456789abcdef/data",
        ".moe_ft_doctor_0123456789abcdef/data\n",
    ],
)
def test_path_of_anything_else_is_none_of_a_probe(path: str) -> None:
    assert is_path_of_a_probe(".moe_ft_doctor_0123456789abcdef/data")
    assert not is_path_of_a_probe(path)


def test_persist_directory_with_checkpoints_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "manifest.json").touch()
    before = sorted(tmp_path.rglob("*"))
    probe = ProbeDirectory(str(tmp_path))
    probe.open()
    check_semantics(probe.storage)
    probe.close()
    assert sorted(tmp_path.rglob("*")) == before


def test_object_store_passes_and_nothing_stays(s3: ObjectStore) -> None:
    url = f"{s3.bucket()}/persist"
    probe = ProbeDirectory(url)
    probe.open()
    (row,) = check_semantics(probe.storage)
    assert row.result is Result.PASS
    probe.root.write(probe.speed_path, [memoryview(b"left")])
    probe.close()
    assert Storage(url).names() == []


def test_operation_that_is_refused_is_named(s3: ObjectStore) -> None:
    probe = ProbeDirectory(f"{s3.bucket()}/persist")
    with s3.failing("AccessDenied", "DELETE"):
        (row,) = check_semantics(probe.storage)
    assert row.result is Result.FAIL
    assert row.found.partition(":")[0] in ("lock", "delete")


@pytest.mark.parametrize("job_id", ["other", "mine"])
def test_lock_of_a_living_start_fails_also_one_of_the_same_job(tmp_path: Path, job_id: str) -> None:
    root = Storage(str(tmp_path))
    owner = StorageLock(root)
    owner.take(job_id, None)
    looks = iter(range(1000))

    class Renewing(Storage):
        """Storage whose lock is renewed between two looks."""

        def read(self, path: str, offset: int = 0, num_bytes: int = -1) -> bytes:
            """Read the lock as it is after a renewal."""
            if next(looks) == 1:
                owner.renew()
            return super().read(path, offset, num_bytes)

    (row,) = check_lock(Renewing(str(tmp_path)), watch_s=30.0)
    assert row.result is Result.FAIL
    assert f"job '{job_id}'" in row.found


def test_lock_that_nobody_renews_is_warned_of(tmp_path: Path) -> None:
    root = Storage(str(tmp_path))
    StorageLock(root).take("other", None)
    assert check_lock(root, watch_s=0.05)[0].result is Result.WARN


def test_lock_of_a_start_that_is_over_passes_unwatched(tmp_path: Path) -> None:
    root = Storage(str(tmp_path))
    own = own_origin(launch_of({}))
    ((number, started),) = own.processes
    over = msgspec.structs.replace(own, processes=((number, started - 1),))
    StorageLock(root).take("mine", None, over)
    (row,) = check_lock(root, watch_s=1000.0)
    assert (row.result, "which is over" in row.found) == (Result.PASS, True)


def test_free_lock_passes(tmp_path: Path) -> None:
    (row,) = check_lock(Storage(str(tmp_path)))
    assert (row.result, row.found) == (Result.PASS, "free")


def test_room_is_compared_with_the_plan(mount_small: Callable[[str], Path]) -> None:
    root = Storage(str(mount_small("6m") / "not" / "yet"))
    (row,) = check_space(root, 8 * MIB, 3)
    assert row.result is Result.FAIL
    assert row.found.endswith("free, 8.00 MiB for 3 checkpoints")
    assert check_space(root, None, 3)[0].result is Result.PASS


def test_directory_with_too_few_files_fails(mount_small: Callable[[str], Path]) -> None:
    root = Storage(str(mount_small("6m,nr_inodes=40")))
    assert "more files" in check_space(root, MIB, 3)[0].found


def test_object_store_has_room(s3: ObjectStore) -> None:
    (row,) = check_space(Storage(f"{s3.bucket()}/persist"), 8 * MIB, 3)
    assert (row.result, row.found) == (
        Result.PASS,
        "an object store; 8.00 MiB for 3 checkpoints",
    )


def path_of(number: int) -> str:
    """Return the path of a node's file."""
    return f".moe_ft_doctor_{number:016x}/data"


def test_node_reads_the_file_of_the_next_one(storage: Storage) -> None:
    written = {f"n{number}": write_file(storage, path_of(number), MIB) for number in range(2)}
    assert {each.num_bytes for each in written.values()} == {MIB}
    for node, other in (("n0", "n1"), ("n1", "n0")):
        (row,) = check_read(node, storage, written, None)
        assert row.result is not Result.FAIL
        assert row.found.endswith(f"from {other}")


def test_write_without_time_ends_after_a_piece(storage: Storage) -> None:
    assert write_file(storage, "rank_0", 20 * MIB, 0.0).num_bytes == 8 * MIB


def test_storage_that_is_not_shared_fails(tmp_path: Path) -> None:
    own, other = Storage(str(tmp_path / "own")), Storage(str(tmp_path / "other"))
    written = {"n0": write_file(own, path_of(0), MIB), "n1": write_file(other, path_of(1), MIB)}
    (row,) = check_read("n0", own, written, None)
    assert (row.result, row.found) == (Result.FAIL, "the file of n1 is not there")


def test_file_that_has_changed_fails(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    written = {"n0": write_file(storage, path_of(0), MIB)}
    (tmp_path / path_of(0)).write_bytes(bytes(MIB))
    assert "another content" in check_read("n0", storage, written, None)[0].found


def test_file_that_is_none_of_doctor_is_not_read(tmp_path: Path) -> None:
    written = write_file(Storage(str(tmp_path)), "iter_0000001/manifest.json", MIB)
    (row,) = check_read("n0", Storage(str(tmp_path)), {"n0": written}, None)
    assert row.result is Result.FAIL
    assert "'iter_0000001/manifest.json', which is no file of doctor" in row.found


def test_slow_storage_is_warned_of_with_the_time_of_a_checkpoint() -> None:
    slow = ProbeFile(path="a", num_bytes=10 * MIB, seconds=1.0, checksum="")
    (row,) = check_write("n0", slow, 100 * MIB)
    assert (row.result, row.found) == (
        Result.WARN,
        "10 MB/s; the node's part of a checkpoint takes 10.0 s",
    )
    fast = ProbeFile(path="a", num_bytes=100 * MIB, seconds=1.0, checksum="")
    assert check_write("n0", fast, None)[0].result is Result.PASS
    assert check_write("n0", fast, 500 * MIB, 6.0)[0].result is Result.PASS
    (row,) = check_write("n0", fast, 500 * MIB, 4.0)
    assert row.result is Result.WARN
    assert "takes 5.0 s; a planned end leaves 4 s for it (keep --grace)" in row.found
