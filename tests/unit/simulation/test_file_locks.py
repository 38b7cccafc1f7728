"""Locks of the package filelock between simulated processes."""

import time
from pathlib import Path

import filelock

from tests.unit.simulation.small_world import errors_of, node_of, run, small_world, start


def test_lock_of_a_killed_process_is_free() -> None:
    taken = []

    def take(path: Path, name: str) -> None:
        with filelock.FileLock(path):
            taken.append((name, world.kernel.now))
            time.sleep(1000)

    with small_world() as world:
        path = node_of(world) / "lock"
        first = start(world, lambda: take(path, "first"))
        world.kernel.run(lambda: bool(taken))
        start(world, lambda: take(path, "second"))
        world.kernel.run(lambda: False, 5)
        assert len(taken) == 1
        world.kernel.end(first)
        world.kernel.run(lambda: False, 6)
        assert [name for name, _ in taken] == ["first", "second"]
        assert not errors_of(world)


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


def test_thread_that_waits_for_its_own_lock_is_told_so() -> None:
    def take_twice(path: Path) -> None:
        with filelock.FileLock(path):
            filelock.FileLock(path).acquire()

    with small_world() as world:
        path = node_of(world) / "lock"
        run(world, lambda: take_twice(path))
        assert "Deadlock" in str(errors_of(world)[0])
