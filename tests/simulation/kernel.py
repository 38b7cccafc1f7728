"""Virtual time, processes and threads of a simulation, in one thread of the real process.

A simulated thread is a greenlet. It runs until it waits, or until an event: a place in the code where its
process may die or another thread may run instead. All choices come from one random generator, so that a seed
decides everything.

The code of a process that has died never runs again, not even its `finally` clauses, as after SIGKILL.
"""

import heapq
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

EVENT_S = 20e-6  # each event takes this long
_FOREVER = float("inf")


class HangError(AssertionError):
    """The simulation does not come to an end."""


@dataclass(eq=False)
class Process:
    """A simulated process.

    Attributes:
        node: name of the machine that it runs on.
        environ: its environment variables.
        exit_code: None while it runs; -9 if it was killed.
        at_death: called in order when it ends, however that is.
        children: processes that die with it.
        is_suspended: whether its threads stand still.
        local: what belongs to the process, such as the state of its random generators.
    """

    kernel: "Kernel"
    pid: int
    name: str
    node: str
    environ: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    at_death: list[Callable[[], None]] = field(default_factory=list)
    children: list["Process"] = field(default_factory=list)
    threads: list["Thread"] = field(default_factory=list)
    is_suspended: bool = False
    local: dict[str, Any] = field(default_factory=dict)

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None

    def __repr__(self) -> str:
        return f"{self.name}@{self.node}"


class Thread:
    """A simulated thread of a process."""

    __slots__ = (
        "coroutine",
        "error",
        "is_done",
        "joining",
        "name",
        "process",
        "ticket",
        "was_woken",
    )

    def __init__(self, process: Process, target: Callable[[], Any], name: str) -> None:
        self.process, self.name = process, name
        self.is_done = self.was_woken = False
        self.ticket = 0  # of the wait: a timer of an earlier one finds another ticket
        self.joining = Waiting()
        self.error: BaseException | None = None
        self.coroutine = greenlet(lambda: self._run(target), process.kernel.hub)

    def _run(self, target: Callable[[], Any]) -> None:
        kernel = self.process.kernel
        try:
            target()
        except GreenletExit:
            raise
        except BaseException as error:
            self.error = error
            kernel.note_error(self, error)
        self.is_done = True
        kernel.wake(self.joining)

    def __repr__(self) -> str:
        return f"{self.process}:{self.name}"


class Waiting:
    """Threads that wait for the same thing, in order."""

    __slots__ = ("threads",)

    def __init__(self) -> None:
        self.threads: deque[tuple[Thread, int]] = deque()


class Kernel:
    """Runs simulated threads, one at a time.

    Attributes:
        random: decides everything that is left to chance.
        now: virtual seconds since the beginning.
        num_events: events so far.
        trace: checksum of their names in order.
        errors: exceptions that ended threads, in order.
        triggers: a heap of (number of an event, tie, action): called when that event is reached.
        switching: probability with which another thread runs after an event.
        watchers: called with the name of each event and the thread that passes it.
    """

    def __init__(
        self, seed: int | str, *, switching: float = 0.2, max_events: int = 2_000_000
    ) -> None:
        self.random = random.Random(seed)
        self.now, self.num_events, self.trace = 0.0, 0, 0
        self.switching, self._max_events = switching, max_events
        self.hub = getcurrent()
        self.errors: list[tuple[Thread, BaseException]] = []
        self.triggers: list[tuple[int, int, Callable[[str], None]]] = []
        self.watchers: list[Callable[[str, Thread], None]] = []
        self._next_trigger: float = _FOREVER
        self._ready: list[Thread] = []
        self._timers: list[tuple[float, int, Thread | None, Any]] = []
        self._count = itertools.count()
        self._pids = itertools.count(1000)
        self.processes: list[Process] = []
        self.running: Thread | None = None
        self.is_closed = False
        self._overrun = ""

    # Processes and threads

    def make_process(self, name: str, node: str, environ: dict[str, str] | None = None) -> Process:
        process = Process(self, next(self._pids), name, node, dict(environ or {}))
        self.processes.append(process)
        return process

    def spawn(self, process: Process, target: Callable[[], Any], name: str = "main") -> Thread:
        """Start a thread. This is no event: the caller continues first."""
        thread = Thread(process, target, name)
        process.threads.append(thread)
        if process.is_alive:
            self._ready.append(thread)
        return thread

    def end(self, process: Process, exit_code: int = -9) -> None:
        """End a process at once, with its children. If it is the one that runs, this does not return."""
        self.kill(process, exit_code)
        if self.running is not None and not self.running.process.is_alive:
            self._leave()

    def kill(self, process: Process, exit_code: int = -9) -> None:
        """End a process as `end` does; the one that runs continues up to the end of its event."""
        if not process.is_alive:
            return
        process.exit_code = exit_code
        for child in process.children:
            self.kill(child)
        for act in process.at_death:
            act()

    def suspend(self, process: Process, seconds: float) -> None:
        """Let all threads of a process stand still for a while."""
        process.is_suspended = True

        def resume() -> None:
            process.is_suspended = False

        self.call_later(seconds, resume)

    # What simulated threads call

    def event(self, what: str) -> None:
        """Pass a place where the process may die, or another thread run."""
        thread = self.running
        if thread is None:
            return
        if (
            thread.process.exit_code is not None
        ):  # in a `finally` clause when the simulation is closed
            raise GreenletExit
        self.num_events += 1
        self.trace = zlib.crc32(what.encode(), self.trace)
        self.now += EVENT_S
        if self.num_events >= self._next_trigger or self.watchers:
            self._pull_triggers(what)
            for watch in tuple(self.watchers):
                watch(what, thread)
            if thread.process.exit_code is not None:
                self._leave()
        if thread.process.is_suspended or (self._ready and self.random.random() < self.switching):
            self._ready.append(thread)
            self._leave()
        if self.num_events > self._max_events:
            self._overrun = f"{self.num_events} events, at {self.now:.1f} s: {what} in {thread}"
            self._leave()

    def sleep(self, seconds: float) -> None:
        self.wait(Waiting(), max(0.0, seconds))

    def wait(self, waiting: Waiting, timeout_s: float | None = None) -> bool:
        """Wait until woken; return False if that takes longer than the timeout."""
        thread = self.running
        assert thread is not None, "only simulated threads wait"
        if self.is_closed:
            raise GreenletExit
        thread.ticket += 1
        thread.was_woken = False
        waiting.threads.append((thread, thread.ticket))
        if timeout_s is not None:
            entry = (self.now + timeout_s, next(self._count), thread, thread.ticket)
            heapq.heappush(self._timers, entry)
        self._leave()
        return thread.was_woken

    def wake(self, waiting: Waiting, count: int = -1) -> None:
        """Let threads that wait continue: the first ones, or all."""
        while waiting.threads and count != 0:
            thread, ticket = waiting.threads.popleft()
            if thread.ticket == ticket and thread.process.exit_code is None:
                thread.ticket += 1
                thread.was_woken = True
                self._ready.append(thread)
                count -= 1

    def _leave(self) -> None:
        self.hub.switch()
        if self.is_closed:
            raise GreenletExit

    # What the simulation itself calls

    def call_later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call something after a while. It must not wait."""
        heapq.heappush(self._timers, (self.now + seconds, next(self._count), None, act))

    def call_at_event(self, number: int, act: Callable[[str], None]) -> None:
        heapq.heappush(self.triggers, (number, next(self._count), act))
        self._next_trigger = self.triggers[0][0]

    def _pull_triggers(self, what: str) -> None:
        while self.triggers and self.triggers[0][0] <= self.num_events:
            act = heapq.heappop(self.triggers)[2]
            self._next_trigger = self.triggers[0][0] if self.triggers else _FOREVER
            act(what)

    def note_error(self, thread: Thread, error: BaseException) -> None:
        self.errors.append((thread, error))

    def run(self, until: Callable[[], bool], deadline_s: float = _FOREVER) -> bool:
        """Run until something is so; return False if nothing is left to do, or time is up.

        Raises:
            HangError: after too many events.
        """
        timers = self._timers
        while not until():
            while timers and timers[0][0] <= self.now:
                self._fire()
            thread = self._choose()
            if thread is not None:
                self.running = thread
                thread.coroutine.switch()
                self.running = None
                if self._overrun:
                    raise HangError(self._overrun)
            elif not timers or timers[0][0] > deadline_s:
                return False
            else:
                self.now = max(self.now, timers[0][0])
            if self.now > deadline_s:
                return until()
        return True

    def _fire(self) -> None:
        _, _, thread, what = heapq.heappop(self._timers)
        if thread is None:
            what()
        elif thread.ticket == what and thread.process.is_alive:
            thread.ticket += 1
            self._ready.append(thread)

    def _choose(self) -> Thread | None:
        """Take a thread that can run out of the list, at random."""
        ready = self._ready
        while ready:
            place = int(self.random.random() * len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
            thread = ready.pop()
            if thread.process.exit_code is not None:
                continue
            if thread.process.is_suspended:
                entry = (self.now + 0.01, next(self._count), thread, thread.ticket)
                heapq.heappush(self._timers, entry)
                continue
            return thread
        return None

    def close(self) -> None:
        """End all threads; their `finally` clauses run, and can do nothing any more."""
        self.is_closed = True
        for process in self.processes:
            if process.is_alive:
                process.exit_code = -9
        for process in self.processes:
            for thread in process.threads:
                self.running = thread
                if thread.coroutine and not thread.coroutine.dead:
                    thread.coroutine.throw(GreenletExit)
        self.running = None
