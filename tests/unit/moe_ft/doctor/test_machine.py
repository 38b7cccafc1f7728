"""Memory directory and limits of a real process: too little room and leftovers are named; nothing stays."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.doctor import machine
from moe_ft.doctor.machine import check_memory
from moe_ft.doctor.rows import CheckRow, Result
from tests.unit.moe_ft.recovery.jobs import leave_job, site_of

MIB = 1 << 20


def check(place: Path, needed: int | None = MIB, limit: str | None = None) -> dict[str, CheckRow]:
    """Return the rows by check."""
    site = site_of(place, limit=limit)
    return {row.check: row for row in check_memory(site, 2, needed)}


def test_directory_on_tmpfs_passes_and_is_gone_afterwards(memory_dir: Path) -> None:
    rows = check(memory_dir / "a" / "b")
    assert {row.result for row in rows.values()} == {Result.PASS}
    assert "tmpfs of" in rows["memory dir"].found
    assert list(memory_dir.iterdir()) == []


@pytest.mark.parametrize("node", ["node", ""])  # without one if its name is refused
def test_directory_that_was_there_stays_as_it_was(memory_dir: Path, node: str) -> None:
    check_memory(replace(site_of(memory_dir), node=node), 2, None)
    assert list(memory_dir.iterdir()) == []


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
    assert "take 8.00 MiB" in row.found
    assert "remount,size" in row.remedy


@pytest.mark.parametrize(
    ("option", "general", "found", "remedy"),
    [
        (
            "huge=never",
            "advise [never]",
            "none (huge=never)",
            "mount -o remount,huge=within_size PLACE.",
        ),
        ("huge=advise", "advise [never]", "used (huge=advise)", ""),
        ("huge=advise", "[deny] force", "none: FILE denies them", "Allow them: echo never > FILE"),
        ("huge=never", "deny [force]", "used (huge=never)", ""),
    ],
)
def test_huge_pages_are_those_of_the_mount_and_what_gives_them_is_named(
    option: str,
    general: str,
    found: str,
    remedy: str,
    mount_small: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = mount_small(f"6m,{option}")
    pages = place.parent / "shmem_enabled"
    pages.write_text(general)
    monkeypatch.setattr(machine, "SHMEM_PAGES", pages)
    row = check(place)["huge pages"]
    assert row.result is Result.PASS  # a job is no worse without them than before
    assert row.found == found.replace("FILE", str(pages))
    assert remedy.replace("FILE", str(pages)).replace("PLACE", str(place)) in row.remedy


def test_limit_that_a_start_would_keep_fails(memory_dir: Path) -> None:
    row = check(memory_dir, 8 * MIB, limit="6MiB")["memory room"]
    assert row.result is Result.FAIL
    assert row.found.startswith("--moe-ft-host-memory-limit=6MiB")


def test_memory_that_the_job_has_there_counts_as_free(mount_small: Callable[[str], Path]) -> None:
    place = mount_small("6m")
    own = place / "job" / "node"
    own.mkdir(parents=True)
    (own / "region").write_bytes(bytes(4 * MIB))
    assert check(place, 5 * MIB)["memory room"].result is Result.PASS
    own.rename(place / "another")
    assert check(place, 5 * MIB)["memory room"].result is Result.FAIL


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


# A fresh process: a fork would have what tests before have left open, which counts against the limit.
_LIMITED = """
import json, resource, sys
from pathlib import Path
from moe_ft.doctor import machine
which, value = map(int, sys.argv[1:3])
hard = resource.getrlimit(which)[1] if which != resource.RLIMIT_NOFILE else value
resource.setrlimit(which, (value, hard))
machine.CORE_PATTERN = Path(sys.argv[3])
print(json.dumps({row.check: row.result for row in machine.check_limits("n0", 64, 32)}))
"""


@pytest.mark.parametrize(
    ("which", "value", "pattern", "check", "result"),
    [
        (resource.RLIMIT_MEMLOCK, 65536, "core", "locked memory", Result.WARN),
        (resource.RLIMIT_NOFILE, 130, "core", "open files", Result.FAIL),
        (resource.RLIMIT_NOFILE, 2000, "core", "open files", Result.PASS),
        (resource.RLIMIT_CORE, 0, "core", "core files", Result.PASS),
        (resource.RLIMIT_CORE, 1 << 20, "core.%p", "core files", Result.WARN),
        (resource.RLIMIT_CORE, 1 << 20, "|/bin/collect %p", "core files", Result.PASS),
    ],
)
def test_limit_of_a_process(
    which: int, value: int, pattern: str, check: str, result: Result, tmp_path: Path
) -> None:
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY and hard < value:
        pytest.skip("the hard limit of this machine is lower")
    (tmp_path / "pattern").write_text(pattern)
    words = [sys.executable, "-c", _LIMITED, str(which), str(value), str(tmp_path / "pattern")]
    found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    assert found[check] == result
