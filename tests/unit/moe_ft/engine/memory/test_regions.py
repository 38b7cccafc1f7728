"""Regions: commits, what survives the process, and file systems that are too small."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from moe_ft.engine.memory.job_directory import (
    file_system_type,
    find_indexes,
    node_directory,
    own_directory,
    replica_directory,
)
from moe_ft.engine.memory.regions import Region
from moe_ft.errors import UnsafePathError
from moe_ft.format.index import Index

NUM_BYTES = 3 * 4096 + 17
TMPFS_BYTES = 1 << 20


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory on a tmpfs of one MiB."""
    mount_point = tmp_path / "tmpfs"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(mount_point)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def opened(directory: Path, number: int = 0, num_bytes: int = NUM_BYTES) -> Region:
    region = Region(directory, number, num_bytes)
    region.open()
    return region


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_reader_during_commits_sees_a_whole_index_or_the_one_before(tmp_path: Path) -> None:
    region = opened(tmp_path)
    contents = [bytes([letter]) * 300_000 for letter in b"abcdefgh"]
    region.commit(contents[0], 0)
    is_done = threading.Event()
    torn: list[int] = []
    num_reads = 0

    def read() -> None:
        nonlocal num_reads
        while not is_done.is_set():
            found = region.index_path.read_bytes()
            num_reads += 1
            if found not in contents:
                torn.append(len(found))

    reader = threading.Thread(target=read)
    reader.start()
    for iteration in count():
        region.commit(contents[iteration % len(contents)], iteration)
        if iteration >= 200 and num_reads > 20:
            break
    is_done.set()
    reader.join()
    assert torn == []


@pytest.mark.parametrize("num_bytes", [NUM_BYTES - 1, NUM_BYTES + 1])
def test_left_over_of_another_size_is_dropped_with_its_index(
    tmp_path: Path, num_bytes: int
) -> None:
    region = opened(tmp_path)
    region.mapping[:] = b"x" * NUM_BYTES
    region.commit(b"an index", 7)
    region.close()
    again = opened(tmp_path, num_bytes=num_bytes)
    assert bytes(again.mapping) == b"\0" * num_bytes
    assert not again.index_path.exists()


def test_memory_that_a_tensor_shows_stays_mapped_until_the_tensor_is_gone(tmp_path: Path) -> None:
    region = opened(tmp_path)
    tensor = torch.frombuffer(region.view, dtype=torch.uint8)
    region.close()
    assert is_mapped(region.data_path)  # or the next line would end this process
    assert tensor.fill_(7).sum() == 7 * NUM_BYTES
    del tensor
    assert not is_mapped(region.data_path)


def test_directory_and_files_of_a_region_are_private(tmp_path: Path) -> None:
    region = opened(tmp_path / "rank")
    region.commit(b"an index", 7)
    assert mode_of(region.directory) == 0o700
    assert (mode_of(region.data_path), mode_of(region.index_path)) == (0o600, 0o600)


@pytest.mark.parametrize("num_bytes", [NUM_BYTES, NUM_BYTES + 1])
def test_region_that_is_a_link_is_refused_and_its_target_stays(
    tmp_path: Path, num_bytes: int
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"S" * num_bytes)
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank" / "region_0.safetensors").symlink_to(target)
    with pytest.raises(UnsafePathError, match=r"region_0\.safetensors is a symbolic link"):
        opened(tmp_path / "rank")
    assert target.read_bytes() == b"S" * num_bytes


def test_region_that_does_not_fit_raises_instead_of_killing_the_process(small_tmpfs: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from moe_ft.engine.memory.regions import Region\n"
        f"region = Region(Path(sys.argv[1]), 0, {2 * TMPFS_BYTES})\n"
        "try:\n    region.open()\nexcept OSError as error:\n    print('refused', error.errno)"
    )
    command = [sys.executable, "-c", code, str(small_tmpfs / "rank")]
    child = subprocess.run(command, capture_output=True, text=True)
    assert (child.returncode, child.stdout.split()[:1]) == (0, ["refused"]), child.stderr


def test_region_that_did_not_fit_opens_once_there_is_room(small_tmpfs: Path) -> None:
    blocker = small_tmpfs / "blocker"
    blocker.write_bytes(bytes(TMPFS_BYTES - 8 * 4096))
    region = Region(small_tmpfs / "rank", 0, TMPFS_BYTES // 2)
    with pytest.raises(OSError, match="No space left"):
        region.open()
    blocker.unlink()
    region.open()
    region.mapping[-1:] = b"x"


def test_commit_on_a_full_file_system_keeps_the_index_before_and_no_rest(
    small_tmpfs: Path,
) -> None:
    region = opened(small_tmpfs / "rank")
    region.commit(b"the one before", 1)
    with (small_tmpfs / "blocker").open("wb") as blocker, pytest.raises(OSError, match="No space"):
        while True:
            os.write(blocker.fileno(), bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        region.commit(b"x" * 8192, 2)
    assert region.index_path.read_bytes() == b"the one before"
    assert region.iteration == 1
    assert len(list(region.directory.iterdir())) == 2


def test_commit_after_the_directory_has_vanished_raises(tmp_path: Path) -> None:
    region = opened(tmp_path / "rank")
    region.data_path.unlink()
    region.directory.rmdir()
    with pytest.raises(FileNotFoundError):
        region.commit(b"an index", 1)


def test_type_of_a_mounted_tmpfs_is_tmpfs(small_tmpfs: Path) -> None:
    assert file_system_type(small_tmpfs / "not" / "yet") == "tmpfs"


def test_indexes_of_a_node_are_found_in_order_and_nothing_else(tmp_path: Path) -> None:
    wanted = []
    for directory in (own_directory(tmp_path, 2), replica_directory(tmp_path, 0, 2)):
        for number in (0, 1):
            region = opened(directory, number)
            region.commit(b"an index", 1)
            wanted.append(region.index_path)
        (directory / ".region_0.json.123").touch()
        (directory / "region_0.json.part").touch()
    (tmp_path / "persist").mkdir()
    (tmp_path / "persist" / "request_00000.json").touch()
    (tmp_path / "a file").touch()
    assert [path for path, _ in find_indexes(tmp_path, Index)] == wanted


def test_directory_that_is_a_link_has_no_indexes_and_is_said_to_be_one(tmp_path: Path) -> None:
    opened(own_directory(tmp_path, 2)).commit(b"an index", 1)
    (tmp_path / "rank_00003").symlink_to(tmp_path / "rank_00002")
    (found, _), (refused, refusal) = find_indexes(tmp_path, Index)
    assert found.parent.name == "rank_00002"
    assert refused == tmp_path / "rank_00003"
    assert "is a symbolic link" in str(refusal)


def test_directories_of_jobs_nodes_ranks_and_replicas_are_those_of_the_documentation() -> None:
    node_dir = node_directory("/dev/shm/moe_ft", "job-1", "node-a")
    assert str(own_directory(node_dir, 3)) == "/dev/shm/moe_ft/job-1/node-a/rank_00003"
    assert replica_directory(node_dir, 3, 12).name == "replica_00003_at_00012"
