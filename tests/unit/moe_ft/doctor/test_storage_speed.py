"""Nodes write as checkpoints are written, and read each other's files: storage that is not shared is seen."""

from pathlib import Path

import pytest

from moe_ft.doctor.rows import Result
from moe_ft.doctor.storage import Written, check_read, check_write, write_file
from moe_ft.files.storage import Storage
from tests.object_store import ObjectStore

MIB = 1 << 20


def path_of(number: int) -> str:
    """Return the path of a node's file."""
    return f".moe_ft_doctor_{number:016x}/data"


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage(str(tmp_path / "persist"))
    store: ObjectStore = request.getfixturevalue("s3")
    return Storage(f"{store.bucket()}/persist")


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
    slow = Written(path="a", num_bytes=10 * MIB, seconds=1.0, checksum="")
    (row,) = check_write("n0", slow, 100 * MIB)
    assert (row.result, row.found) == (
        Result.WARN,
        "10 MB/s; the node's part of a checkpoint takes 10.0 s",
    )
    fast = Written(path="a", num_bytes=100 * MIB, seconds=1.0, checksum="")
    assert check_write("n0", fast, None)[0].result is Result.PASS
