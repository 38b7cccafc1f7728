"""Files that are written past the page cache have the same bytes, whatever the file system can do."""

import mmap
import os
import random
from pathlib import Path

import numpy as np
import pytest

from moe_ft.files.storage import Storage, page_blocks


def _some_bytes(num_bytes: int, address: int = 0) -> memoryview:
    """Return bytes that begin at an address in a page of memory."""
    room = memoryview(mmap.mmap(-1, address + num_bytes + 1))[address:-1]
    room[:] = random.Random(num_bytes).randbytes(num_bytes)
    return room


PAGE, CHUNK = mmap.PAGESIZE, 16 << 20


@pytest.mark.parametrize(
    ("sizes", "addresses", "num_copied"),
    [
        ([3 * CHUNK + 5], [0], 5),  # a region as it is: all but its end
        ([CHUNK, 2 << 20], [0, 0], 0),
        ([PAGE, 2 * CHUNK, 7], [0, 0, 0], CHUNK + PAGE + 7),  # again in place once a block is full
        ([2 << 20], [8], 2 << 20),
        ([0, 3, 0, CHUNK - 3, 2 << 20], [0] * 5, CHUNK),
        ([], [], 0),
    ],
)
def test_blocks_are_whole_pages_from_a_page_on_and_only_what_is_not_so_already_is_copied(
    sizes: list[int], addresses: list[int], num_copied: int
) -> None:
    pieces = [_some_bytes(*each) for each in zip(sizes, addresses, strict=True)]
    starts = [(_address(piece), len(piece)) for piece in pieces if piece]
    lengths, content, copied = [], bytearray(), 0
    for block in page_blocks(pieces):
        assert _address(block) % PAGE == 0
        in_place = [start for start, length in starts if start <= _address(block) < start + length]
        copied += 0 if in_place else len(block)
        lengths.append(len(block))
        content += block
    assert bytes(content) == b"".join(pieces)
    assert all(length % PAGE == 0 for length in lengths[:-1])
    assert copied == num_copied


def _address(block: memoryview) -> int:
    return np.frombuffer(block, np.uint8).ctypes.data if block else 0


def _is_cached(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def test_large_file_is_written_past_the_page_cache(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(PAGE))
    with other.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _is_cached(other):
        pytest.skip("this file system is in memory")
    pieces = [_some_bytes(2 * CHUNK), _some_bytes(PAGE + 1)]
    Storage(str(tmp_path)).write("file", pieces)
    assert not _is_cached(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


def test_file_is_written_where_the_file_system_refuses_to_pass_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.files.storage.page_blocks", iter)
    pieces = [_some_bytes(2 << 20, address=1), _some_bytes(2 << 20, address=1), _some_bytes(3)]
    Storage(str(tmp_path)).write("file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
