"""Files as simulated processes see them: real ones below a root on tmpfs.

    memory/JOB/NODE    memory of nodes: outlives processes
    storage            a shared file system: outlives nodes, but only synced data outlives a power loss

Each operation that others can see is an event before its effect, and may fail. Descriptors belong to a
process and are closed when it ends; their numbers are real ones. Files elsewhere are as usual. What may be
wrong with files is file_faults.py, what outlives a power loss durability.py. The functions that stand in
the places of the system's are file_calls.py and file_objects.py.
"""

import builtins
import errno
import fcntl
import io
import os
import posix
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from greenlet import GreenletExit

from moe_ft.files.storage import Storage
from tests.simulation import file_calls, file_objects
from tests.simulation.active import Patches
from tests.simulation.durability import STORAGE, Durability
from tests.simulation.file_faults import FileFaults, garbled, is_below
from tests.simulation.kernel import Kernel, Process, Waiting

_CHANGES_CONTENT = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_TEARING = 0.2


class Changes(Waiting):
    """Threads that wait until a directory changes.

    Attributes:
        count: of its changes since somebody began to watch it.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0


class OpenFile:
    """An open descriptor of a simulated process.

    Attributes:
        path: relative to the root; None for files elsewhere.
        inode: of a file on storage that is open for writing, or a directory there; else 0.
        raw: the object that owns the descriptor, if there is one.
    """

    __slots__ = ("inode", "number", "path", "process", "raw")

    def __init__(self, number: int, path: str | None, process: Process, inode: int) -> None:
        self.number, self.path, self.process, self.inode = number, path, process, inode
        self.raw: io.FileIO | None = None


class Files(FileFaults):
    """Files of all simulated processes.

    Attributes:
        tearing: probability with which a write is done in two parts.
        is_garbling: whether a bit flips in the next data that are written to storage.
        deadly: place where the next write ends its process after a part; empty for none.
    """

    def __init__(self, kernel: Kernel, root: Path | str) -> None:
        """Begin with empty directories below the root, which must be on tmpfs."""
        super().__init__(kernel, Path(root))
        self.tearing, self.deadly, self.is_garbling = _TEARING, "", False
        self._prefix = f"{root}/"
        self._open: dict[int, OpenFile] = {}
        self._of_process: dict[Process, dict[int, OpenFile]] = {}
        self._readers: dict[Process, WeakSet[Any]] = {}
        self._watched: dict[str, Changes] = {}
        with self.outside():
            for name in ("memory", STORAGE, ".aside"):
                (self.root / name).mkdir(parents=True, mode=0o700)
        self.durability = Durability(self.root, self.root / ".aside")

    @property
    def memory(self) -> Path:
        return self.root / "memory"

    @property
    def storage(self) -> Path:
        """Directory of the shared file system."""
        return self.root / STORAGE

    def power_loss(self) -> list[str]:
        """Undo what need not have survived on storage; return what that was. Its users must be dead."""
        with self.outside():
            return self.durability.lose_power(self._kernel.random)

    def close(self) -> None:
        """Remove everything. The kernel must be closed before."""
        with self.outside():
            for process in tuple(self._of_process):
                self._close_all(process)
            shutil.rmtree(self.root)

    # Places

    def relative(self, path: Any, directory: int | None = None) -> str | None:
        """Return a path relative to the root; None for one elsewhere."""
        if type(path) is not str:
            path = os.fspath(path)
            if type(path) is not str:
                return None
        if path.startswith(self._prefix):
            return path[len(self._prefix) :]
        if directory is None or path.startswith("/"):
            return None
        found = self._open.get(directory)
        return None if found is None or found.path is None else f"{found.path}/{path}"

    def reach(self, operation: str, path: str) -> None:
        self._kernel.event(f"files: {operation} {path}")
        if self._faults:
            self.suffer(operation, path)

    def changed(self, path: str) -> None:
        """Wake those who watch a directory in which something was created or removed."""
        if self._watched:
            changes = self._watched.get(path.rpartition("/")[0])
            if changes is not None:
                changes.count += 1
                self._kernel.wake(changes)

    def watch(self, directory: Path | str) -> Changes:
        """Return where to wait until something is created in a directory, or removed."""
        path = self.relative(directory)
        assert path is not None
        return self._watched.setdefault(path, Changes())

    # Descriptors

    def own(self, number: int, path: str | None, inode: int = 0) -> OpenFile:
        process, held = self._held_by_running()
        found = OpenFile(number, path, process, inode)
        held[number] = self._open[number] = found
        return found

    def own_object(self, opened: Any) -> None:
        """Note that the process that runs has a file object that only reads."""
        process, _ = self._held_by_running()
        self._readers[process].add(opened)

    def _held_by_running(self) -> tuple[Process, dict[int, OpenFile]]:
        assert self._kernel.running is not None
        process = self._kernel.running.process
        held = self._of_process.get(process)
        if held is None:
            held = self._of_process[process] = {}
            self._readers[process] = WeakSet()
            process.at_death.append(partial(self._process_died, process))
        return process, held

    def held(self, number: int) -> OpenFile | None:
        """Return a descriptor of the process that runs; None if it is none of those seen here.

        Raises:
            OSError: if it was closed and the number is another process's by now.
        """
        found = self._open.get(number)
        assert self._kernel.running is not None
        process = self._kernel.running.process
        if not process.is_alive:
            raise GreenletExit
        if found is not None and found.process is not process:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return found

    def forget(self, number: int) -> None:
        found = self._open.pop(number, None)
        if found is not None:
            del self._of_process[found.process][number]

    def _process_died(self, process: Process) -> None:
        until = self.stuck_until(process)
        if until > self._kernel.now:
            self._kernel.call_later(until - self._kernel.now, partial(self._close_all, process))
        else:
            self._close_all(process)

    def _close_all(self, process: Process) -> None:
        for reader in self._readers.pop(process, ()):
            reader.close()
        for number, found in self._of_process.pop(process, {}).items():
            del self._open[number]
            if found.raw is not None:
                io.FileIO.close(found.raw)
            else:
                posix.close(number)

    def open(self, path: str, full: str, flags: int, mode: int = 0o777) -> int:
        """Open a file or directory below the root; return the descriptor."""
        self.reach("create" if flags & os.O_CREAT else "open", path)
        is_stored = path.startswith(STORAGE)
        if not flags & _CHANGES_CONTENT:
            number = posix.open(full, flags | os.O_CLOEXEC)
            inode = posix.fstat(number).st_ino if is_stored else 0
        elif is_stored:
            before = self.durability.before_open(path, flags)
            number = posix.open(full, flags | os.O_CLOEXEC, mode)
            inode = self.durability.opened(path, number, flags, before)
        else:
            number, inode = posix.open(full, flags | os.O_CLOEXEC, mode), 0
        self.own(number, path, inode)
        if flags & os.O_CREAT:
            self.changed(path)
        return number

    def write(self, found: OpenFile, data: Any, offset: int | None = None) -> int:
        """Write, maybe in two parts or a part only; return how many bytes were written."""
        path = found.path
        assert path is not None
        view = memoryview(data).cast("B")
        total, chance = len(view), self._kernel.random
        cut = 0
        is_deadly = self.deadly and is_below(path, self.deadly)
        if self.is_garbling and is_below(path, STORAGE) and path.endswith(".safetensors"):
            self.is_garbling, view = False, garbled(view, chance)
        if total > 1 and (is_deadly or chance.random() < self.tearing):
            cut = 1 + int(chance.random() * (total - 1))
        try:
            self.reach("write", path)
        except OSError as error:
            if error.errno != errno.ENOSPC or not cut:
                raise
            return self._put(found, view[:cut], offset)
        if cut:
            self._put(found, view[:cut], offset)
            if is_deadly:
                self.deadly = ""
                self._kernel.kill(found.process)
            self._kernel.event(f"files: write the rest of {path}")
            if offset is None:
                return cut  # whoever calls has to go on
            self._put(found, view[cut:], offset + cut)
            return total
        return self._put(found, view, offset)

    def _put(self, found: OpenFile, view: memoryview, offset: int | None) -> int:
        if found.inode:
            self.durability.before_write(found.inode, found.number)
        if offset is None:
            return posix.write(found.number, view)
        return posix.pwrite(found.number, view, offset)


def install(patches: Patches) -> None:
    """Put simulated files in the places of real ones."""
    for name, act in file_calls.CALLS.items():
        patches.divert(os, name, act)
    for owner in (io, builtins):
        patches.divert(owner, "open", file_objects.open_file)
    # Simulated threads that hang hold nothing up: no other process is needed.
    patches.set(Storage, "_works_apart", False)
    patches.divert(fcntl, "flock", file_calls.flock)
    patches.divert(shutil, "disk_usage", file_calls.disk_usage)
