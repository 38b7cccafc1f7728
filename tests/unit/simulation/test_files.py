"""Simulated files: writes that tear, and what is left when a process dies."""

import mmap
import os
import random
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import filelock

from moe_ft.engine.memory.regions import Region
from moe_ft.files.private_files import write_atomically
from tests.simulation.active import World
from tests.unit.simulation.small_world import errors_of, node_of, run, small_world, start

OLD, NEW = b"old content", b"something else that is longer"


def num_descriptors() -> int:
    """Return how many descriptors the real process has open."""
    return len(os.listdir("/proc/self/fd"))


def kill_at_event(world: World, number: int) -> None:
    """Kill the process that passes an event."""
    world.kernel.call_at_event(number, lambda what: world.kernel.end(world.process))


def test_writer_that_is_killed_anywhere_leaves_the_old_content_or_the_new() -> None:
    num_killed, found = 0, set()
    for number in range(1, 30):
        for seed in range(5):
            with small_world(seed) as world:
                world.files.tearing = 1.0
                path = node_of(world) / "state"
                path.write_bytes(OLD)
                kill_at_event(world, number)
                (process,) = run(world, lambda path=path: write_atomically(path, NEW))
                num_killed += process.exit_code == -9
                found.add(path.read_bytes())
                # What the dead process left does not harm the next one.
                run(world, lambda path=path: write_atomically(path, NEW))
                assert path.read_bytes() == NEW
                assert not errors_of(world)
    assert num_killed > 25
    assert found == {OLD, NEW}


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


def test_killed_process_closes_nothing_any_more_when_the_simulation_ends() -> None:
    def hold(path: Path) -> None:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
        try:
            time.sleep(100)
        finally:
            os.close(descriptor)
            path.unlink()

    with small_world() as world:
        path = node_of(world) / "state"
        process = start(world, lambda: hold(path))
        world.kernel.run(lambda: False, 10)
        world.kernel.end(process)
        (taken,) = (os.open("/dev/null", os.O_RDONLY),)  # has the number of the other one
        world.kernel.close()
        assert path.exists()
        os.close(taken)


def hold_everything(directory: Path) -> None:
    """Open files in every way there is, and wait."""
    directory.mkdir(exist_ok=True, mode=0o700)
    region = Region(directory, 0, 4096)
    region.open()
    path = directory / f"file_{os.getpid()}"
    path.write_bytes(OLD)
    lock = filelock.FileLock(directory / f"lock_{os.getpid()}")
    descriptor = os.open(path, os.O_RDONLY)
    with lock, path.open("rb"), path.open("r+b") as both, path.open("a") as text:
        text.write("x")
        both.read(1)
        with os.fdopen(os.open(path, os.O_RDONLY), "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            time.sleep(1000)
            mapping.close()
    os.close(descriptor)


def test_descriptors_of_a_thousand_processes_do_not_leak() -> None:
    with small_world() as world:
        node_of(world)
    before = num_descriptors()
    for seed in range(100):
        with small_world(seed) as world:
            chance = random.Random(seed)
            act = partial(hold_everything, node_of(world))
            processes = [start(world, act) for _ in range(10)]
            world.kernel.run(lambda: False, chance.uniform(0, 0.01))
            for process in processes[:8]:
                world.kernel.end(process)
            world.kernel.run(lambda: False, 10)
            assert not errors_of(world)
    assert num_descriptors() <= before  # other tests may have left some
