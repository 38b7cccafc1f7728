"""How the unit versions of a snapshot lie in a data file, which is a valid safetensors file.

The header has a fixed size, padded with blanks; alignment gaps are declared as tensors ``__unused__/n``,
because safetensors refuses holes. Sizes and offsets only: no torch, no I/O.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from moe_ft.formats import TensorEntry, tensor_bytes
from moe_ft.units import Level, UnitId

UNIT_ALIGNMENT_BYTES = 64
HEADER_ALIGNMENT_BYTES = 4096
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlace:
    """Where one unit version lies: bytes from the start of the file; offsets of tensors from its own."""

    unit: UnitId
    level: Level
    offset: int
    num_bytes: int
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """The places of all units of a snapshot, and the file's header."""

    units: tuple[UnitPlace, ...]
    header: bytes
    num_bytes: int


def lay_out(
    units: Iterable[tuple[UnitId, Level, Sequence[TensorEntry]]], num_bytes: int | None = None
) -> FileLayout:
    """Place units one behind the other.

    Args:
        units: units, their level and their tensors, whose offsets are ignored; units without
            tensors (other ranks hold them) are left out.
        num_bytes: size of the file, if it is to be larger than it must be.
    """
    header: dict[str, dict[str, object]] = {}
    placed: list[tuple[UnitId, Level, int, int, tuple[TensorEntry, ...]]] = []
    end = 0
    for unit, level, tensors in units:
        if not tensors:
            continue
        end = start = _align(end, header)
        inside = []
        for tensor in tensors:
            end = _align(end, header)
            size = tensor_bytes(tensor)
            inside.append(msgspec.structs.replace(tensor, offset=end - start))
            header[
                f"{unit}/{level}/{tensor.parameter}[{tensor.start}:{tensor.end}]/{tensor.key}"
            ] = {
                "dtype": tensor.dtype,
                "shape": [tensor.end - tensor.start],
                "data_offsets": [end, end + size],
            }
            end += size
        placed.append((unit, level, start, end - start, tuple(inside)))
    data_start = _data_start(header)
    if num_bytes is not None and num_bytes > data_start + end:
        # Declaring the rest makes the header longer, perhaps by a page, and the rest shorter.
        _declare_unused(header, end, num_bytes)
        data_start = _data_start(header)
        _declare_unused(header, end, num_bytes - data_start)
        end = num_bytes - data_start
    encoded = json.dumps(header, separators=(",", ":")).encode()
    padded = encoded.ljust(data_start - _LENGTH_BYTES)
    return FileLayout(
        units=tuple(
            UnitPlace(
                unit=unit,
                level=level,
                offset=data_start + start,
                num_bytes=size,
                tensors=tensors,
            )
            for unit, level, start, size, tensors in placed
        ),
        header=len(padded).to_bytes(_LENGTH_BYTES, "little") + padded,
        num_bytes=data_start + end,
    )


def _align(end: int, header: dict[str, dict[str, object]]) -> int:
    """Return the next aligned offset, declaring the gap before it."""
    aligned = -(-end // UNIT_ALIGNMENT_BYTES) * UNIT_ALIGNMENT_BYTES
    if aligned > end:
        _declare_unused(header, end, aligned)
    return aligned


def _declare_unused(header: dict[str, dict[str, object]], start: int, end: int) -> None:
    header[f"__unused__/{start}"] = {
        "dtype": "U8",
        "shape": [end - start],
        "data_offsets": [start, end],
    }


def _data_start(header: dict[str, dict[str, object]]) -> int:
    num_bytes = len(json.dumps(header, separators=(",", ":"))) + _LENGTH_BYTES
    return -(-num_bytes // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES
