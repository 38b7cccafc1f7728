"""Layout of the unit versions of a window's snapshots in a data file, which is a valid safetensors file.

The snapshots follow each other, so that each of them adds one stretch of bytes. Alignment gaps are declared
as tensors ``__unused__/n``, because safetensors refuses holes. No torch, no I/O.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import msgspec

from moe_ft.arithmetic import round_up
from moe_ft.errors import SnapshotError
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import TensorEntry, tensor_pieces
from moe_ft.format.index import Index
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.units import Level, UnitId, parse_unit

HEADER_ALIGNMENT_BYTES = 4096
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlace:
    """Place of one unit version, in bytes from the start of the file; tensors count from its own start."""

    unit: UnitId
    level: Level
    offset: int
    num_bytes: int
    tensors: tuple[TensorEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileLayout:
    """The places of all unit versions, and the file's header.

    Attributes:
        snapshots: ``[snapshot]`` unit versions that each of them adds.
        ends: ``[snapshot]`` bytes of the file that are filled after each.
    """

    snapshots: tuple[tuple[UnitPlace, ...], ...]
    ends: tuple[int, ...]
    header: bytes
    num_bytes: int

    @property
    def units(self) -> tuple[UnitPlace, ...]:
        """The places of all snapshots."""
        return tuple(chain.from_iterable(self.snapshots))


LayOut = Callable[[], FileLayout]  # the first call may compute it: one thread at a time may call
Contents = Iterable[tuple[UnitId, Level, Sequence[TensorEntry]]]


def lay_out(units: Contents, num_bytes: int | None = None) -> FileLayout:
    """Place the units of one snapshot; see `lay_out_window`."""
    return lay_out_window([units], num_bytes)


def lay_out_window(snapshots: Iterable[Contents], num_bytes: int | None = None) -> FileLayout:
    """Place units one after the other, snapshot by snapshot; those without tensors, which others hold, not.

    Args:
        snapshots: units, their level and their tensors, whose offsets are ignored.
        num_bytes: size of the file; by default the units decide it. Raises SnapshotError if they need more.
    """
    header: dict[str, dict[str, object]] = {}
    placed: list[list[UnitPlace]] = []
    ends, end = [], 0
    for number, units in enumerate(snapshots):
        placed.append([])
        for unit, level, tensors in units:
            if tensors:
                place = _place(unit, level, tensors, _align(end, header), header, number)
                placed[-1].append(place)
                end = place.offset + place.num_bytes
        ends.append(end)
    data_start, used = len(encode_header(header)), end
    if num_bytes is not None and num_bytes > data_start + end:
        # Declaring the rest lengthens the header, perhaps by a page, which shortens the rest.
        _declare_unused(header, end, num_bytes)
        data_start = len(encode_header(header))
        _declare_unused(header, end, num_bytes - data_start)
        end = num_bytes - data_start
    if num_bytes is not None and data_start + max(end, used) > num_bytes:
        raise SnapshotError(f"a layout needs {data_start + used} bytes, its region has {num_bytes}")
    return FileLayout(
        snapshots=tuple(
            tuple(replace(place, offset=data_start + place.offset) for place in places)
            for places in placed
        ),
        ends=tuple(data_start + each for each in ends),
        header=encode_header(header, data_start),
        num_bytes=data_start + end,
    )


def lay_out_again(index: Index) -> FileLayout:
    """Return the layout of an index's region; raises SnapshotError if this version has another one."""
    first = index.iteration - index.num_snapshots + 1
    snapshots = [
        sorted(
            [unit for unit in index.units.items() if unit[1].iteration == first + position]
            + list(weights.items()),
            key=lambda item: item[1].offset,
        )
        for position, weights in enumerate(index.compute or ({},))
    ]
    layout = lay_out_window(
        [
            [(parse_unit(name), Level(unit.level), unit.tensors) for name, unit in units]
            for units in snapshots
        ],
        index.file_bytes,
    )
    if checksum(layout.header) != index.header_checksum:
        raise SnapshotError(f"iteration {index.iteration} of rank {index.rank} has another layout")
    return layout


def _place(
    unit: UnitId,
    level: Level,
    tensors: Sequence[TensorEntry],
    start: int,
    header: dict[str, dict[str, object]],
    number: int,
) -> UnitPlace:
    # Only the weights of a unit may be in several snapshots of a window.
    version = f"{level}.{number}" if level is Level.COMPUTE else level.value
    inside, end = [], start
    for tensor in tensors:
        first = end = _align(end, header)
        inside.append(msgspec.structs.replace(tensor, offset=first - start))
        name = f"{unit}/{version}/{tensor.parameter}[{tensor.start}:{tensor.end}]/{tensor.key}"
        for piece in tensor_pieces(tensor):
            begin, end = _align(end, header), first + piece.offset + piece.num_bytes
            piece_name = f"{name}.{piece.name}" if piece.name else name
            header[piece_name] = declare(piece.dtype, [piece.count], begin, end)
    return UnitPlace(
        unit=unit, level=level, offset=start, num_bytes=end - start, tensors=tuple(inside)
    )


def _align(end: int, header: dict[str, dict[str, object]]) -> int:
    aligned = round_up(end, ALIGNMENT_BYTES)
    if aligned > end:
        _declare_unused(header, end, aligned)
    return aligned


def _declare_unused(header: dict[str, dict[str, object]], start: int, end: int) -> None:
    header[f"__unused__/{start}"] = declare("U8", [end - start], start, end)


def declare(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, object]:
    """Return what the header of a safetensors file says of a tensor at offsets from the header's end."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def encode_header(declared: Mapping[str, object], num_bytes: int | None = None) -> bytes:
    """Return the header of a safetensors file, padded with blanks, by default to whole pages."""
    encoded = json.dumps(declared, separators=(",", ":")).encode()
    if num_bytes is None:
        num_bytes = round_up(len(encoded) + _LENGTH_BYTES, HEADER_ALIGNMENT_BYTES)
    padded = encoded.ljust(num_bytes - _LENGTH_BYTES)
    return len(padded).to_bytes(_LENGTH_BYTES, "little") + padded
