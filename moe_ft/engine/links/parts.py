"""Parts of units that a node sends to ranks of another layout, which need only some bytes of a unit.

A checksum covers a whole unit, so its holder verifies it, once for each index, and then sends ranges of it.
The one who asks puts them where they are in the unit; engine/links/messages.py has the request.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from moe_ft.engine.links.messages import GetParts
from moe_ft.errors import CorruptStateError
from moe_ft.files.private_files import open_private, read_private
from moe_ft.format.encoding import check_path, decode
from moe_ft.format.index import Index, check_unit

_LEAST_BYTES = 64 << 10  # of a range on average, to be sent without a copy
_Stamp = tuple[int, int]  # inode and time of an index: another one after it was written again


def zeros(num_bytes: int) -> memoryview:
    """Return new bytes; numpy has them in huge pages: in small ones they take longer than a copy to them."""
    return memoryview(np.zeros(num_bytes, np.uint8))


class Parts:
    """Ranges of a unit on their way: as they lie in it or, if they are small, one after another.

    Both sides decide that by the ranges alone.

    Attributes:
        carried: buffers that are sent or filled, in this order.
    """

    def __init__(self, unit: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        self._places = [unit[start:end] for start, end in ranges]
        self.num_bytes = sum(map(len, self._places))
        is_coarse = self.num_bytes >= len(ranges) * _LEAST_BYTES
        self.carried = self._places if is_coarse else [zeros(self.num_bytes)]

    @property
    def checksum(self) -> str:
        """The checksum of all of them, one after another."""
        found = xxhash.xxh3_64()
        for each in self.carried:
            found.update(each)
        return found.hexdigest()

    def gather(self) -> None:
        """Copy small ranges out of the unit."""
        for place, part in self._copied():
            part[:] = place

    def spread(self) -> None:
        """Copy small ranges to where they belong in the unit."""
        for place, part in self._copied():
            place[:] = part

    def _copied(self) -> Iterator[tuple[memoryview, memoryview]]:
        at = 0
        for place in self._places if self.carried is not self._places else ():
            yield place, self.carried[0][at : at + len(place)]
            at += len(place)


class VerifiedUnits:
    """Units in this node's memory that match their checksums. Used by the threads of all connections."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._lock = threading.Lock()
        self._indexes: dict[Path, tuple[_Stamp, Index]] = {}
        self._verified: set[tuple[Path, _Stamp, str, int]] = set()

    def parts(self, request: GetParts) -> tuple[Parts, str]:
        """Return the ranges that a request names, and their checksum.

        An index is removed before anything that it names is overwritten. So what was read for the checksum
        while it stayed as it was is what it names, and what is overwritten later does not match.

        Raises:
            CorruptStateError: if the unit is not the one that was asked for, or not intact.
            OSError: if it cannot be read.
        """
        check_path(request.path, "a request")
        path = self._node_dir / request.path
        stamp, index = self._index(path)
        unit = None
        if -1 <= request.position < len(index.compute):
            position = None if request.position < 0 else request.position
            found = index.versions_of(request.unit, position)
            unit = next((each for each in found if each.checksum == request.checksum), None)
        if unit is None:
            raise CorruptStateError(f"unit {request.unit} is another version there")
        with open_private(path.parent / (unit.file or index.file)) as file:
            if os.fstat(file.fileno()).st_size < unit.offset + unit.num_bytes:
                raise CorruptStateError(f"unit {request.unit} is cut short")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            content = memoryview(mapping)[unit.offset : unit.offset + unit.num_bytes]
        key = path, stamp, request.checksum, request.position
        with self._lock:
            is_verified = key in self._verified
        if not is_verified:
            check_unit(request.unit, unit, (content,), "")
        if any(not 0 <= start < end <= unit.num_bytes for start, end in request.ranges):
            raise CorruptStateError(f"a range beyond unit {request.unit}")
        parts = Parts(content, request.ranges)
        parts.gather()
        sent = parts.checksum
        if _stamp_of(path) != stamp:
            raise CorruptStateError(f"{request.path} was replaced while it was read")
        with self._lock:
            self._verified.add(key)
        return parts, sent

    def _index(self, path: Path) -> tuple[_Stamp, Index]:
        stamp = _stamp_of(path)
        with self._lock:
            known = self._indexes.get(path)
        if known is None or known[0] != stamp:
            known = stamp, decode(read_private(path), Index, str(path))
            with self._lock:
                self._indexes[path] = known
        return known


def _stamp_of(path: Path) -> _Stamp:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns
