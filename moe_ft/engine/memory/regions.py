"""Regions: reusable stretches of host memory that outlive the process, as files on tmpfs.

A region is a data file of fixed size, mapped once, and an index next to it. Without an index it holds
nothing. engine/snapshots/writer.py fills it, format/ defines the index. Where the files lie is
engine/memory/job_directory.py. Slots of the boundary log (engine/boundary/log.py) are such files too.

In addition to regions a rank has a pool: slots for versions of units that only some snapshots hold. It keeps
the newest version of each, however long ago it was saved, and has no index of its own: those of the regions
point into it. engine/memory/region_stores.py says which regions and slots are filled.
"""

import errno
import mmap
import re
import shutil
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import override

from moe_ft.arithmetic import round_up
from moe_ft.config.fields import flag_of, size_text
from moe_ft.engine.memory.job_directory import BREAKPOINT
from moe_ft.engine.memory.layout import declare, encode_header
from moe_ft.engine.memory.mappings import Mappings
from moe_ft.errors import SnapshotError
from moe_ft.files.private_files import (
    make_private,
    read_private,
    write_atomically,
)
from moe_ft.format.boundary import SentTensor
from moe_ft.format.encoding import Body, decode
from moe_ft.format.entries import EntryPlace, UnitEntry
from moe_ft.format.packings import ALIGNMENT_BYTES


def describe_room(directory: Path) -> str:
    """Return how much room there is for the memory of a job, and what to do if it is too little."""
    # It may be gone.
    there = next(each for each in (directory, *directory.parents) if each.exists())
    usage = shutil.disk_usage(there)
    return (
        f"{directory} has {size_text(usage.free)} of {size_text(usage.total)} left: enlarge its file system "
        f"(mount -o remount,size=...), or start again with another {flag_of('memory_dir')}"
    )


class MappedFile:
    """A file of fixed size, mapped and touched once.

    Attributes:
        mappings: where it is mapped; those of its rank, if it is a rank's.
    """

    def __init__(self, data_path: Path, num_bytes: int) -> None:
        self.data_path = data_path
        self.num_bytes = num_bytes
        self.mappings = Mappings()
        self._mapping: mmap.mmap | None = None

    @property
    def mapping(self) -> mmap.mmap:
        """The mapped bytes."""
        if self._mapping is None:
            raise SnapshotError(f"{self.data_path} is not open")
        return self._mapping

    @property
    def view(self) -> memoryview:
        """The mapped bytes, for tensors that show them: these keep the memory mapped after `close`.

        A tensor that torch makes of the mapping itself does not: its next use would end the process.
        """
        return memoryview(self.mapping)

    def open(self) -> None:
        """Map the file and touch all of it; one of this size keeps what it holds. Again does nothing.

        Raises:
            UnsafePathError: if another user owns or could replace the file or its directory, or it is a link.
            OSError: if the file system has no room; writing to a mapping later would kill the process.
        """
        if self._mapping is not None:
            return
        make_private(self.data_path.parent)
        if self.data_path.is_file() and not self.is_in_place and not self.data_path.is_symlink():
            self._discard()
        self._mapping = self.mappings.open(self.data_path, self.num_bytes)

    def _discard(self) -> None:
        self.data_path.unlink()

    @property
    def is_in_place(self) -> bool:
        """True if the data file is there in this size."""
        return self.data_path.is_file() and self.data_path.stat().st_size == self.num_bytes

    def close(self) -> None:
        """Use it no longer; the file stays. It is unmapped unless its mappings last."""
        self._mapping = None
        self.mappings.let_go(self.data_path)


class IndexedFile(MappedFile):
    """A mapped file that holds something only while its index is next to it.

    Attributes:
        iteration: of what it holds or takes, None if there is none.
    """

    def __init__(self, data_path: Path, num_bytes: int) -> None:
        super().__init__(data_path, num_bytes)
        self.iteration: int | None = None

    @property
    def index_path(self) -> Path:
        """The index, which is there only while the file holds something whole."""
        return self.data_path.with_suffix(".json")

    def _discard(self) -> None:
        self.invalidate()
        super()._discard()

    def invalidate(self) -> None:
        """Remove the index: from now on the file holds nothing."""
        self.iteration = None
        self.index_path.unlink(missing_ok=True)

    def commit(self, content: bytes, iteration: int) -> None:
        """Have the file hold something by one rename of its index.

        Raises:
            OSError: if that has no room; it says how much there is, and where.
        """
        try:
            write_atomically(self.index_path, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            text = f"{error.strerror}: an index of {size_text(len(content))} does not fit. "
            raise OSError(error.errno, text + describe_room(self.data_path.parent)) from error
        self.iteration = iteration

    def index[B: Body](self, kind: type[B]) -> B:
        """Return what was committed; raise OSError if there is nothing, or it is damaged."""
        return decode(read_private(self.index_path), kind, str(self.index_path))


class Region(IndexedFile):
    """One region of a rank, or of a replica.

    The training thread owns its rank's regions, but for the one of the window under way: its bytes and
    `iteration` belong to the copy worker. Replicas belong to the threads of peers' connections.

    Attributes:
        number: of the region in its directory; less than 0 for that of the breakpoint, counted down.
    """

    def __init__(self, directory: Path, number: int, num_bytes: int) -> None:
        name = f"region_{number}" if number >= 0 else BREAKPOINT
        name += f"_{-1 - number}" if number < -1 else ""
        super().__init__(directory / f"{name}.safetensors", num_bytes)
        self.directory = directory
        self.number = number

    def begin(self, header: bytes) -> None:
        """Begin to fill it: it holds nothing but a header."""
        self.invalidate()
        self.mapping[: len(header)] = header


def breakpoint_region(directory: Path, num_bytes: int) -> Region:
    """Return the region of a rank's breakpoint (engine/breakpoints.py).

    It stays clear of one of another size, which may still be needed.
    """
    found = (Region(directory, number, num_bytes) for number in count(-1, -1))
    return next(each for each in found if each.is_in_place or not each.data_path.exists())


BOUNDARY_FILE_NAME = re.compile(r"boundary_\d+\.(safetensors|json)")


class BoundarySlot(IndexedFile):
    """Slot for the sends of one iteration. The training thread owns it, the worker commits it."""

    def __init__(self, directory: Path, number: int, num_bytes: int) -> None:
        super().__init__(directory / f"boundary_{number}.safetensors", num_bytes)


def make_header(sent: Sequence[SentTensor], header_bytes: int, file_bytes: int) -> bytes:
    """Return the safetensors header of a data file; raises SnapshotError if tensors are too many for it."""
    declared: dict[str, object] = {}
    end = header_bytes
    for each in sent:
        _declare_gap(declared, end, each.offset, header_bytes)
        start, end = each.offset, each.offset + each.num_bytes
        first, last = start - header_bytes, end - header_bytes
        declared[each.name] = declare(each.dtype, each.shape, first, last)
    _declare_gap(declared, end, file_bytes, header_bytes)
    header = encode_header(declared, header_bytes)
    if len(header) > header_bytes:
        raise SnapshotError(
            f"the header of {len(sent)} tensors takes {len(header)} bytes, its slot has {header_bytes}"
        )
    return header


def _declare_gap(declared: dict[str, object], start: int, end: int, header_bytes: int) -> None:
    if end > start:
        unused = declare("U8", [end - start], start - header_bytes, end - header_bytes)
        declared[f"__unused__/{start}"] = unused


class UnitPool(MappedFile):
    """Slots of equal size in one file, which is a valid safetensors file.

    Slots that a snapshot fills belong to the copy worker until it is complete, all others to the training
    thread. The slots of a replica belong to the threads of its connections.

    Its name holds its geometry: a start with other settings makes another one and can still read this.
    """

    def __init__(self, directory: Path, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = round_up(slot_bytes, ALIGNMENT_BYTES)
        self.num_slots = num_slots
        self._header = _header(self.slot_bytes, num_slots)
        name = f"pool_{num_slots}x{self.slot_bytes}.safetensors"
        super().__init__(directory / name, len(self._header) + num_slots * self.slot_bytes)

    @property
    def name(self) -> str:
        """The file's name, as unit entries have it."""
        return self.data_path.name

    @override
    def open(self) -> None:
        super().open()
        self.mapping[: len(self._header)] = self._header

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins, in bytes from the start of the file."""
        return len(self._header) + slot * self.slot_bytes

    def slot_at(self, offset: int) -> int:
        """Return the slot that begins at an offset."""
        return (offset - len(self._header)) // self.slot_bytes

    def has_place(self, unit: UnitEntry | EntryPlace) -> bool:
        """Return whether a unit version is said to be in one of the slots."""
        slot = self.slot_at(unit.offset)
        return (
            unit.file == self.name
            and 0 <= slot < self.num_slots
            and unit.offset == self.offset_of(slot)
            and unit.num_bytes <= self.slot_bytes
        )


def _header(slot_bytes: int, num_slots: int) -> bytes:
    slots = {
        f"slot/{slot}": declare("U8", [slot_bytes], slot * slot_bytes, (slot + 1) * slot_bytes)
        for slot in range(num_slots)
    }
    return encode_header(slots)
