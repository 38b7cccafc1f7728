"""Faults of simulated files, and damage to them."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock
import pytest

from moe_ft.files.private_files import write_atomically
from tests.unit.simulation.small_world import errors_of, node_of, run, small_world, start

OLD, NEW = b"old content", b"something else that is longer"


def failing(act: Callable[[Path], Any], **fault: Any) -> OSError | None:
    caught: list[OSError] = []

    def attempt(path: Path) -> None:
        try:
            act(path)
        except OSError as error:
            caught.append(error)

    with small_world() as world:
        path = world.files.storage / "file"
        path.write_bytes(OLD)
        world.files.fail(**{"where": "storage", **fault})
        run(world, lambda: attempt(path))
        assert not errors_of(world)
    return caught[0] if caught else None


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("kind", "error", "act"),
    [
        ("write", errno.ENOSPC, lambda path: path.write_bytes(NEW)),
        ("write", errno.EIO, lambda path: path.write_text("text")),
        ("read", errno.EIO, lambda path: path.read_bytes()),
        ("read", errno.ESTALE, lambda path: os.listdir(path.parent)),
        ("read", errno.ESTALE, lambda path: path.exists() and path.stat()),
        ("create", errno.EACCES, lambda path: path.with_name("other").write_bytes(NEW)),
        ("create", errno.ENOSPC, lambda path: path.with_name("other").mkdir()),
        ("create", errno.EIO, lambda path: path.with_name("other").hardlink_to(path)),
        ("rename", errno.EIO, lambda path: path.rename(path.with_name("other"))),
        ("remove", errno.EACCES, lambda path: path.unlink()),
        ("fsync", errno.EIO, sync),
        ("", errno.EIO, lambda path: path.read_bytes()),
    ],
)
def test_fault_surfaces_as_an_error_of_its_number(
    kind: str, error: int, act: Callable[[Path], Any]
) -> None:
    caught = failing(act, kind=kind, error=error)
    assert caught is not None
    assert caught.errno == error
    assert type(caught) is type(OSError(error, ""))


def test_full_disk_takes_a_part_at_most_and_has_no_room_left() -> None:
    sizes = set()

    def fill(path: Path) -> None:
        with pytest.raises(OSError, match="No space") as caught:
            write_atomically(path, NEW)
        assert caught.value.errno == errno.ENOSPC
        assert shutil.disk_usage(path.parent).free == 0
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        with pytest.raises(OSError, match="No space"):
            os.posix_fallocate(descriptor, 0, 100)
        with suppress(OSError):
            os.write(descriptor, NEW)
        sizes.add(os.fstat(descriptor).st_size)
        os.close(descriptor)

    for seed in range(30):
        with small_world(seed) as world:
            path = node_of(world) / "state"
            fault = world.files.full("memory/job/a")
            run(world, lambda path=path: fill(path))
            world.files.mend(fault)
            run(world, lambda path=path: write_atomically(path, NEW))
            assert not errors_of(world)
            assert path.read_bytes() == NEW
    assert len(sizes) > 3
    assert max(sizes) < len(NEW)


def test_slow_storage_takes_its_time_and_stuck_storage_returns_when_it_is_over() -> None:
    with small_world() as world:
        path = world.files.storage / "file"
        path.write_bytes(OLD)
        world.files.slow("storage", 0.5, for_s=10)
        run(world, path.read_bytes)
        assert world.kernel.now == pytest.approx(0.5, abs=0.01)
        world.files.stuck("storage", for_s=100)
        run(world, path.read_bytes)
        assert world.kernel.now == pytest.approx(100.5, abs=0.01)


def test_process_that_is_killed_in_a_stuck_operation_keeps_its_lock_until_that_returns() -> None:
    def hold(path: Path, other: Path) -> None:
        with filelock.FileLock(path):
            other.read_bytes()

    with small_world() as world:
        path, other = node_of(world) / "lock", world.files.storage / "file"
        world.files.stuck("storage", for_s=50)
        process = start(world, lambda: hold(path, other))
        world.kernel.run(lambda: False, 10)
        world.kernel.end(process)
        run(world, lambda: filelock.FileLock(path).acquire())
        assert not errors_of(world)
        assert world.kernel.now == pytest.approx(50, abs=0.2)
        assert world.files.stuck_until(process) == 50


def test_node_that_was_set_aside_comes_back_with_its_old_memory() -> None:
    with small_world() as world:
        (node_of(world) / "file").write_bytes(OLD)
        world.files.set_aside("a")
        assert world.files.paths("memory") == []
        (node_of(world) / "file").write_bytes(NEW)
        assert world.files.bring_back("a")
        assert world.files.snapshot("memory") == {"memory/job/a/file": OLD}
