"""The rest of the operating system as simulated processes see it: environment, other processes, randomness.

The writer process of a node is another simulated process in which the product's `main` runs; only how it gets
its settings and its priority is replaced.
"""

import itertools
import logging
import os
import resource
import secrets
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil

from moe_ft.engine.persist import writer
from moe_ft.engine.persist.requests import WriterSettings
from moe_ft.engine.persist.writer import PersistWorker
from tests.simulation.active import Patches, World, world
from tests.simulation.kernel import Kernel, Process, Thread, Waiting

# Local state of a process.
PARENT = "parent"  # process id of whoever started it
STDERR = "stderr"  # lines that it has printed, each with the virtual time
_STDIN = "stdin"
_STARTER = "starter"
_HANDLERS = "signal handlers"
_START_S = (0.3, 2.0)  # until a new process runs
_IDLE_S = 1.0
_MANY_DESCRIPTORS = 1 << 20


class _Environment(MutableMapping[str, str]):
    """An environment, which is another one in each simulated process."""

    def __init__(self, real: MutableMapping[str, str]) -> None:
        self._real = real

    def _own(self) -> MutableMapping[str, str]:
        current = world()
        return self._real if current is None else current.process.environ

    def __getitem__(self, name: str) -> str:
        return self._own()[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._own()[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())

    def copy(self) -> dict[str, str]:
        return dict(self._own())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Output:
    """A stream that keeps what simulated processes print, line by line."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def write(self, text: str) -> int:
        current = world()
        if current is None:
            return self._real.write(text)  # type: ignore[no-any-return]
        lines = current.process.local.setdefault(STDERR, [(0.0, "")])
        *whole, rest = (lines.pop()[1] + text).split("\n")
        lines += [(current.kernel.now, line) for line in (*whole, rest)]
        return len(text)

    def flush(self) -> None:
        """Do nothing for simulated processes."""
        if world() is None:
            self._real.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def lines_of(process: Process) -> list[str]:
    return [line for _, line in process.local.get(STDERR, ()) if line]


class _Pipe:
    """The standard input of a process, as its parent has it."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self._kernel, self._process = kernel, process
        self.content = bytearray()
        self.is_closed = False
        self.waiting = Waiting()

    def write(self, content: bytes) -> int:
        self._kernel.event("processes: write to a pipe")
        if not self._process.is_alive:
            raise BrokenPipeError(32, "Broken pipe")
        self.content += content
        self._kernel.wake(self.waiting)
        return len(content)

    def close(self) -> None:
        self.is_closed = True
        self._kernel.wake(self.waiting)

    def read_line(self) -> bytes:
        """Return the first line, less if the input ends before."""
        while b"\n" not in self.content and not self.is_closed:
            self._kernel.wait(self.waiting)
        return bytes(self.content).partition(b"\n")[0]

    def wait_for_end(self) -> None:
        while not self.is_closed:
            self._kernel.wait(self.waiting)


class WriterProcess:
    """The writer process of a node, as a `subprocess.Popen`."""

    def __init__(self, world: World, command: list[str], **streams: Any) -> None:
        kernel, parent = world.kernel, world.process
        assert command[0] == sys.executable and "writer import main" in command[3], command
        kernel.event("processes: start the writer")
        self._files, self._kernel, self._command = world.files, kernel, command
        self.process = kernel.make_process(f"{parent.name}-writer", parent.node, parent.environ)
        parent.children.append(self.process)
        self._ended = Waiting()
        self.process.at_death.append(lambda: kernel.wake(self._ended))
        self.pid = self.process.pid
        self.stdin = _Pipe(kernel, self.process)
        self.process.local |= {PARENT: parent.pid, _STDIN: self.stdin, _STARTER: kernel.running}
        kernel.spawn(self.process, self._run)

    def _run(self) -> None:
        kernel, process = self._kernel, self.process
        kernel.sleep(kernel.random.uniform(*_START_S))
        exit_code = 0
        try:
            writer.main(self._command[-1])
        except Exception:
            process.local.setdefault(STDERR, []).append((kernel.now, traceback.format_exc()))
            exit_code = 1
        kernel.end(process, exit_code)

    def poll(self) -> int | None:
        """Return the exit code; None while it runs, or cannot end because storage does not answer."""
        if self._files.stuck_until(self.process) > self._kernel.now:
            return None
        return self.process.exit_code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once it has ended."""
        kernel = self._kernel
        until = float("inf") if timeout is None else kernel.now + timeout
        while (code := self.poll()) is None:
            if kernel.now >= until:
                raise subprocess.TimeoutExpired(self._command, timeout or 0.0)
            rest_s = until - kernel.now
            if self.process.is_alive:
                kernel.wait(self._ended, None if timeout is None else rest_s)
            else:
                kernel.sleep(min(rest_s, self._files.stuck_until(self.process) - kernel.now))
        return code

    def kill(self) -> None:
        self._kernel.event("processes: kill the writer")
        self._kernel.end(self.process, -9)


def _read_settings(world: World) -> WriterSettings:
    """Return what the parent says; end with the thread that started this process, or its input."""
    kernel, process = world.kernel, world.process
    pipe: _Pipe = process.local[_STDIN]
    starter: Thread = process.local[_STARTER]

    def end_with_starter() -> None:
        if not starter.is_done:
            kernel.wait(starter.joining)
        kernel.end(process, -9)

    def end_with_input() -> None:
        pipe.wait_for_end()
        kernel.end(process, 0)

    kernel.spawn(process, end_with_starter, "death of the parent")
    line = pipe.read_line()
    settings = msgspec.json.decode(line, type=WriterSettings) if line else None
    if settings is None or process.local[PARENT] != settings.parent:
        os._exit(0)
    kernel.spawn(process, end_with_input, "end of the input")
    return settings


class _Idling:
    """The event by which a writer ends, which never comes: it waits for changes of a directory instead.

    As long as nothing changes there, all that looking every few milliseconds does is to take time.
    """

    def __init__(self, world: World, directory: Any) -> None:
        self._kernel = world.kernel
        self._changes = world.files.watch(directory)
        self._seen = -1

    def wait(self, timeout: float) -> bool:
        """Wait until it is worth to look, at least as long as the timeout."""
        changes = self._changes
        if self._seen == changes.count:
            self._kernel.wait(changes, _IDLE_S)
        self._kernel.sleep(timeout * self._kernel.random.random())
        self._seen = changes.count
        return False


def _run_worker(world: World, worker: PersistWorker, should_end: Any) -> None:
    _real_run(worker, _Idling(world, worker._directory))  # type: ignore[arg-type]


_real_run = PersistWorker.run


def _kill(world: World, pid: int, number: int) -> None:
    found = next((each for each in world.kernel.processes if each.pid == pid), None)
    if found is None or not found.is_alive:
        raise ProcessLookupError(3, "No such process")
    is_ignored = found.local.get(_HANDLERS, {}).get(number) == signal.SIG_IGN
    if number == signal.SIGKILL or (number and not is_ignored):
        world.kernel.end(found, -number)


def _handle_signal(world: World, number: int, handler: Any) -> Any:
    handlers = world.process.local.setdefault(_HANDLERS, {})
    before = handlers.get(number, signal.SIG_DFL)
    handlers[number] = handler
    return before


def _exit(world: World, status: int) -> None:
    world.kernel.end(world.process, status)


class _InOrder(list[Any]):
    """Threads of a pool, which waits for them in this order; that of a set differs from run to run."""

    def add(self, thread: Any) -> None:
        self.append(thread)


def _install_pools(patches: Patches) -> None:
    """Give the threads of pools the same names and order in each run, and let them end in silence with it."""
    patches.set(ThreadPoolExecutor, "_counter", itertools.count().__next__)
    begin = ThreadPoolExecutor.__init__

    def begin_in_order(self: Any, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self._threads = _InOrder()

    patches.set(ThreadPoolExecutor, "__init__", begin_in_order)
    patches.divert(
        logging.getLogger("concurrent.futures"), "critical", lambda world, *_, **__: None
    )


def install(patches: Patches) -> None:
    """Show simulated processes an operating system of their own."""
    _install_pools(patches)
    patches.set(os, "environ", _Environment(os.environ))
    patches.set(sys, "stderr", _Output(sys.stderr))
    patches.divert(os, "getpid", lambda world: world.process.pid)
    patches.divert(os, "getppid", lambda world: world.process.local.get(PARENT, 1))
    patches.divert(os, "_exit", _exit)
    patches.divert(os, "kill", _kill)
    patches.divert(os, "urandom", lambda world, size: world.kernel.random.randbytes(size))
    patches.divert(
        secrets, "token_bytes", lambda world, size=None: world.kernel.random.randbytes(size or 32)
    )
    patches.divert(secrets, "randbelow", lambda world, end: world.kernel.random.randrange(end))
    patches.divert(signal, "signal", _handle_signal)
    patches.divert(resource, "getrlimit", lambda world, what: (_MANY_DESCRIPTORS,) * 2)
    patches.divert(resource, "setrlimit", lambda world, what, limits: None)
    tmpfs = [SimpleNamespace(mountpoint="/", fstype="tmpfs", opts="rw")]
    patches.divert(psutil, "disk_partitions", lambda world, all=False: tmpfs)
    patches.divert(subprocess, "Popen", WriterProcess)
    patches.divert(writer, "_read_settings", _read_settings)
    patches.divert(writer, "_lower_priority", lambda world: None)
    patches.divert(PersistWorker, "run", _run_worker)
