"""Jobs are told apart from other directories, measured, and found alive by their locks."""

import os
import time
from pathlib import Path

import filelock
import pytest

from moe_ft.recovery.job_memory import (
    describe,
    find_directories,
    is_alive,
    measure,
    other_jobs,
)
from tests.unit.moe_ft.recovery.jobs import leave_job

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def test_other_jobs_are_described_and_this_one_is_not(tmp_path: Path) -> None:
    leave_job(tmp_path, "job")
    leave_job(tmp_path, "other-job")
    (found,) = other_jobs(str(tmp_path), "job")
    assert found == "job 'other-job': 1.00 MiB, 120 minutes old"


def test_directories_that_are_no_jobs_are_not_described_as_jobs(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    assert other_jobs(str(tmp_path), "job") == []


def test_directory_is_measured_with_all_below_it_and_its_newest_change(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "file"
    path.write_bytes(bytes(10 * 4096))
    os.utime(path, (4e9, 4e9))
    num_bytes, newest_s = measure(tmp_path)
    assert num_bytes >= 10 * 4096
    assert newest_s == 4e9


def test_what_a_link_leads_to_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "link").symlink_to(tmp_path / "large")
    (tmp_path / "job" / "all").symlink_to(tmp_path)
    assert measure(tmp_path / "job")[0] < 1 << 20


@pytest.mark.parametrize(
    "path", ["rank_00000.alive", "node/x/y/rank_00007.alive", "n/persist/writer.lock"]
)
def test_job_is_alive_while_any_lock_below_it_is_held(tmp_path: Path, path: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(file):
        assert is_alive(tmp_path)
    assert not is_alive(tmp_path)


def test_lock_that_cannot_be_tried_counts_as_held(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"kept")
    (tmp_path / "rank_00000.alive").symlink_to(tmp_path / "target")
    assert is_alive(tmp_path)
    assert (tmp_path / "target").read_bytes() == b"kept"


def test_clock_that_was_set_forward_makes_no_job_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = leave_job(tmp_path, "job", age_s=60.0)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 7200.0)
    assert describe(directory)[1] < 120.0


@as_root
def test_job_of_another_user_is_not_ours(tmp_path: Path) -> None:
    os.chown(leave_job(tmp_path, "job"), 65534, 65534)
    assert [refusal for _, refusal in find_directories(tmp_path)] == [
        "it belongs to user 65534, not to 0"
    ]
