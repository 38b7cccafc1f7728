"""Mapped memory of a rank: files on tmpfs that its process has mapped, touched and, for a GPU, pinned.

A process that starts again, after a repair, takes up what it has: mapping, touching and pinning 30 GiB takes
it many seconds. A new process, such as the replacement of a rank, maps the files that it finds, whose pages
are there, and touches them while it goes on. What is in the files is engine/memory/regions.py.
"""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from moe_ft.engine.memory.job_directory import huge_pages
from moe_ft.errors import PinError
from moe_ft.files.private_files import create_private
from moe_ft.files.progress import SLOWEST_BYTES_PER_S, waiting
from moe_ft.processes import num_cores_of_rank

_MADV_POPULATE_WRITE = 23  # Python has no name for it before 3.14
_HUGE_PAGE_BYTES = 2 << 20
_SLICE_BYTES = 32 << 20  # that a thread touches at once: meanwhile its process maps nothing else
_BLOCK_BYTES = 512  # of st_blocks
_MOST_THREADS = 8
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(kw_only=True, slots=True, eq=False)
class _Mapped:
    """A mapped file.

    Attributes:
        file: device, inode and bytes of the file when it was mapped.
        is_touched: whether its pages are mapped, or about to be.
        unpin: undoes what `Mappings.pin` has done; None if it is not pinned.
    """

    memory: mmap.mmap
    file: tuple[int, int, int]
    is_touched: bool
    unpin: Callable[[], None] | None = None


class Mappings:
    """Mapped files of one rank, by path. Owned by its training thread."""

    def __init__(self, *, lasts: bool = False) -> None:
        """Map nothing yet. If it `lasts`, what is let go stays mapped and pinned for the next start."""
        self._lasts = lasts
        self._mapped: dict[Path, _Mapped] = {}
        self._pin_problem = ""

    def open(self, path: Path, num_bytes: int) -> mmap.mmap:
        """Return the mapping of a file, with room for all of it; one of this size keeps its bytes.

        All of it is touched, unless it is a large one that was found whole: `touch_later`.

        Raises:
            UnsafePathError, OSError: as `MappedFile.open`.
        """
        if not self._is_current(path, num_bytes):
            self._release(path)
            descriptor = create_private(path)
            try:
                is_whole = num_bytes > _SLICE_BYTES and _has_pages(descriptor, num_bytes)
                with waiting(num_bytes / SLOWEST_BYTES_PER_S):
                    memory = (
                        _map_whole(descriptor) if is_whole else _map(descriptor, path, num_bytes)
                    )
                file = _file_of(os.fstat(descriptor))
                self._mapped[path] = _Mapped(memory=memory, file=file, is_touched=not is_whole)
            finally:
                os.close(descriptor)
        return self._mapped[path].memory

    def _is_current(self, path: Path, num_bytes: int | None) -> bool:
        """Return whether a path still is the file that was mapped: writes to another one would be lost."""
        found = self._mapped.get(path)
        try:
            status = _file_of(os.lstat(path))
        except OSError:
            return False
        return found is not None and found.file == status and num_bytes == status[2]

    def pin(
        self,
        paths: Iterable[Path],
        register: Callable[[int, int], str],
        unregister: Callable[[int], None],
    ) -> None:
        """Let the GPU copy into open files directly. After a failure none is pinned, and none will be.

        Each file is registered as a whole: CUDA refuses a copy across the border of two registrations.

        Args:
            register: takes an address and bytes; returns why that failed, or nothing.
            unregister: takes an address.

        Raises:
            PinError: if CUDA refuses one, or has before.
        """
        for path in paths:
            mapped = self._mapped[path]
            if not self._pin_problem and mapped.unpin is None:
                address = _address(mapped.memory)
                if problem := register(address, mapped.file[2]):
                    self._pin_problem = f"{path}: {problem}"
                else:
                    mapped.unpin = partial(unregister, address)
        if self._pin_problem:
            for mapped in self._mapped.values():
                _unpin(mapped)
            raise PinError(self._pin_problem)

    def touch_later(self) -> None:
        """Touch what was found whole and is not pinned, in the background: no repair waits for that."""
        waiting_for = [
            each for each in self._mapped.values() if not each.is_touched and each.unpin is None
        ]
        views = [memoryview(each.memory) for each in waiting_for]  # keep it mapped meanwhile
        for each in waiting_for:
            each.is_touched = True

        def touch() -> None:
            while views:
                view = views.pop()
                with suppress(OSError):  # Linux before 5.14: the first copies touch it
                    for start in range(0, len(view), _SLICE_BYTES):
                        _populate_slice(_address(view), len(view), start)

        if views:
            threading.Thread(target=touch, name="moe_ft-touch", daemon=True).start()

    def keep_only(self, sizes: Mapping[Path, int]) -> None:
        """Unmap all files but these, and those that were removed or replaced: their memory is free then."""
        for path in [*self._mapped]:
            if not self._is_current(path, sizes.get(path)):
                self._release(path)

    def let_go(self, path: Path) -> None:
        """Note that a start needs a file no longer. A buffer that still shows the memory keeps it mapped."""
        if not self._lasts:
            self._release(path)

    def close(self) -> None:
        """Unpin and unmap everything; the files stay."""
        self.keep_only({})

    def _release(self, path: Path) -> None:
        mapped = self._mapped.pop(path, None)
        if mapped is not None:
            _unpin(mapped)
            with suppress(BufferError):
                mapped.memory.close()


def _address(memory: mmap.mmap | memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _file_of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_size


def _has_pages(descriptor: int, num_bytes: int) -> bool:
    """Return whether a file has this size and no holes, as one that was being made may have."""
    status = os.fstat(descriptor)
    return status.st_size == num_bytes <= status.st_blocks * _BLOCK_BYTES


def _map_whole(descriptor: int) -> mmap.mmap:
    memory = mmap.mmap(descriptor, 0)
    memory.madvise(mmap.MADV_DONTFORK)  # what loads data would keep memory that was let go
    return memory


def _map(descriptor: int, path: Path, num_bytes: int) -> mmap.mmap:
    """Map a file that gets this size, and touch all of it."""
    memory = None
    is_new = os.fstat(descriptor).st_size != num_bytes
    if is_new and num_bytes >= _HUGE_PAGE_BYTES and huge_pages(path)[0] != "never":
        # Before posix_fallocate, which takes small pages where a mapping must ask for huge ones.
        os.ftruncate(descriptor, num_bytes)
        memory = mmap.mmap(descriptor, num_bytes)
        with suppress(OSError):  # of which the next call finds the reason, if it is lack of room
            memory.madvise(mmap.MADV_HUGEPAGE)
            _populate(memory)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # ENOSPC now, not SIGBUS later
    except OSError:
        if memory is not None:
            os.ftruncate(descriptor, 0)  # else it would look like one with room
        raise
    if memory is None:
        memory = mmap.mmap(descriptor, num_bytes)
    memory.madvise(mmap.MADV_DONTFORK)  # as in `_map_whole`
    try:
        _populate(memory)
    except OSError as error:  # Linux before 5.14
        if error.errno == errno.EFAULT:  # a page that cannot be had: touching it ends the process
            raise
        pages = np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE]
        pages |= 0
    return memory


def _populate(memory: mmap.mmap) -> None:
    """Have every page mapped now: a first touch costs six times a copy."""
    starts = range(0, len(memory), _SLICE_BYTES)
    populate = partial(_populate_slice, _address(memory), len(memory))
    if len(starts) == 1:
        populate(0)
        return
    with ThreadPoolExecutor(min(_MOST_THREADS, num_cores_of_rank()), "moe_ft-touch") as pool:
        list(pool.map(populate, starts))


def _populate_slice(address: int, num_bytes: int, start: int) -> None:
    # Not by mmap.madvise: that holds the interpreter for seconds, and with it the signs of life of the rank.
    length = min(_SLICE_BYTES, num_bytes - start)
    if _LIBC.madvise(address + start, length, _MADV_POPULATE_WRITE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _unpin(mapped: _Mapped) -> None:
    if mapped.unpin is not None:
        mapped.unpin()
        mapped.unpin = None
