"""Transfers of one rank: a plan brings it the parts of units that it needs, verified.

A unit that is whole at one source passes through as it is there, without a copy: in the layout of the state
each one is. Any other one is put together from the parts that its sources have, as if this rank had saved it.
recovery/divided.py plans those, recovery/left.py knows what there is, recovery/fetch.py which versions are
needed.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast, override

import msgspec
import torch

from moe_ft.arithmetic import round_up
from moe_ft.engine.links.parts import zeros
from moe_ft.engine.persist.soundness import check_is_finite
from moe_ft.engine.snapshots.staging import unpack_into
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import TensorEntry, UnitEntry, tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES, Packing
from moe_ft.planning.recovery import Source
from moe_ft.planning.relayout import VersionNumber
from moe_ft.planning.transfer import Box, Move, boxes_of, join_ranges, runs_of
from moe_ft.recovery.left import Copy, Left, Position
from moe_ft.recovery.readers import FetchedUnit, read_unit
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.slices import DTYPES, describe
from moe_ft.units import Level, UnitId

_SHARE = 0.9  # of a unit; who needs more of it gets it whole
_GAP_BYTES = 4096  # between ranges that are cheaper to send as one
_MOST_RANGES = 8192  # in a request

Moves = Sequence[Sequence[Move]]  # [tensor of the unit]


class SavedTensor(NamedTuple):
    """One tensor of a saved unit, by its number in the unit."""

    copy: Copy
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """Way of one unit to this rank.

    Attributes:
        tensors: those that it is put together from, without offsets, as this rank is to have them.
        moves: to each of them; None if the unit is what its only source has.
        sources: of each copy that is read.
    """

    sources: Mapping[Copy, Source]
    tensors: Sequence[TensorEntry] = ()
    moves: Moves | None = None

    def moves_from(self, copy: Copy) -> list[Move] | None:
        """Return the moves that are made out of a copy; None for all of it, also what means nothing."""
        if self.moves is None:
            return None
        return [move for found in self.moves for move in found if _held(move).copy == copy]


class Transfer(ABC):
    """Reads units from what there is. Owned by the training thread.

    Attributes:
        needed_bytes: bytes of the tensors that were needed, as they are stored.
        read_bytes: by place, a node or "storage", bytes that were read there for them.
    """

    def __init__(self, left: Left, catalog: UnitCatalog) -> None:
        self._left = left
        self._catalog = catalog
        self._done: dict[tuple[UnitId, Position, VersionNumber], FetchedUnit] = {}
        self._used: dict[Copy, None] = {}
        self.needed_bytes = 0
        self.read_bytes: Counter[str] = Counter()

    @abstractmethod
    def is_wanted(self, unit: UnitId) -> bool:
        """Return whether this rank needs, or has saved, something of a unit."""

    @abstractmethod
    def versions(self, unit: UnitId, level: Level, position: Position) -> list[VersionNumber]:
        """Return the versions in which all of a unit is there, the best first."""

    @abstractmethod
    def plan(
        self, unit: UnitId, level: Level, position: Position, version: VersionNumber
    ) -> UnitPlan:
        """Plan where a version of a unit comes from.

        Raises:
            CorruptStateError: if it is not there, or no source is left that has it intact.
        """

    @abstractmethod
    def why_missing(self, unit: UnitId) -> str:
        """Return how a unit is called of which no version that fits is there."""

    @property
    def stored_as(self) -> tuple[UnitEntry, ...]:
        """Entries of everything that was read, as it was saved."""
        return tuple(self._left.units[copy] for copy in self._used)

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
            plan = self.plan(unit, level, position, version)
            contents: dict[Copy, tuple[UnitEntry, memoryview]] = {}
            for copy, source in plan.sources.items():
                read = self._content(copy, source, plan.moves_from(copy))
                if read is None:
                    break  # the next plan takes another source
                contents[copy] = read
            else:
                self._used.update(dict.fromkeys(contents))
                return self._finish(unit, plan, contents)

    def _content(
        self, copy: Copy, source: Source, needed: Sequence[Move] | None
    ) -> tuple[UnitEntry, memoryview] | None:
        """Return a copy's entry at a source and its verified bytes; None, and say so, if it is not intact.

        Args:
            needed: moves that will be made out of it; None for all of it.
        """
        reader = self._left.readers.open(source)
        assert reader is not None  # its index is known
        try:
            saved = self._left.units[copy]
            ranges = [] if needed is None else _ranges_of(saved, needed)
            num_bytes = sum(end - start for start, end in ranges)
            if ranges and num_bytes < _SHARE * saved.num_bytes:
                parts = reader.read_parts(copy.unit, copy.position, saved, ranges)
                if parts is not None:
                    self.read_bytes[source.place] += num_bytes
                    check_is_finite(copy.unit, saved, parts)
                    return saved, parts
            entry, content = read_unit(reader, copy.unit, copy.position, copy.version)
            self.read_bytes[source.place] += len(content)
            if (entry.version, entry.checksum) != (copy.version, copy.checksum):
                raise CorruptStateError(f"unit {copy.unit} is another version there")
            check_is_finite(copy.unit, entry, content)
        except Exception as error:  # whatever a back end raises, the next source may have it
            self._left.give_up(copy, source, error)
            return None
        return entry, content

    def _finish(
        self, unit: UnitId, plan: UnitPlan, contents: Mapping[Copy, tuple[UnitEntry, memoryview]]
    ) -> FetchedUnit:
        """Return the unit as its source has it, if that is all of it, else put it together."""
        copy, source = next(iter(plan.sources.items()))
        entry, content = contents[copy]
        if plan.moves is None:
            reader = self._left.readers.open(source)
            stays = reader is not None and reader.stays(entry)
            there = (each for each in entry.tensors if not each.is_absent)
            self.needed_bytes += sum(map(tensor_bytes, there))
        else:
            stays = False
            self.needed_bytes += self._bytes_of(plan.moves)
            entry, content = _put_together(entry, plan.tensors, plan.moves, contents)
        return FetchedUnit(unit=unit, source=source, entry=entry, content=content, stays=stays)

    def _bytes_of(self, moves: Moves) -> int:
        """Return the bytes that moves take of what is stored."""
        total = 0
        for move in (each for found in moves for each in found):
            held = _held(move)
            saved = self._left.units[held.copy].tensors[held.number]
            if not saved.is_absent:
                total += tensor_bytes(saved) * move.num_elements // (saved.end - saved.start)
        return total


class OwnUnits(Transfer):
    """Units in the layout of the state: a copy that a rank of this number has saved is all of one."""

    @override
    def is_wanted(self, unit: UnitId) -> bool:
        if (None, str(unit)) in self._left.copies:
            return True
        sharded = {local.name for local in self._catalog.parameters_of(unit) if local.is_sharded}
        return any(each.parameter in sharded for each in self._catalog.tensors(unit, Level.FULL))

    @override
    def versions(self, unit: UnitId, level: Level, position: Position) -> list[VersionNumber]:
        """Return the versions of this rank's part; all ranks are checked together later."""
        copies = self._left.copies.get((position, str(unit)), ())
        return [*dict.fromkeys(copy.version for copy in copies if copy not in self._left.lost)]

    @override
    def plan(
        self, unit: UnitId, level: Level, position: Position, version: VersionNumber
    ) -> UnitPlan:
        for copy in self._left.copies.get((position, str(unit)), ()):
            if copy.version != version or copy in self._left.lost:
                continue
            odd = self._misfit(unit, level, self._left.units[copy])
            for source in self._left.readable(copy):
                if not odd:
                    return UnitPlan(sources={copy: source})
                self._left.give_up(copy, source, CorruptStateError(odd))
        raise CorruptStateError(str(unit))

    @override
    def why_missing(self, unit: UnitId) -> str:
        return str(unit)

    def _misfit(self, unit: UnitId, level: Level, saved: UnitEntry) -> str:
        """Return why a unit cannot be put back as it was saved; empty if it can.

        Of what several ranks hold this rank may have saved any range, or none.
        """
        locals_ = self._catalog.parameters_of(unit)
        shared = {
            (whole.parameter, whole.key, whole.dtype): whole.end
            for local in locals_
            if not local.is_sharded
            for whole in describe(local.whole, level, unit.part)
        }
        names = {name for name, _, _ in shared}
        wanted = cuts(
            each for each in self._catalog.tensors(unit, level) if each.parameter not in names
        )
        found = cuts(
            each
            for each in saved.tensors
            if each.end > shared.get((each.parameter, each.key, each.dtype), 0)
        )
        if not (odd := sorted(wanted ^ found)):
            return ""
        name, key, start, end, _ = odd[0]
        return f"unit {unit} is cut differently there, for example {name}/{key}[{start}:{end}]"


def cuts(tensors: Iterable[TensorEntry]) -> set[tuple[str, str, int, int, str]]:
    """Return the ranges of parameters that tensors hold."""
    return {(each.parameter, each.key, each.start, each.end, each.dtype) for each in tensors}


def _held(move: Move) -> SavedTensor:
    return cast(SavedTensor, move.source.owner)


def _ranges_of(unit: UnitEntry, moves: Sequence[Move]) -> list[tuple[int, int]]:
    """Return the bytes of a saved unit that some moves need; of a packed tensor all."""
    ranges = []
    for move in moves:
        saved = unit.tensors[_held(move).number]
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
        for move in found:
            held = _held(move)
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
