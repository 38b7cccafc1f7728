"""Simulated files: writes that tear, what is left when a process dies, locks, and losses of power."""

import os
import time
from contextlib import suppress
from pathlib import Path

import filelock
import pytest

from tests.unit.simulation.small_world import errors_of, node_of, run, small_world, start

OLD, NEW = b"old content", b"something else that is longer"


def test_torn_writes_end_at_every_byte() -> None:
    left = set()
    for seed in range(300):
        with small_world(seed) as world:
            world.files.tearing = 1.0
            path = node_of(world) / "state"
            world.kernel.call_at_event(3, lambda what, world=world: world.kernel.end(world.process))
            run(world, lambda path=path: path.write_bytes(b"0123456789"))
            left.add(path.read_bytes())
    assert left == {b"0123456789"[:length] for length in range(1, 10)}


def test_reader_sees_a_write_that_is_half_done() -> None:
    seen = set()

    def read(path: Path) -> None:
        for _ in range(20):
            with suppress(FileNotFoundError):
                seen.add(path.read_bytes())

    for seed in range(50):
        with small_world(seed) as world:
            path = node_of(world) / "state"
            run(world, lambda path=path: path.write_bytes(NEW), lambda path=path: read(path))
    assert len(seen) > 3


def test_buffered_data_of_a_killed_process_never_reaches_its_file() -> None:
    def hold(path: Path) -> None:
        with path.open("wb") as file:
            file.write(NEW)
            time.sleep(100)

    with small_world() as world:
        path = node_of(world) / "state"
        process = start(world, lambda: hold(path))
        world.kernel.run(lambda: False, 10)
        world.kernel.end(process)
        world.kernel.run(lambda: False, 20)
        world.kernel.close()
        assert path.read_bytes() == b""


def test_locks_of_processes_exclude_each_other_and_each_is_released_by_its_own() -> None:
    inside, most = [], []

    def use(path: Path, name: int) -> None:
        for _ in range(5):
            with filelock.FileLock(path, mode=0o600):
                inside.append(name)
                most.append(len(inside))
                time.sleep(0.01)
                inside.remove(name)

    with small_world() as world:
        path = node_of(world) / "lock"
        run(world, *(lambda name=name: use(path, name) for name in range(4)))
        assert len(most) == 20
        assert max(most) == 1
        assert not errors_of(world)


def test_new_file_that_is_not_synced_may_vanish_or_hold_anything_of_its_length() -> None:
    contents = set()
    for seed in range(100):
        with small_world(seed) as world:
            world.files.tearing = 0.0
            path = world.files.storage / "new"
            run(world, lambda path=path: path.write_bytes(NEW))
            assert not world.kernel.errors
            world.files.power_loss()
            contents.add(path.read_bytes() if path.exists() else None)
    assert {None, b"", NEW} < contents
    partial = {each for each in contents if each and each != NEW}
    assert any(NEW.startswith(content) for content in partial)
    assert any(content.endswith(b"\0") for content in partial)
    assert any(not NEW.startswith(content.rstrip(b"\0")) for content in partial)


def test_data_is_lost_after_a_sync_that_failed_though_the_next_succeeds() -> None:
    left = set()

    def work(path: Path) -> None:
        with path.open("r+b") as file:
            file.write(NEW)
            file.flush()
            with pytest.raises(OSError, match="Input/output"):
                os.fsync(file.fileno())
            os.fsync(file.fileno())

    for seed in range(20):
        with small_world(seed) as world:
            path = world.files.storage / "file"
            path.write_bytes(OLD)
            world.files.fail("fsync", 5, "storage")
            run(world, lambda path=path: work(path))
            assert not world.kernel.errors
            world.files.power_loss()
            left.add(path.read_bytes())
    assert left == {OLD}
