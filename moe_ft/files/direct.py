"""Writes to local files past the page cache (O_DIRECT), where the file system can."""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_CHUNK_BYTES = 16 << 20
_DIRECT_BYTES = 1 << 20  # smaller writes go through the page cache


def write_past_cache(file: Any, pieces: Iterable[memoryview]) -> None:
    """Write pieces one after the other at the end of an open local file; the caller syncs it."""
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


def _write_block(file: Any, block: memoryview) -> None:
    """Write past the page cache where the file system can: it is faster and takes less of the processor."""
    is_direct = len(block) >= _DIRECT_BYTES and len(block) % mmap.PAGESIZE == 0
    start = file.tell()
    if is_direct and _set_direct(file, True):
        try:
            file.write(block)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:  # such as of an alignment beyond that of pages
                raise
            file.seek(start)
    _set_direct(file, False)
    file.write(block)


def _set_direct(file: Any, is_direct: bool) -> bool:
    """Have what is written next to a file pass by the page cache, or not; return whether that worked."""
    flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT * is_direct)
    except OSError:  # such as of FUSE
        return False
    return True
