"""Check of the persist directory by all nodes: each writes a file, and reads that of the next node.

It shows at once that they have the same storage, and how fast it is out of no cache.
"""

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from moe_ft.doctor.rows import Row, failed, passed, rate_text, warned
from moe_ft.doctor.storage import is_path_of_a_probe
from moe_ft.files.patience import SLOWEST_BYTES_PER_S
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum

_WRITE, _READ = "storage write", "storage read"
_PIECE_BYTES = 8 << 20
_SHARE = "All nodes need the same storage at this path or URL: a mounted file system, or an object store."


class Written(msgspec.Struct, frozen=True):
    """File that a node has written.

    Attributes:
        path: in the persist directory.
        checksum: of its content.
    """

    path: str
    num_bytes: int
    seconds: float
    checksum: str


def write_file(storage: Storage, path: str, num_bytes: int, most_s: float = 1.0) -> Written:
    """Write a file as a checkpoint is written; raises OSError if that fails.

    Args:
        num_bytes: to write.
        most_s: after which no more are written; bringing them to the disk may take longer.
    """
    content = secrets.token_bytes(min(_PIECE_BYTES, num_bytes))
    pieces: list[memoryview] = []
    start_s = time.perf_counter()

    def produce() -> Iterator[memoryview]:
        left = num_bytes
        while left > 0 and (not pieces or time.perf_counter() - start_s < most_s):
            pieces.append(memoryview(content)[:left])
            left -= len(pieces[-1])
            yield pieces[-1]

    storage.write(path, produce())
    took_s = time.perf_counter() - start_s
    _forget(storage, path)
    return Written(path, sum(map(len, pieces)), took_s, checksum(b"".join(pieces)))


def _forget(storage: Storage, path: str) -> None:
    """Drop a file from this machine's cache, where there is one."""
    place = storage.local_path(path)
    if place is None:
        return
    with suppress(OSError):
        descriptor = os.open(place, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def check_write(node: str, written: Written, checkpoint_bytes: int | None) -> list[Row]:
    """Return a row on the speed of a write.

    Args:
        checkpoint_bytes: that the node writes of a checkpoint; None if nothing is planned.
    """
    return [_speed(_WRITE, node, written.num_bytes, written.seconds, checkpoint_bytes)]


def check_read(
    node: str,
    storage: Storage,
    written: Mapping[str, Written],
    checkpoint_bytes: int | None,
) -> list[Row]:
    """Return a row on reading the file of the next node.

    Args:
        storage: the persist directory.
        written: by node, in the same order on all nodes.
    """
    nodes = list(written)
    other = nodes[(nodes.index(node) + 1) % len(nodes)] if node in nodes else nodes[0]
    if not is_path_of_a_probe(written[other].path):
        found = f"{other} names '{written[other].path}', which is no file of doctor"
        return [failed(_READ, node, found, "Look at that node, and who else writes to the store.")]
    start_s = time.perf_counter()
    try:
        content = storage.read(written[other].path)
    except FileNotFoundError:
        return [failed(_READ, node, f"the file of {other} is not there", _SHARE)]
    took_s = time.perf_counter() - start_s
    if checksum(content) != written[other].checksum:
        found = f"the file of {other} has another content than was written"
        return [failed(_READ, node, found, "Do not use this storage: it damages files.")]
    row = _speed(_READ, node, len(content), took_s, checkpoint_bytes)
    if other == node:
        return [row]
    return [msgspec.structs.replace(row, found=f"{row.found}, from {other}")]


def _speed(
    check: str, node: str, num_bytes: int, seconds: float, checkpoint_bytes: int | None
) -> Row:
    rate = num_bytes / max(seconds, 1e-9)
    found = rate_text(num_bytes, seconds)
    if checkpoint_bytes is not None:
        found += f"; the node's part of a checkpoint takes {checkpoint_bytes / rate:.1f} s"
    if rate < SLOWEST_BYTES_PER_S:
        remedy = (
            f"Below {SLOWEST_BYTES_PER_S / 1e6:.0f} MB/s a write is given up. Name faster storage."
        )
        return warned(check, node, found, remedy)
    return passed(check, node, found)
