"""`clean` removes the memory of dead jobs, and nothing else that it is pointed at."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.engine.memory.job_directory import job_lock
from moe_ft.errors import ConfigError
from moe_ft.recovery.inspect import cleaning
from moe_ft.recovery.inspect.cleaning import clean
from moe_ft.recovery.job_memory import alive_lock
from tests.unit.moe_ft.recovery.jobs import HOUR_S, leave_job

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def names(lines: Iterable[str]) -> list[str]:
    return [line.split("'")[1] for line in lines]


def test_old_job_whose_locks_are_free_is_removed(tmp_path: Path) -> None:
    directory = leave_job(tmp_path, "job")
    removed, left = clean(str(tmp_path), None, HOUR_S, removes=True)
    assert removed == ["job 'job': 1.00 MiB, 120 minutes old"]
    assert left == []
    assert not directory.exists()


def test_without_being_told_to_nothing_is_removed(tmp_path: Path) -> None:
    directory = leave_job(tmp_path, "job")
    before = sorted(directory.rglob("*"))
    removed, _ = clean(str(tmp_path), None, HOUR_S)
    assert names(removed) == ["job"]
    assert sorted(directory.rglob("*")) == before


def test_young_job_is_left_unless_it_is_named(tmp_path: Path) -> None:
    directory = leave_job(tmp_path, "job", age_s=60)
    removed, left = clean(str(tmp_path), None, HOUR_S, removes=True)
    assert removed == []
    assert "younger than 60 minutes; name it to remove it" in left[0]
    clean(str(tmp_path), "job", HOUR_S, removes=True)
    assert not directory.exists()


def test_named_job_goes_alone(tmp_path: Path) -> None:
    leave_job(tmp_path, "job")
    other = leave_job(tmp_path, "other")
    clean(str(tmp_path), "job", HOUR_S, removes=True)
    assert list(tmp_path.iterdir()) == [other]


def test_running_job_is_left_even_if_it_is_named(tmp_path: Path) -> None:
    directory = leave_job(tmp_path, "job")
    with alive_lock(directory / "node0", 0):
        _, left = clean(str(tmp_path), "job", 0, removes=True)
    assert left == ["job 'job': 1.00 MiB, 120 minutes old: it is running"]
    assert (directory / "node0" / "rank_00000" / "region_0.safetensors").exists()


def test_job_that_ends_meanwhile_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = leave_job(tmp_path, "job")

    def end(found: Path) -> tuple[str, float]:
        shutil.rmtree(found)
        return "job", 2 * HOUR_S

    monkeypatch.setattr(cleaning, "describe", end)
    assert clean(str(tmp_path), None, HOUR_S)[1] == ["job: it has just ended"]
    assert not directory.exists()


def test_job_that_is_just_starting_is_left(tmp_path: Path) -> None:
    directory = leave_job(tmp_path, "job")
    with job_lock(directory).acquire():
        _, left = clean(str(tmp_path), "job", 0, removes=True)
    assert "it is starting or ending" in left[0]
    assert directory.exists()


@pytest.mark.parametrize("path", ["alice/thesis/final.tex", "iter_0001000/manifest.json"])
def test_directories_without_a_marker_are_left(tmp_path: Path, path: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.touch()
    leave_job(tmp_path, "job")
    _, left = clean(str(tmp_path), None, 0, removes=True)
    assert left == [f"{Path(path).parts[0]}: not a job of moe_ft: it has no .moe_ft_job of its own"]
    assert file.exists()


def test_directory_without_jobs_that_holds_other_things_is_refused(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"iter_{number}").mkdir()
    message = (
        f"--memory-dir={tmp_path} must hold jobs of yours, .* Left: iter_0: not a job of moe_ft: .*; and 2 "
        "more. Name the directory of --moe-ft-memory-dir"
    )
    with pytest.raises(ConfigError, match=message):
        clean(str(tmp_path), None, 0, removes=True)
    assert len(list(tmp_path.iterdir())) == 5


def test_job_with_something_else_in_it_is_left(tmp_path: Path) -> None:
    directory = leave_job(tmp_path, "job")
    (directory / "iter_0001000").mkdir()
    (directory / "iter_0001000" / "manifest.json").touch()
    _, left = clean(str(tmp_path), "job", 0, removes=True)
    assert "it holds iter_0001000/manifest.json, which is not of moe_ft" in left[0]
    assert (directory / "node0").exists()


def test_what_a_link_leads_to_is_left(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    target = leave_job(tmp_path / "elsewhere", "job")
    (memory / "job").symlink_to(target)
    with pytest.raises(ConfigError, match="Left: job: a symbolic link, not a job of moe_ft"):
        clean(str(memory), "job", 0, removes=True)
    assert (target / "node0").exists()


def test_target_of_a_link_inside_of_a_job_is_left(tmp_path: Path) -> None:
    directory = leave_job(tmp_path / "memory", "job")
    (tmp_path / "thesis").touch()
    (directory / "node0" / "rank_00000" / "link").symlink_to(tmp_path / "thesis")
    clean(str(tmp_path / "memory"), "job", 0, removes=True)
    assert not directory.exists()
    assert (tmp_path / "thesis").exists()


@as_root
def test_job_of_another_user_is_left(tmp_path: Path) -> None:
    os.chown(leave_job(tmp_path, "job"), 65534, 65534)
    with pytest.raises(ConfigError, match="Left: job: it belongs to user 65534, not to 0"):
        clean(str(tmp_path), "job", 0, removes=True)
    assert (tmp_path / "job" / "node0").exists()


def test_job_that_cannot_be_removed_is_left_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_job(tmp_path, "job")
    leave_job(tmp_path, "zebra")

    def fail(path: Path) -> None:
        raise PermissionError(f"no right to {path.parent.name}")

    monkeypatch.setattr("shutil.rmtree", fail)
    removed, left = clean(str(tmp_path), None, 0, removes=True)
    assert removed == []
    assert "cannot be removed: no right to job" in left[0]
    assert "cannot be removed: no right to zebra" in left[1]


@pytest.mark.parametrize("minutes", ["nan", "-5", "inf"])
def test_age_that_is_no_number_of_minutes_is_refused(tmp_path: Path, minutes: str) -> None:
    directory = leave_job(tmp_path, "job")
    message = f"--older-than={minutes} must be a number of minutes, at least 0. Give 0 to"
    with pytest.raises(ConfigError, match=message):
        clean(str(tmp_path), None, float(minutes) * 60, removes=True)
    assert directory.exists()


@pytest.mark.parametrize("memory_dir", ["", " "])
def test_empty_memory_directory_is_refused(memory_dir: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory-dir= +is empty: an unset variable\? Name the"):
        clean(memory_dir, None, 0)


def test_memory_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--memory-dir=.*file cannot be read.*Name the directory"):
        clean(str(tmp_path / "file"), None, 0)


def test_named_job_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--job-id=job has no memory under .*Leave it out to see"):
        clean(str(tmp_path), "job", 0)


def test_memory_directory_that_does_not_exist_holds_nothing(tmp_path: Path) -> None:
    assert clean(str(tmp_path / "missing"), None, 0) == ([], [])


def test_command_says_what_it_would_remove_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_job(tmp_path, "job")
    assert main(["clean", "--memory-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "would remove job 'job': 1.00 MiB, 120 minutes old",
        "nothing was removed: add --remove to do that",
    ]


def test_command_removes_with_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leave_job(tmp_path, "job")
    assert main(["clean", "--memory-dir", str(tmp_path), "--remove"]) == 0
    assert capsys.readouterr().out == "removed job 'job': 1.00 MiB, 120 minutes old\n"
    assert list(tmp_path.iterdir()) == []


def test_command_that_leaves_the_job_it_was_to_remove_fails(tmp_path: Path) -> None:
    directory = leave_job(tmp_path, "job")
    with alive_lock(directory / "node0", 0):
        command = ["clean", "--memory-dir", str(tmp_path), "--job-id", "job", "--remove"]
        assert main(command) == 1
