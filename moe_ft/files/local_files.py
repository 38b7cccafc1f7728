"""Files below a directory of this machine: written whole or not at all, and where no link leads out of it.

Others may write there too, and put a link to any directory of this user in the place of one. Files are
written past the page cache where the file system can (O_DIRECT), and read back so. Directories that nobody
else may enter are files/private_files.py.
"""

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

import numpy as np

from moe_ft.calls import looks_again, write_all
from moe_ft.errors import UnsafePathError
from moe_ft.files.private_files import open_regular

_CHUNK_BYTES = 16 << 20
_DIRECT_BYTES = 1 << 20  # smaller writes go through the page cache


@contextmanager
def _directory_of(root: str, full: str) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of a file's directory, and the file's name.

    Raises:
        UnsafePathError: if a directory below the root is a link.
    """
    *names, name = full.removeprefix(root).strip("/").split("/")
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with ExitStack() as opened:
        directory, path = _open(root, flags), Path(root)
        opened.callback(os.close, directory)
        for each in names:
            path /= each
            try:
                directory = _open(each, flags | os.O_NOFOLLOW, directory)
            except OSError as error:
                if path.is_symlink():
                    raise UnsafePathError(f"{path} is a symbolic link") from error
                raise
            opened.callback(os.close, directory)
        yield directory, name


@looks_again()
def _open(path: str, flags: int, directory: int | None = None) -> int:
    return os.open(path, flags, 0o666, dir_fd=directory)


def remove_here(root: str, full: str) -> None:
    """Remove a file, or the link in its place."""
    with _directory_of(root, full) as (directory, name):
        os.unlink(name, dir_fd=directory)


def write_here(root: str, full: str, pieces: Iterable[memoryview]) -> None:
    """Write a file, whose directory is there; it is on the disk when this returns."""
    with _directory_of(root, full) as (directory, name):
        # A name of its own: two nodes that rescue a job write the same files at the same time.
        part = f"{name}.{secrets.token_hex(4)}.part"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = _open(part, flags, directory)
            try:
                write_past_cache(file, pieces)
                os.fsync(file)
            finally:
                os.close(file)
            rename = looks_again()(os.replace)
            rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
        except (Exception, KeyboardInterrupt):
            with suppress(OSError):  # on a full disk every try would leave one
                os.unlink(part, dir_fd=directory)
            raise
    for folder in Path(full).parents:  # its name, and those of what was made for it
        sync_file(str(folder))
        if folder == Path(root):
            return


def sync_file(path: str) -> None:
    """Wait until a file or directory of this machine is on the disk."""
    descriptor = _open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_past_cache(file: int, pieces: Iterable[memoryview]) -> None:
    """Write pieces one after the other to the descriptor of a new local file; the caller syncs it."""
    for block in page_blocks(pieces):
        _write_block(file, block)


def page_blocks(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    """Yield the same bytes in blocks that start at a page of memory and, but for the last, are whole pages.

    Only what is not so already is copied. A block is valid until the next one is asked for.
    """
    room, filled = memoryview(mmap.mmap(-1, _CHUNK_BYTES)), 0
    for content in pieces:
        address = np.frombuffer(content, np.uint8).ctypes.data if content else 0
        start = 0
        while start < len(content):
            rest = len(content) - start
            if not filled and rest >= _DIRECT_BYTES and (address + start) % mmap.PAGESIZE == 0:
                taken = min(rest - rest % mmap.PAGESIZE, _CHUNK_BYTES)
                yield content[start : start + taken]
            else:
                taken = min(rest, _CHUNK_BYTES - filled)
                room[filled : filled + taken] = content[start : start + taken]
                filled = (filled + taken) % _CHUNK_BYTES
                if not filled:
                    yield room
            start += taken
    yield room[:filled]


def _write_block(file: int, block: memoryview) -> None:
    """Write past the page cache where the file system can: it is faster and takes less of the processor."""
    # A call may write a part. If the rest is not whole pages, it cannot pass the cache.
    while len(block) >= _DIRECT_BYTES and len(block) % mmap.PAGESIZE == 0:
        try:
            count = os.write(file, block) if _set_direct(file, True) else 0
        except OSError as error:
            if error.errno != errno.EINVAL:  # such as of an alignment beyond that of pages
                raise
            count = 0
        if not count:
            break
        block = block[count:]
    _set_direct(file, False)
    write_all(file, block)


def read_here(spans: Iterable[tuple[str, int, int]]) -> Generator[memoryview]:
    """Yield ranges of files, given as path, offset and bytes, past the page cache where that can be.

    One that is cut short by the end of its file is yielded as it is. Each is valid until the next one is
    asked for.
    """
    room = memoryview(b"")
    for path, start, num_bytes in spans:
        before = start % mmap.PAGESIZE
        whole = -(-(before + num_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if len(room) < whole:
            room = memoryview(mmap.mmap(-1, whole))
        filled = _read_pages(path, start - before, room[:whole])
        yield room[before : max(before, min(filled, before + num_bytes))]


@looks_again()
def _read_pages(path: str, start: int, room: memoryview) -> int:
    """Read until there is no room, or the file ends; return the bytes."""
    filled = 0
    with open_regular(Path(path)) as opened:
        file: FileIO = opened.raw  # type: ignore[attr-defined]
        is_direct = _set_direct(file.fileno(), True)
        file.seek(start)
        while filled < len(room):
            try:
                count = file.readinto(room[filled:])
            except OSError as error:
                # A call may read a part, and the rest is not whole pages; or these are not enough here.
                if error.errno != errno.EINVAL or not is_direct:
                    raise
                _set_direct(file.fileno(), False)
                is_direct = False
                continue
            if not count:
                break
            filled += count
    return filled


def _set_direct(file: int, is_direct: bool) -> bool:
    """Have what is written or read next pass by the page cache, or not; return whether that worked."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT * is_direct)
    except OSError:  # such as of FUSE
        return False
    return True
