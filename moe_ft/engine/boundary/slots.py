"""Slots of the boundary log: files of a rank's memory, each of which holds what one iteration has sent.

A slot is a data file of fixed size, mapped once, and an index next to it, without which it holds nothing.
engine/boundary/log.py fills slots, engine/boundary/reading.py reads them.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from moe_ft.engine.memory.layout import declare, encode_header
from moe_ft.engine.memory.regions import IndexedFile
from moe_ft.errors import SnapshotError
from moe_ft.files.private_files import write_atomically
from moe_ft.format.boundary import SentTensor

INDEX_NAME = re.compile(r"boundary_\d+\.json")
FILE_NAME = re.compile(r"boundary_\d+\.(safetensors|json)")


class BoundarySlot(IndexedFile):
    """One slot of a rank. The training thread owns it, but for a commit, which belongs to the worker."""

    def __init__(self, directory: Path, number: int, num_bytes: int) -> None:
        super().__init__(directory / f"boundary_{number}.safetensors", num_bytes)

    def commit(self, header: bytes, index: bytes) -> None:
        """Write the header of the data file, then make the slot valid by one rename of its index.

        Raises:
            OSError: if the directory has vanished or is full.
        """
        self.mapping[: len(header)] = header
        write_atomically(self.index_path, index)


def make_header(sent: Sequence[SentTensor], header_bytes: int, file_bytes: int) -> bytes:
    """Return the safetensors header of a data file: the tensors, and the gaps between them.

    Raises:
        SnapshotError: if the tensors are too many for the header.
    """
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
