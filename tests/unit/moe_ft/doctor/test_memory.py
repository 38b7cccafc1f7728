"""The memory directory is used as ranks use it; too little room and leftovers are named; nothing stays."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ft.doctor.machine import Demand, check_memory
from moe_ft.doctor.rows import Result, Row
from tests.unit.moe_ft.recovery.jobs import leave_job

MIB = 1 << 20


def check(place: Path, num_bytes: int | None = MIB, own: Path | None = None) -> dict[str, Row]:
    """Return the rows by check."""
    demand = Demand(num_ranks=2, num_bytes=num_bytes, own=own)
    return {row.check: row for row in check_memory("n0", str(place), demand)}


def test_directory_on_tmpfs_passes_and_is_gone_afterwards(memory_dir: Path) -> None:
    rows = check(memory_dir / "a" / "b")
    assert {row.result for row in rows.values()} == {Result.PASS}
    assert "tmpfs of" in rows["memory dir"].found
    assert list(memory_dir.iterdir()) == []


def test_directory_that_was_there_stays(memory_dir: Path) -> None:
    check(memory_dir)
    assert memory_dir.is_dir()


def test_directory_on_a_disk_is_warned_of(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).total == shutil.disk_usage("/dev/shm").total:
        pytest.skip("temporary files of this machine are on tmpfs")
    row = check(tmp_path / "a")["memory dir"]
    assert row.result is Result.WARN
    assert "not on tmpfs" in row.found


def test_file_system_that_is_too_small_for_the_plan_fails(
    mount_small: Callable[[str], Path],
) -> None:
    row = check(mount_small("6m"), 8 * MIB)["memory room"]
    assert row.result is Result.FAIL
    assert "8.00 MiB needed" in row.found
    assert "remount,size" in row.remedy


def test_memory_that_the_job_has_there_counts_as_free(mount_small: Callable[[str], Path]) -> None:
    place = mount_small("6m")
    own = place / "job" / "n0"
    own.mkdir(parents=True)
    (own / "region").write_bytes(bytes(4 * MIB))
    assert check(place, 4 * MIB)["memory room"].result is Result.FAIL
    assert check(place, 4 * MIB, own)["memory room"].result is Result.PASS


def test_small_file_system_is_warned_of_if_nothing_is_planned(
    mount_small: Callable[[str], Path],
) -> None:
    assert check(mount_small("6m"), None)["memory room"].result is Result.WARN


def test_too_few_files_fail(mount_small: Callable[[str], Path]) -> None:
    row = check(mount_small("6m,nr_inodes=40"))["memory room"]
    assert row.result is Result.FAIL
    assert "more files" in row.found


def test_memory_of_dead_jobs_is_named_with_the_command_that_removes_it(memory_dir: Path) -> None:
    leave_job(memory_dir, "dead")
    row = check(memory_dir)["leftovers"]
    assert row.result is Result.WARN
    assert "job 'dead': 1.00 MiB" in row.found
    assert f"clean --memory-dir {memory_dir} --remove" in row.remedy
    assert (memory_dir / "dead").is_dir()


def test_directory_in_which_others_could_replace_files_fails(memory_dir: Path) -> None:
    os.chmod(memory_dir, 0o777)
    row = check(memory_dir)["memory dir"]
    assert row.result is Result.FAIL
    assert "can be written by other users" in row.found


def test_file_instead_of_a_directory_fails(memory_dir: Path) -> None:
    (memory_dir / "file").touch()
    assert check(memory_dir / "file" / "a")["memory dir"].result is Result.FAIL
