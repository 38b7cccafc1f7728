"""A job's directory is marked as one, and goes with its last node."""

import threading
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.memory.job_directory import (
    MARKER_NAME,
    entered_job,
    foreign_entry,
    job_lock,
    read_marker,
    remove_job,
    remove_node,
)
from moe_ft.errors import UnsafePathError

WAIT_S = 120.0


def enter(directory: Path, *nodes: str) -> None:
    """Start a job on some nodes."""
    with entered_job(directory, WAIT_S):
        for node in nodes:
            (directory / node / "rank_00000").mkdir(parents=True)


def test_job_that_is_entered_is_marked_with_its_name_and_user(tmp_path: Path) -> None:
    enter(tmp_path / "job")
    marker = read_marker(tmp_path / "job")
    assert marker is not None
    assert (marker.job_id, marker.uid) == ("job", tmp_path.stat().st_uid)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"x", b'{"format":"moe_ft/job/1"}', b'{"format":"y","job_id":"job","uid":0}'),
        b'{"format":"\xff","job_id":"job","uid":0}',
    ],
)
def test_marker_that_cannot_be_read_makes_no_job(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / MARKER_NAME).write_bytes(content)
    assert read_marker(tmp_path / "job") is None


def test_marker_of_another_user_makes_no_job(tmp_path: Path) -> None:
    enter(tmp_path / "job")
    marker = read_marker(tmp_path / "job")
    assert marker is not None
    theirs = msgspec.structs.replace(marker, uid=marker.uid + 1)
    (tmp_path / "job" / MARKER_NAME).write_bytes(msgspec.json.encode(theirs))
    assert read_marker(tmp_path / "job") is None


def test_directory_that_holds_something_else_does_not_become_a_job(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "final.tex").touch()
    with pytest.raises(UnsafePathError, match=r"has no .moe_ft_job and holds final.tex"):
        enter(tmp_path / "thesis")
    assert not (tmp_path / "thesis" / MARKER_NAME).exists()


@pytest.mark.parametrize(
    "path", ["node/rank_00000", "node/replica_00001_at_00000", "node/persist", "node"]
)
def test_directory_of_a_job_is_not_foreign(tmp_path: Path, path: str) -> None:
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / MARKER_NAME).touch()
    (tmp_path / "node" / "rank_00000.alive").touch()
    (tmp_path / "node" / ".launcher.4711").touch()  # its writer was killed
    assert foreign_entry(tmp_path) is None


@pytest.mark.parametrize(
    "path", ["file", "node/file", "node/.file.4711", "node/rank_00000", "node/other/file"]
)
def test_what_no_job_has_is_foreign(tmp_path: Path, path: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert foreign_entry(tmp_path) in (file, file.parent)


def test_link_in_a_job_is_foreign(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "rank_00000").symlink_to(tmp_path)
    assert foreign_entry(tmp_path) == tmp_path / "node" / "rank_00000"


def test_job_goes_with_its_last_node(tmp_path: Path) -> None:
    enter(tmp_path / "job", "node0", "node1")
    remove_node(tmp_path / "job" / "node0")
    assert read_marker(tmp_path / "job") is not None
    remove_node(tmp_path / "job" / "node1")
    assert not (tmp_path / "job").exists()


def test_nodes_that_end_at_the_same_time_leave_nothing(tmp_path: Path) -> None:
    nodes = [f"node{number}" for number in range(8)]
    enter(tmp_path / "job", *nodes)
    threads = [
        threading.Thread(target=remove_node, args=(tmp_path / "job" / node,)) for node in nodes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not (tmp_path / "job").exists()


def test_start_waits_while_its_job_is_removed_and_creates_it_again(tmp_path: Path) -> None:
    enter(tmp_path / "job", "node0")

    def start() -> None:
        while True:
            try:
                return enter(tmp_path / "job", "node1")
            except FileNotFoundError:  # as claim_memory does
                continue

    starter = threading.Thread(target=start)
    with job_lock(tmp_path / "job").acquire():
        starter.start()
        remove_job(tmp_path / "job")
    starter.join(WAIT_S)
    assert read_marker(tmp_path / "job") is not None
    assert (tmp_path / "job" / "node1").exists()


def test_removal_that_fails_keeps_the_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(tmp_path / "job", "node")

    def fail(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("shutil.rmtree", fail)
    with pytest.raises(PermissionError):
        remove_job(tmp_path / "job")
    assert read_marker(tmp_path / "job") is not None
