"""A world with files and processes but without a network, for tests of these."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tests.simulation import file_locks, files, processes, threads
from tests.simulation.active import Patches, World, active
from tests.simulation.files import Files
from tests.simulation.kernel import Kernel, Process

_count = itertools.count()


@contextmanager
def small_world(seed: int | str = 0, switching: float = 0.2) -> Iterator[World]:
    """Yield a world in which simulated threads may run."""
    kernel = Kernel(seed, switching=switching)
    root = Path("/dev/shm") / f"moe_ft_simulation_{os.getpid()}_{next(_count)}"
    nothing = cast(Any, None)
    world = World(kernel=kernel, files=Files(kernel, root), network=nothing, collectives=nothing)
    patches = Patches()
    try:
        with active(world):
            for module in (threads, files, file_locks, processes):
                module.install(patches)
            try:
                yield world
            finally:
                kernel.close()
    finally:
        world.files.close()
        patches.restore()


def start(world: World, act: Callable[[], Any], name: str = "rank", node: str = "a") -> Process:
    """Start a process; nothing runs before the kernel does."""
    process = world.kernel.make_process(name, node, {"NAME": name})
    world.kernel.spawn(process, act)
    return process


def run(world: World, *acts: Callable[[], Any], for_s: float = 1000.0) -> list[Process]:
    """Run processes until all their main threads have ended or died; return the processes."""
    started = [start(world, act, f"rank{number}") for number, act in enumerate(acts)]

    def is_over() -> bool:
        return all(each.threads[0].is_done or not each.is_alive for each in started)

    world.kernel.run(is_over, world.kernel.now + for_s)
    return started


def node_of(world: World) -> Path:
    directory = world.files.memory / "job" / "a"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def errors_of(world: World) -> list[BaseException]:
    return [error for _, error in world.kernel.errors]
