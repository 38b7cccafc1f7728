"""Directories that flags name can hold what they are for, and are apart."""

from pathlib import Path

import pytest

from moe_ft.config.directories import check_directories
from moe_ft.errors import ConfigError


@pytest.mark.parametrize(
    ("memory_dir", "persist_dir"),
    [
        ("/dev/shm/x", None),
        ("/dev/shm/x", "/scratch/x"),
        ("/dev/shm/x", "/dev/shm/xy"),
        ("/dev/shm/x", "/dev/shm/y"),
        ("/dev/shm/x", "checkpoints"),
        ("/dev/shm/x", "s3://dev/shm/x"),
        ("/dev/shm/x", "file:///scratch/memory/x"),
    ],
)
def test_directories_that_are_apart_are_accepted(memory_dir: str, persist_dir: str | None) -> None:
    check_directories(memory_dir, persist_dir)


@pytest.mark.parametrize("memory_dir", ["memory", ".", "../x", "~/x"])
def test_memory_directory_that_depends_on_the_current_one_is_refused(memory_dir: str) -> None:
    message = (
        f"--moe-ft-memory-dir={memory_dir} must be an absolute path.*Write it like /dev/shm/NAME"
    )
    with pytest.raises(ConfigError, match=message):
        check_directories(memory_dir, None)


@pytest.mark.parametrize("url", ["memory://x", "simplecache::memory://x", "memory::x"])
def test_storage_in_the_memory_of_a_process_is_refused(url: str) -> None:
    message = f"--moe-ft-persist-dir={url} must be storage that outlives.*Name a directory"
    with pytest.raises(ConfigError, match=message):
        check_directories("/dev/shm/x", url)


@pytest.mark.parametrize("prefix", ["", "file://", "local://", "file:"])
@pytest.mark.parametrize(
    ("memory", "persist"),
    [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "c/../a/"), ("a", "link/b")],
)
def test_directories_that_are_one_or_one_in_the_other_are_refused(
    tmp_path: Path, memory: str, persist: str, prefix: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    url = f"{prefix}{tmp_path}/{persist}"
    message = (
        f"--moe-ft-persist-dir={url} must not be the same directory or one in the other.*apart"
    )
    with pytest.raises(ConfigError, match=message):
        check_directories(str(tmp_path / memory), url)


def test_storage_that_is_relative_is_compared_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must not be the same directory"):
        check_directories(str(tmp_path), "checkpoints")
