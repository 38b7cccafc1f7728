"""Locks, threads, queues and clocks of simulated processes, in the places of those of Python's library.

Event, Condition, Semaphore, Queue, Future and ThreadPoolExecutor are those of Python: they are built on
locks and threads. Outside of a simulated thread everything is as usual.
"""

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, tzinfo
from functools import partial
from queue import Empty
from typing import Any

from moe_ft.engine.persist import storage_lock
from moe_ft.recovery import meet
from tests.simulation.active import Patches, World, world
from tests.simulation.kernel import Kernel, Thread, Waiting


class SimulatedLock:
    """A lock that simulated threads wait for."""

    def __init__(self, kernel: Kernel, *, is_reentrant: bool = False) -> None:
        self._kernel, self._is_reentrant = kernel, is_reentrant
        self._owner: Thread | None = None
        self._count = 0
        self._waiting = Waiting()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether that was possible in time."""
        kernel = self._kernel
        if self._count and self._is_reentrant and self._owner is kernel.running:
            self._count += 1
            return True
        until = None if timeout is None or timeout < 0 else kernel.now + timeout
        while self._count:
            if not blocking:
                return False
            rest_s = None if until is None else until - kernel.now
            if rest_s is not None and rest_s <= 0:
                return False
            kernel.wait(self._waiting, rest_s)
        self._count, self._owner = 1, kernel.running
        return True

    def release(self) -> None:
        if not self._count:
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._kernel.wake(self._waiting, 1)

    def locked(self) -> bool:
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What `threading.Condition` asks of a lock that can be taken twice.

    def _is_owned(self) -> bool:
        return self._count > 0 and (not self._is_reentrant or self._owner is self._kernel.running)

    def _release_save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self.acquire()
        self._count = count


class SimulatedThread:
    """A thread, as `threading.Thread` looks to those who start and join one."""

    def __init__(
        self,
        world: World,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._kernel, self._process = world.kernel, world.process
        self._act = partial(target or (lambda: None), *args, **(kwargs or {}))
        self.name, self.daemon = name or "thread", bool(daemon)
        self._thread: Thread | None = None

    def start(self) -> None:
        assert self._thread is None
        self._thread = self._kernel.spawn(self._process, self._act, self.name)

    def join(self, timeout: float | None = None) -> None:
        assert self._thread is not None
        if not self._thread.is_done:
            self._kernel.wait(self._thread.joining, timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.is_done


class SimulatedQueue:
    """A `queue.SimpleQueue`."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._items, self._waiting = kernel, deque[Any](), Waiting()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._kernel.wake(self._waiting, 1)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Return the oldest; raise Empty if there is none in time."""
        until = None if timeout is None else self._kernel.now + timeout
        while not self._items:
            rest_s = None if until is None else until - self._kernel.now
            if not block or (rest_s is not None and rest_s <= 0):
                raise Empty
            self._kernel.wait(self._waiting, rest_s)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """Return the oldest; raise Empty if there is none."""
        return self.get(block=False)

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items


@dataclass(eq=False)
class Clocks:
    """Clocks of a node.

    Attributes:
        booted_s: what its monotonic clocks showed when the simulation began.
        wall_s: what its wall clock is ahead of the simulation; somebody may set it.
    """

    booted_s: float
    wall_s: float


def clocks_of(world: World) -> Clocks:
    node = world.process.node
    found = world.clocks.get(node)
    if found is None:
        generator = random.Random(node)
        found = Clocks(booted_s=generator.uniform(0, 1e6), wall_s=1.75e9 + generator.uniform(0, 5))
        world.clocks[node] = found
    return found


def _monotonic(world: World) -> float:
    return clocks_of(world).booted_s + world.kernel.now


def _wall(world: World) -> float:
    return clocks_of(world).wall_s + world.kernel.now


def _sleep(world: World, seconds: float) -> None:
    world.kernel.event("sleep")
    world.kernel.sleep(seconds)


def _clock_gettime(world: World, clock: int) -> float:
    return _wall(world) if clock == time.CLOCK_REALTIME else _monotonic(world)


class _WallClock(datetime):
    """A `datetime` whose `now` is that of the simulated node."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_WallClock":
        current = world()
        return cls.fromtimestamp(time.time() if current is None else _wall(current), tz)


def install(patches: Patches) -> None:
    """Put simulated locks, threads, queues and clocks in the places of real ones."""
    for owner, name in ((threading, "Lock"), (threading, "_allocate_lock")):
        patches.divert(owner, name, lambda world: SimulatedLock(world.kernel))
    patches.divert(threading, "RLock", lambda world: SimulatedLock(world.kernel, is_reentrant=True))
    patches.divert(threading, "Thread", SimulatedThread)
    patches.divert(queue, "SimpleQueue", lambda world: SimulatedQueue(world.kernel))
    for owner, name in (
        (time, "monotonic"),
        (time, "perf_counter"),
        (threading, "_time"),
        (queue, "time"),
    ):
        patches.divert(owner, name, _monotonic)
    patches.divert(time, "monotonic_ns", lambda world: int(_monotonic(world) * 1e9))
    patches.divert(time, "time", _wall)
    patches.divert(time, "time_ns", lambda world: int(_wall(world) * 1e9))
    patches.divert(time, "clock_gettime", _clock_gettime)
    patches.divert(time, "sleep", _sleep)
    for module in (meet, storage_lock):
        patches.set(module, "datetime", _WallClock)
