"""Transfers of one rank: a plan brings it the parts of units that it needs, verified.

A unit that is whole at one source passes through as it is there, without a copy. Any other one is put
together from the parts that its sources have, as if this rank had saved it. planning/transfer.py plans what
moves, recovery/left.py knows what there is, recovery/fetch.py which versions are needed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, cast

import msgspec
import torch

from moe_ft.arithmetic import round_up
from moe_ft.engine.links.parts import zeros
from moe_ft.engine.persist.soundness import check_is_finite
from moe_ft.engine.snapshots.staging import unpack_into
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import ParameterEntry, TensorEntry, UnitEntry, tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES, Packing
from moe_ft.planning.recovery import Source, Tier
from moe_ft.planning.relayout import VersionNumber, complete_versions, wholes_of
from moe_ft.planning.transfer import (
    Box,
    Move,
    Part,
    boxes_of,
    cut,
    join_ranges,
    plan_transfer,
    runs_of,
)
from moe_ft.recovery.left import Copy, Left, Position, SavedTensor, model_blocks, own_blocks
from moe_ft.recovery.overview import number_of
from moe_ft.recovery.readers import FetchedUnit, read_unit
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.slices import DTYPES, describe
from moe_ft.units import Level, UnitId

_TIERS = [*Tier]
_SHARE = 0.9  # of a unit; who needs more of it gets it whole
_GAP_BYTES = 4096  # between ranges that are cheaper to send as one
_MOST_RANGES = 8192  # in a request

Moves = Sequence[Sequence[tuple[Source, Move]]]  # [tensor of the unit]


class Transfer:
    """Reads units from what there is. Owned by the training thread.

    Attributes:
        needed_bytes: bytes of the tensors that were needed, as they are stored.
        read_bytes: by place, a node or "storage", bytes that were read there for them.
    """

    def __init__(
        self, left: Left, catalog: UnitCatalog, rank: int, *, is_other_layout: bool
    ) -> None:
        self._left, self._catalog, self._rank = left, catalog, rank
        self._is_other_layout = is_other_layout
        self._done: dict[tuple[UnitId, Position, VersionNumber], FetchedUnit] = {}
        self._used: dict[Copy, None] = {}
        self.needed_bytes = 0
        self.read_bytes: Counter[str] = Counter()

    @property
    def stored_as(self) -> tuple[UnitEntry, ...]:
        """Entries of everything that was read, as it was saved."""
        return tuple(self._left.units[copy] for copy in self._used)

    def is_wanted(self, unit: UnitId) -> bool:
        """Return whether this rank needs, or has saved, something of a unit."""
        has_saved = not self._is_other_layout and (None, str(unit)) in self._left.copies
        return has_saved or bool(self._needed(unit, Level.FULL))

    def numbers_of(self, units: Iterable[UnitId]) -> set[int]:
        """Return the numbers of the model's tensors that this rank has something of, in another layout."""
        levels = (Level.FULL, Level.COMPUTE)
        needed = (part for unit in units for level in levels for part in self._needed(unit, level))
        return {number_of(part.block.tensor) for part in needed}

    def versions(self, unit: UnitId, level: Level, position: Position) -> list[VersionNumber]:
        """Return the versions in which all of a unit is there, the newest first.

        In the same layout that is this rank's part. Of what several ranks hold it may have saved any range,
        or none; all ranks are checked together later.
        """
        wanted = self._needed(unit, level)
        parts = self._left.parts_of(position, {each.block.tensor for each in wanted})
        if not self._is_other_layout:
            for copy in self._left.copies.get((position, str(unit)), ()):
                if copy not in self._left.lost:
                    parts[copy.version] += ()
        return complete_versions(parts, wanted)

    def iterations(self, unit: UnitId) -> list[int]:
        """Return the iterations of which anything of a unit is there at FULL."""
        tensors = {each.block.tensor for each in self._needed(unit, Level.FULL)}
        return sorted({iteration for _, iteration in self._left.parts_of(None, tensors)})

    def read(
        self, unit: UnitId, level: Level, position: Position, version: VersionNumber
    ) -> FetchedUnit:
        """Return this rank's part of one version of a unit.

        Raises:
            CorruptStateError: if it is not there, or no source has it intact.
        """
        key = unit, position, version
        if key not in self._done:
            self._done[key] = self._read(unit, level, position, version)
        return self._done[key]

    def _read(
        self, unit: UnitId, level: Level, position: Position, version: VersionNumber
    ) -> FetchedUnit:
        while True:
            best = self._best_copy(unit, position, version)
            tensors = self._tensors(unit, level, best)
            moves = self._plan(unit, tensors, position, version, best)
            sources: dict[Copy, Source] = {}
            for source, move in (each for found in moves for each in found):
                sources.setdefault(move.source.owner.copy, source)
            if not sources:
                raise CorruptStateError(str(unit))
            saved = self._left.units[next(iter(sources))]
            passes = len(sources) == 1 and _is_same(tensors, saved.tensors, moves)
            contents: dict[Copy, tuple[UnitEntry, memoryview]] = {}
            for copy, source in sources.items():
                needed = [
                    move for found in moves for _, move in found if move.source.owner.copy == copy
                ]
                whole = passes or best is not None
                read = self._content(copy, source, unit, tensors, None if whole else needed)
                if read is None:
                    break  # the next plan takes another source
                contents[copy] = read
            if len(contents) == len(sources):
                self.needed_bytes += self._bytes_of(moves)
                return self._pass_on(unit, tensors, moves, sources, contents, passes=passes)

    def _best_copy(self, unit: UnitId, position: Position, version: VersionNumber) -> Copy | None:
        """Return the copy that is taken whole in the same layout; None in another one.

        Raises:
            CorruptStateError: if none can be read.
        """
        if self._is_other_layout:
            return None
        for copy in self._left.copies.get((position, str(unit)), ()):
            if copy.version == version and self._is_left(copy):
                return copy
        raise CorruptStateError(str(unit))

    def _bytes_of(self, moves: Moves) -> int:
        """Return the bytes that moves take of what is stored."""
        total = 0
        for _, move in (each for found in moves for each in found):
            held = cast(SavedTensor, move.source.owner)
            saved = self._left.units[held.copy].tensors[held.number]
            if not saved.is_absent:
                total += tensor_bytes(saved) * move.num_elements // (saved.end - saved.start)
        return total

    def _tensors(self, unit: UnitId, level: Level, best: Copy | None) -> list[TensorEntry]:
        """Return the tensors of a unit that this rank is to have, without offsets.

        Of what several ranks hold that is what it has saved.
        """
        tensors = self._catalog.tensors(unit, level)
        if best is None:
            return tensors
        shared = {
            (whole.parameter, whole.key, whole.dtype): whole.end
            for local in self._catalog.parameters_of(unit)
            if not local.is_sharded
            for whole in describe(local.whole, level, unit.part)
        }
        names = {name for name, _, _ in shared}
        return [
            *(each for each in tensors if each.parameter not in names),
            *(
                each
                for each in self._left.units[best].tensors
                if each.end <= shared.get((each.parameter, each.key, each.dtype), 0)
            ),
        ]

    def _is_left(self, copy: Copy) -> bool:
        return copy not in self._left.lost and bool(self._left.readable(copy))

    def _entries_of(self, unit: UnitId) -> dict[str, ParameterEntry]:
        parameters = self._catalog.parameters_of(unit)
        return {local.name: local.entry for local in parameters}

    def _needed(self, unit: UnitId, level: Level) -> list[Part]:
        """Return what must be there of a unit: of another layout all of it, as ranks take one version."""
        entries, tensors = self._entries_of(unit), self._catalog.tensors(unit, level)
        if self._is_other_layout:
            wholes = {
                block.tensor: block
                for each in tensors
                for block in wholes_of(entries[each.parameter].places or (), each.key)
            }
            return [Part(None, block, 0, prod(block.extent)) for block in wholes.values()]
        sharded = {local.name for local in self._catalog.parameters_of(unit) if local.is_sharded}
        return [
            part
            for each in tensors
            if each.parameter in sharded
            for part in cut(None, own_blocks(None, each), each.start, each.end)
        ]

    def _plan(
        self,
        unit: UnitId,
        tensors: Sequence[TensorEntry],
        position: Position,
        version: VersionNumber,
        best: Copy | None,
    ) -> Moves:
        """Return the moves to each tensor.

        Raises:
            CorruptStateError: if something does not come.
        """
        entries = self._entries_of(unit)
        blocks = model_blocks if self._is_other_layout else own_blocks
        wanted = [
            part
            for number, each in enumerate(tensors)
            for part in cut(number, blocks(entries[each.parameter], each), each.start, each.end)
        ]
        have = self._left.parts_of(position, {each.block.tensor for each in wanted})[version]

        def copies_of(owner: Any) -> list[Source]:
            found = self._left.readable(owner.copy)
            # Other ranks begin with other sources.
            first = self._rank % len(found) if self._is_other_layout else 0
            return [*found[first:], *found[:first]]

        plan = plan_transfer(
            (
                part
                for part in have
                if best in (None, part.owner.copy) and self._is_left(part.owner.copy)
            ),
            wanted,
            copies_of,
            lambda source, _: _TIERS.index(source.tier),
            lambda owner: owner.copy.rank,
        )
        moves = [plan.moves.get(number, ()) for number in range(len(tensors))]
        for each, found in zip(tensors, moves, strict=True):
            if sum(move.num_elements for _, move in found) == each.end - each.start:
                continue
            if best is not None:
                break  # reading it says that it is cut differently
            if plan.missing:
                ranks = sorted(
                    {part.owner.copy.rank for part in have if not self._is_left(part.owner.copy)}
                )
                raise CorruptStateError(
                    f"{unit} of rank {', '.join(map(str, ranks))} of the other layout"
                )
            raise CorruptStateError(f"place of {each.parameter} in the model")
        return moves

    def _content(
        self,
        copy: Copy,
        source: Source,
        unit: UnitId,
        wanted: Sequence[TensorEntry],
        needed: Sequence[Move] | None,
    ) -> tuple[UnitEntry, memoryview] | None:
        """Return a copy's entry at a source and its verified bytes; None, and say so, if it is not intact.

        Args:
            needed: moves that will be made out of it; None for all of it, also what means nothing.
        """
        place = source.version.node or Tier.STORAGE.value
        reader = self._left.readers.open(source)
        assert reader is not None  # its index is known
        try:
            saved = self._left.units[copy]
            ranges = [] if needed is None else _ranges_of(saved, needed)
            num_bytes = sum(end - start for start, end in ranges)
            if ranges and num_bytes < _SHARE * saved.num_bytes:
                parts = reader.read_parts(copy.unit, copy.position, saved, ranges)
                if parts is not None:
                    self.read_bytes[place] += num_bytes
                    check_is_finite(copy.unit, saved, parts)
                    self._used[copy] = None
                    return saved, parts
            entry, content = read_unit(reader, copy.unit, copy.position, copy.version)
            self.read_bytes[place] += len(content)
            if (entry.version, entry.checksum) != (copy.version, copy.checksum):
                raise CorruptStateError(f"unit {copy.unit} is another version there")
            if not self._is_other_layout:
                _check_is_cut_alike(unit, wanted, entry.tensors)
            check_is_finite(copy.unit, entry, content)
        except Exception as error:  # whatever a back end raises, the next source may have it
            self._left.give_up(copy, source, error)
            return None
        self._used[copy] = None
        return entry, content

    def _pass_on(
        self,
        unit: UnitId,
        tensors: Sequence[TensorEntry],
        moves: Moves,
        sources: Mapping[Copy, Source],
        contents: Mapping[Copy, tuple[UnitEntry, memoryview]],
        *,
        passes: bool,
    ) -> FetchedUnit:
        """Return the unit as its source has it, if that is all of it, else put it together."""
        copy, source = next(iter(sources.items()))
        entry, content = contents[copy]
        if not passes:
            entry, content = _put_together(entry, tensors, moves, contents)
            return FetchedUnit(unit=unit, source=source, entry=entry, content=content, stays=False)
        reader = self._left.readers.open(source)
        stays = not self._is_other_layout and reader is not None and reader.stays(entry)
        return FetchedUnit(unit=unit, source=source, entry=entry, content=content, stays=stays)


Cuts = set[tuple[str, str, int, int, str]]


def _cuts(tensors: Sequence[TensorEntry]) -> Cuts:
    return {(each.parameter, each.key, each.start, each.end, each.dtype) for each in tensors}


def _check_is_cut_alike(
    unit: UnitId, wanted: Sequence[TensorEntry], saved: Sequence[TensorEntry]
) -> None:
    """Raise CorruptStateError unless a unit has exactly what this rank can put back."""
    if odd := sorted(_cuts(wanted) ^ _cuts(saved)):
        name, key, start, end, _ = odd[0]
        raise CorruptStateError(
            f"unit {unit} is cut differently there, for example {name}/{key}[{start}:{end}]"
        )


def _is_same(wanted: Sequence[TensorEntry], saved: Sequence[TensorEntry], moves: Moves) -> bool:
    """Return whether what one source has saved is what is wanted, element by element."""
    return _cuts(wanted) == _cuts(saved) and all(
        (move.source.block.start, move.source.block.local_shape)
        == (move.target.block.start, move.target.block.local_shape)
        for found in moves
        for _, move in found
    )


def _ranges_of(unit: UnitEntry, moves: Sequence[Move]) -> list[tuple[int, int]]:
    """Return the bytes of a saved unit that some moves need; of a packed tensor all."""
    ranges = []
    for move in moves:
        saved = unit.tensors[move.source.owner.number]
        if saved.is_absent:
            continue
        num_bytes = tensor_bytes(saved)
        if saved.packing != Packing.EXACT:
            ranges.append((saved.offset, saved.offset + num_bytes))
            continue
        size = num_bytes // (saved.end - saved.start)
        for box, _ in boxes_of(move, saved.start, 0):
            ranges += (
                (saved.offset + first * size, saved.offset + last * size)
                for first, last in runs_of(box)
            )
    return join_ranges(ranges, gap=_GAP_BYTES, most=_MOST_RANGES)


def _put_together(
    like: UnitEntry,
    tensors: Sequence[TensorEntry],
    moves: Moves,
    contents: Mapping[Copy, tuple[UnitEntry, memoryview]],
) -> tuple[UnitEntry, memoryview]:
    """Return tensors that were copied out of the units that have them, and their entry.

    Raises:
        CorruptStateError: if a tensor exists in part.
    """
    placed = _placed(tensors)
    content = zeros(placed[-1].offset + tensor_bytes(placed[-1]))
    flat: dict[SavedTensor, torch.Tensor] = {}
    for number, (entry, found) in enumerate(zip(placed, moves, strict=True)):
        target = torch.frombuffer(
            content, dtype=DTYPES[entry.dtype], count=entry.end - entry.start, offset=entry.offset
        )
        are_absent = set()
        for _, move in found:
            held = cast(SavedTensor, move.source.owner)
            whole, read = contents[held.copy]
            saved = whole.tensors[held.number]
            are_absent.add(saved.is_absent)
            if saved.is_absent:
                continue
            if held not in flat:
                flat[held] = _unpacked(saved, read)
            for ours, theirs in boxes_of(move, saved.start, entry.start):
                _view(target, theirs).copy_(_view(flat[held], ours))
        if len(are_absent) != 1:
            raise CorruptStateError(f"{entry.key} of {entry.parameter}")
        placed[number] = msgspec.structs.replace(entry, is_absent=are_absent == {True})
    unit = msgspec.structs.replace(
        like,
        offset=0,
        num_bytes=len(content),
        checksum=checksum(content),
        tensors=tuple(placed),
        file="",
    )
    return unit, content


def _placed(tensors: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return tensors with offsets, one after another, as they are live."""
    placed, end = [], 0
    for each in tensors:
        entry = msgspec.structs.replace(
            each, offset=round_up(end, ALIGNMENT_BYTES), packing=Packing.EXACT.value
        )
        end = entry.offset + tensor_bytes(entry)
        placed.append(entry)
    return placed


def _unpacked(entry: TensorEntry, content: memoryview) -> torch.Tensor:
    """Return a saved tensor, flat; unless it is packed it shares memory with what was read."""
    count, dtype = entry.end - entry.start, DTYPES[entry.dtype]
    if entry.packing == Packing.EXACT:
        return torch.frombuffer(content, dtype=dtype, count=count, offset=entry.offset)
    flat = torch.empty(count, dtype=dtype)
    unpack_into(flat, entry, content)
    return flat


def _view(flat: torch.Tensor, box: Box) -> torch.Tensor:
    return torch.as_strided(flat, box.lengths, box.strides, flat.storage_offset() + box.at)
