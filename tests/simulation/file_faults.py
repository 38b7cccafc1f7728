"""Faults of simulated file systems: operations that fail, are slow or never return, and damage to files.

Operations are those of files.py; every place is a path relative to its root, and stands for all below it.
"""

import errno
import os
import posix
import random
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.kernel import Kernel, Process

FOREVER = float("inf")
_CONTENT = 0.9  # of the bits that flip are in bytes with content, if there are any
_NAMED = 8  # times as likely is a bit of a committed file
# Kinds of faults by operation.
KINDS = {
    "open": "read",
    "list": "read",
    "stat": "read",
    "create": "create",
    "mkdir": "create",
    "link": "create",
    "write": "write",
    "allocate": "write",
    "truncate": "write",
    "touch": "write",
    "rename": "rename",
    "remove": "remove",
    "rmdir": "remove",
    "fsync": "fsync",
    "lock": "lock",
}


@dataclass(eq=False, kw_only=True, slots=True)
class Fault:
    """Something that is wrong with some files.

    Attributes:
        kind: of the operations; empty for all.
        where: path of the files.
        node: on which alone it shows; empty for all.
        until: virtual time.
        skip: how many operations succeed before.
        count: how many operations fail.
        error: errno; 0 if they succeed in the end.
        seconds: each operation takes longer.
        is_stuck: no operation returns before it is over.
    """

    kind: str
    where: str
    node: str = ""
    until: float = FOREVER
    skip: int = 0
    count: float = FOREVER
    error: int = 0
    seconds: float = 0.0
    is_stuck: bool = False


class FileFaults:
    """Faults of files below a root."""

    def __init__(self, kernel: Kernel, root: Path) -> None:
        self._kernel, self.root = kernel, root
        self._faults: list[Fault] = []
        self._stuck: dict[Process, float] = {}

    # What a schedule sets

    def fail(
        self,
        kind: str,
        error: int,
        where: str,
        *,
        at: int = 1,
        count: int = 1,
        for_s: float | None = None,
        node: str = "",
    ) -> Fault:
        """Let operations fail: some from the next but so many on, or all for some time.

        Args:
            kind: read, write, create, rename, remove, fsync or lock; empty for all.
            error: errno.
            at: 1 for the next one.
            for_s: virtual seconds in which all fail, instead of `at` and `count`.
        """
        if for_s is not None:
            return self._set(Fault(kind=kind, where=where, error=error, node=node), for_s)
        fault = Fault(kind=kind, where=where, error=error, node=node, skip=at - 1, count=count)
        return self._set(fault, FOREVER)

    def slow(
        self, where: str, seconds: float, for_s: float, *, kind: str = "", node: str = ""
    ) -> Fault:
        """Let each operation take some seconds longer."""
        return self._set(Fault(kind=kind, where=where, seconds=seconds, node=node), for_s)

    def stuck(self, where: str, for_s: float, *, kind: str = "", node: str = "") -> Fault:
        """Let no operation return for a while. A process killed in one keeps its files open."""
        return self._set(Fault(kind=kind, where=where, is_stuck=True, node=node), for_s)

    def full(self, where: str, for_s: float = FOREVER, *, node: str = "") -> Fault:
        """Let there be no room: writes fail, some after a part."""
        return self._set(Fault(kind="write", where=where, error=errno.ENOSPC, node=node), for_s)

    def _set(self, fault: Fault, for_s: float) -> Fault:
        fault.until = self._kernel.now + for_s
        self._faults.append(fault)
        return fault

    def mend(self, fault: Fault) -> None:
        fault.until = -FOREVER

    def is_full(self, path: str) -> bool:
        return any(
            fault.error == errno.ENOSPC
            and fault.kind == "write"
            and fault.count == FOREVER
            and fault.until > self._kernel.now
            and is_below(path, fault.where)
            for fault in self._faults
        )

    def stuck_until(self, process: Process) -> float:
        """Return until when a process, though killed, does not end because an operation does not return."""
        return self._stuck.get(process, 0.0)

    # What operations suffer

    def suffer(self, operation: str, path: str) -> None:
        """Let the operation that a simulated thread is about to do fail or wait."""
        kernel = self._kernel
        assert kernel.running is not None
        process = kernel.running.process
        kind = KINDS[operation]
        for fault in tuple(self._faults):
            if fault.until <= kernel.now or fault.count <= 0:
                self._faults.remove(fault)
                continue
            if (fault.kind and fault.kind != kind) or not is_below(path, fault.where):
                continue
            if fault.node and fault.node != process.node:
                continue
            if fault.is_stuck:
                self._stuck[process] = max(fault.until, self._stuck.get(process, 0.0))
                while fault.until > kernel.now:
                    kernel.sleep(min(fault.until - kernel.now, 1.0))
            elif fault.seconds:
                kernel.sleep(fault.seconds)
            elif fault.skip:
                fault.skip -= 1
            else:
                fault.count -= 1
                raise OSError(fault.error, os.strerror(fault.error), f"{self.root}/{path}")

    # Damage

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Act on the real files, also where a simulated thread runs."""
        running, self._kernel.running = self._kernel.running, None
        try:
            yield
        finally:
            self._kernel.running = running

    def paths(self, where: str = "") -> list[str]:
        """Return the relative paths of all files at or below a place, sorted."""
        start = f"{self.root}/{where}".rstrip("/")
        prefix = len(str(self.root)) + 1
        with self.outside():
            if os.path.isfile(start):
                return [where]
            return sorted(
                f"{directory}/{name}"[prefix:]
                for directory, _, names in os.walk(start)
                for name in names
                if not directory[prefix:].startswith(".")
            )

    def snapshot(self, where: str = "") -> dict[str, bytes]:
        """Return the content of all files at or below a place."""
        found = {}
        with self.outside():
            for path in self.paths(where):
                found[path] = (self.root / path).read_bytes()
        return found

    def flip(self, chance: random.Random, where: str) -> tuple[str, int] | None:
        """Flip a bit of a file; return which one and where in it. None if there is no file with content."""
        sizes = {path: posix.stat(f"{self.root}/{path}").st_size for path in self.paths(where)}
        if not any(sizes.values()):
            return None
        # A flipped bit matters more in a committed file than in one that is being filled.
        weights = [
            sizes[path] * (_NAMED if f"{path.rpartition('.')[0]}.json" in sizes else 1)
            for path in sizes
        ]
        (path,) = chance.choices(list(sizes), weights)
        descriptor = posix.open(f"{self.root}/{path}", os.O_RDWR)
        try:
            offset = _offset_to_flip(posix.pread(descriptor, sizes[path], 0), chance)
            byte = posix.pread(descriptor, 1, offset)[0] ^ (1 << chance.randrange(8))
            posix.pwrite(descriptor, bytes([byte]), offset)
        finally:
            posix.close(descriptor)
        return path, offset

    def truncate(self, chance: random.Random, where: str) -> tuple[str, int] | None:
        """Cut a file; return which one and its size now. None if there is no file with content."""
        found = [path for path in self.paths(where) if posix.stat(f"{self.root}/{path}").st_size]
        if not found:
            return None
        path = chance.choice(found)
        size = chance.randrange(posix.stat(f"{self.root}/{path}").st_size)
        posix.truncate(f"{self.root}/{path}", size)
        return path, size

    # Memory of nodes: memory/JOB/NODE

    def _memory_of(self, node: str) -> list[Path]:
        return sorted((self.root / "memory").glob(f"*/{node}"))

    def lose_node(self, node: str) -> None:
        """Remove what a node has in memory; its processes must have ended."""
        with self.outside():
            for directory in self._memory_of(node):
                shutil.rmtree(directory)

    def set_aside(self, node: str) -> None:
        with self.outside():
            for directory in self._memory_of(node):
                job = directory.parent.name
                (self.root / ".away" / job).mkdir(parents=True, exist_ok=True)
                shutil.rmtree(self.root / ".away" / job / node, ignore_errors=True)
                directory.rename(self.root / ".away" / job / node)

    def bring_back(self, node: str) -> bool:
        """Bring back a node that was set aside, with its old memory; return whether there was any."""
        with self.outside():
            found = sorted((self.root / ".away").glob(f"*/{node}"))
            for directory in found:
                job = self.root / "memory" / directory.parent.name
                job.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.rmtree(job / node, ignore_errors=True)
                directory.rename(job / node)
            return bool(found)


def is_below(path: str, where: str) -> bool:
    return path.startswith(where) and path[len(where) : len(where) + 1] in ("", "/")


def garbled(content: memoryview, chance: random.Random) -> memoryview:
    changed = bytearray(content)
    changed[_offset_to_flip(bytes(content), chance)] ^= 1 << chance.randrange(8)
    return memoryview(changed)


def _offset_to_flip(content: bytes, chance: random.Random) -> int:
    """Return a byte of a file, usually one with content: most of a small state is padding and header."""
    (header_bytes,) = struct.unpack_from("<Q", content.ljust(8, b"\0"))
    filled = [each for each in range(8 + header_bytes, len(content)) if content[each]]
    if filled and chance.random() < _CONTENT:
        return chance.choice(filled)
    return chance.randrange(len(content))
