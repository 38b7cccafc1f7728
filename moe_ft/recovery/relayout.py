"""Fetching a state that another layout has left: divided again among the ranks of this start.

The result looks like what recovery/fetch.py reads in the same layout: units and an index as if this rank had
written them, so that all later phases stay as they are. Units are read and verified whole, then the parts
that this rank needs are copied out of them. planning/transfer.py plans what moves.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import torch

from moe_ft.arithmetic import round_up
from moe_ft.engine.persist.soundness import check_is_finite
from moe_ft.engine.snapshots.staging import unpack_into
from moe_ft.errors import CorruptStateError, PlanError
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import ParameterEntry, TensorEntry, UnitEntry, tensor_bytes
from moe_ft.format.index import Index
from moe_ft.format.packings import ALIGNMENT_BYTES, Packing
from moe_ft.format.records import Gaps
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.planning.recovery import Plan, Source, Tier
from moe_ft.planning.relayout import (
    ModelTensor,
    VersionNumber,
    blocks_of,
    choose_version,
    merge_progress,
    wholes_of,
)
from moe_ft.planning.transfer import Block, Box, Move, Part, boxes_of, cut, plan_transfer
from moe_ft.recovery.fetch import Fetched
from moe_ft.recovery.meet import Met
from moe_ft.recovery.new_record import make_record
from moe_ft.recovery.readers import FetchedUnit, Readers, read_unit
from moe_ft.recovery.rotating import Rotation, version_of
from moe_ft.state.slices import DTYPES
from moe_ft.units import Level, UnitId

_TIERS = [*Tier]
Position = int | None  # number of the snapshot that has a unit at COMPUTE; None for FULL
IsAllowed = Callable[[VersionNumber], bool]


class Copy(NamedTuple):
    """Version of a unit as one rank of the other layout has saved it; several places may keep it."""

    rank: int
    position: Position
    unit: str
    version: VersionNumber
    checksum: str


class Held(NamedTuple):
    """One tensor of a saved unit, by its number in the unit."""

    copy: Copy
    number: int


@dataclass(frozen=True, slots=True)
class _Left:
    """Everything that the ranks of another layout have left, arranged by tensors of the model.

    Attributes:
        indexes: of the state that is to be recovered, by rank.
        newest_gaps: ``[expert]`` by layer name, of the newest state that was found.
        sources: of each copy, best first.
        parts: by position and tensor, what there is of each version.
    """

    indexes: dict[int, Index] = field(default_factory=dict)
    newest_gaps: dict[str, tuple[Gaps, ...]] = field(default_factory=dict)
    sources: dict[Copy, list[Source]] = field(default_factory=lambda: defaultdict(list))
    units: dict[Copy, UnitEntry] = field(default_factory=dict)
    parts: dict[tuple[Position, ModelTensor], dict[VersionNumber, list[Part]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )

    def add(self, source: Source, index: Index, position: Position, name: str) -> None:
        """Add a unit of an index, unless a better source has the same."""
        unit = (index.units if position is None else index.compute[position])[name]
        copy = Copy(source.version.rank, position, name, unit.version, unit.checksum)
        self.sources[copy].append(source)
        if copy in self.units:
            return
        self.units[copy] = unit
        for number, tensor in enumerate(unit.tensors):
            blocks = _blocks(index.parameters[tensor.parameter], tensor.key)
            for part in cut(Held(copy, number), blocks, tensor.start, tensor.end):
                self.parts[position, part.block.tensor][unit.version].append(part)


def _blocks(entry: ParameterEntry, kind: str) -> list[Block]:
    return blocks_of(entry.places or (), entry.shape, kind)


def fetch_relayout(plan: Plan, met: Met, readers: Readers, most_iteration: int | None) -> Fetched:
    """Read what this rank needs of a state that was written in another layout. Called by all ranks.

    Args:
        most_iteration: latest iteration of versions of units that only some snapshots hold; None for any.
    """
    own = plan.sources_of(met.site.rank)
    elsewhere = () if met.strategy.saves_all else plan.elsewhere.get(met.site.rank, ())
    others = (
        each
        for each in elsewhere
        if each not in own and (most_iteration is None or each.version.iteration <= most_iteration)
    )
    left = _look(own, others, readers)
    fetching = _Fetching(met, readers, left)
    lost = {each.version.rank for each in own} - left.indexes.keys()
    fetching.missing += [f"index of rank {rank} of the other layout" for rank in sorted(lost)]
    fetched = Fetched()
    if not lost:
        try:
            fetched = fetching.fetch_all(plan)
        except PlanError as error:
            fetching.missing.append(str(error))
    if not met.strategy.saves_all:
        fetched = replace(fetched, rotation=_agree_on_versions(fetched, fetching, met))
    return replace(fetched, missing=tuple(fetching.missing))


def _look(own: Sequence[Source], others: Iterable[Source], readers: Readers) -> _Left:
    """Return what can be read: of the state itself, and of other states single units at FULL."""
    left = _Left()
    newest: dict[str, tuple[int, int]] = {}
    for source in (*own, *others):
        reader = readers.open(source)
        if reader is None:
            continue
        index, version = reader.index, source.version
        if version.family == own[0].version.family:
            left.indexes.setdefault(version.rank, index)
            for position, units in enumerate(index.compute):
                for name in units:
                    left.add(source, index, position, name)
        for name in index.units:
            left.add(source, index, None, name)
        age = version.start.number, version.iteration
        for layer, gaps in index.progress.gaps.items() if index.progress else ():
            if newest.get(layer, (-1, -1)) < age:
                newest[layer], left.newest_gaps[layer] = age, gaps
    return left


def _agree_on_versions(fetched: Fetched, fetching: "_Fetching", met: Met) -> Rotation:
    """Return the versions of the stage's units that only some snapshots hold. Called by all ranks."""
    rotating = {str(unit) for unit in met.strategy.rotating}
    units = {name: each for name, each in fetched.units.items() if name in rotating}
    versions: dict[str, UnitVersion] = {}
    own = {name: (each.entry.version, version_of(each.entry)) for name, each in units.items()}
    agreed: dict[str, VersionNumber] = {}
    for found in met.ranks.stage.gather(own):
        for name, (number, version) in found.items():
            versions[name] = version
            if agreed.setdefault(name, number) != number:
                fetching.missing.append(f"{name} in one version on all ranks")
    return Rotation(units=units, versions=versions, gaps=fetching.left.newest_gaps)


class _Fetching:
    """Reads one rank's part of a state of another layout.

    Attributes:
        missing: what cannot be recovered.
        left: what there is.
    """

    def __init__(self, met: Met, readers: Readers, left: _Left) -> None:
        self._met, self._readers, self.left = met, readers, left
        self._contents: dict[Copy, tuple[Source, memoryview] | None] = {}
        self._flat: dict[Held, torch.Tensor] = {}
        self._used: dict[Copy, None] = {}
        self.missing: list[str] = []

    def fetch_all(self, plan: Plan) -> Fetched:
        """Read the units of a state, and make an index as if this rank had written them.

        Units that every window holds must be of the state's own iterations. The others keep their ages; one
        that was never saved has nothing: another layout begins with other weights.

        Raises:
            PlanError: if something that ranks had for themselves has no place here.
        """
        strategy, window = self._met.strategy, plan.version.window
        first = plan.iteration - window + 1
        if self._met.live.catalog.frozen_names:
            self.missing.append("frozen parameters, which are in no snapshot")
        full = self._fetch(
            strategy.always, Level.FULL, None, lambda version: first <= version[1] <= plan.iteration
        )
        full |= self._fetch(strategy.rotating, Level.FULL, None, lambda version: True)
        compute = []
        for position in range(window if window > 1 else 0):
            later = [each.unit for each in full.values() if each.entry.iteration > first + position]
            compute.append(self._fetch(later, Level.COMPUTE, position, lambda version: True))
        return Fetched(
            index=self._index(plan),
            units=full,
            compute=compute,
            stored_as=tuple(self.left.units[copy] for copy in self._used),
        )

    def _index(self, plan: Plan) -> Index:
        met, indexes = self._met, dict(sorted(self.left.indexes.items()))
        counted = [index.progress for index in indexes.values() if index.progress is not None]
        return msgspec.structs.replace(
            next(iter(indexes.values())),
            rank=met.site.rank,
            node=met.site.node,
            units={},
            compute=(),
            parameters={},
            records=tuple(
                make_record(indexes, met, position) for position in range(-plan.version.window, 0)
            ),
            progress=merge_progress(counted),
            model=met.live.model_places,
        )

    def _fetch(
        self, units: Iterable[UnitId], level: Level, position: Position, is_allowed: IsAllowed
    ) -> dict[str, FetchedUnit]:
        """Return this rank's part of units, each of one version."""
        found = {}
        for unit in sorted(units):
            tensors = self._met.live.catalog.tensors(unit, level)
            if tensors and (version := self._choose(unit, tensors, position, is_allowed)):
                found[str(unit)] = self._read(unit, level, tensors, position, version)
        return found

    def _choose(
        self,
        unit: UnitId,
        tensors: Sequence[TensorEntry],
        position: Position,
        is_allowed: IsAllowed,
    ) -> VersionNumber | None:
        """Return the newest version in which all of a unit is there; None, and say so, without any."""
        entries = self._entries_of(unit)
        wholes = {
            block.tensor: block
            for each in tensors
            for block in wholes_of(entries[each.parameter].places or (), each.key)
        }
        parts: dict[VersionNumber, list[Part]] = defaultdict(list)
        for tensor in wholes:
            for number, found in self.left.parts.get((position, tensor), {}).items():
                parts[number] += found
        version = choose_version(parts, [*wholes.values()], is_allowed)
        if not parts:
            self.missing.append(
                f"{unit}: nothing of it was saved. Start in the layout of that run until every expert was"
            )
        elif version is None:
            ages = sorted({iteration for _, iteration in parts})
            self.missing.append(f"whole {unit} in the other layout (iterations there: {ages})")
        return version

    def _entries_of(self, unit: UnitId) -> dict[str, ParameterEntry]:
        parameters = self._met.live.catalog.parameters_of(unit)
        return {local.name: local.entry for local in parameters}

    def _read(
        self,
        unit: UnitId,
        level: Level,
        tensors: Sequence[TensorEntry],
        position: Position,
        version: VersionNumber,
    ) -> FetchedUnit:
        """Return this rank's part of one version of a unit, put together."""
        self._contents.clear()  # hardly any other unit needs what was read for the one before
        self._flat.clear()
        placed = _placed(tensors)
        content = bytearray(placed[-1].offset + tensor_bytes(placed[-1]))
        sources, copies = [], []
        for number, moves in enumerate(self._plan(unit, placed, position, version)):
            for source, move in moves:
                held: Held = move.source.owner
                copies.append(held.copy)
                sources.append(self._copy(held, source, move, placed[number], content))
            are_absent = {self._entry(move.source.owner).is_absent for _, move in moves}
            if len(are_absent) != 1:
                self.missing.append(f"{placed[number].key} of {placed[number].parameter}")
            placed[number] = msgspec.structs.replace(placed[number], is_absent=are_absent == {True})
        saved = self.left.units[copies[0]]
        return FetchedUnit(
            unit=unit,
            source=sources[0],
            entry=UnitEntry(
                offset=0,
                num_bytes=len(content),
                iteration=version[1],
                level=level.value,
                checksum=checksum(memoryview(content)),
                tensors=tuple(placed),
                incarnation=version[0],
                routed_tokens=saved.routed_tokens,
                gaps=saved.gaps,
            ),
            content=memoryview(content),
            stays=False,
        )

    def _plan(
        self,
        unit: UnitId,
        tensors: Sequence[TensorEntry],
        position: Position,
        version: VersionNumber,
    ) -> list[Sequence[tuple[Source, Move]]]:
        """Return the moves to each tensor; note what does not come."""
        entries, rank = self._entries_of(unit), self._met.site.rank
        wanted = [
            part
            for number, each in enumerate(tensors)
            for part in cut(
                number, _blocks(entries[each.parameter], each.key), each.start, each.end
            )
        ]

        def copies_of(owner: Any) -> list[Source]:
            found = self.left.sources[owner.copy]
            first = rank % len(found)  # other ranks begin with others
            return [*found[first:], *found[:first]]

        plan = plan_transfer(
            (
                part
                for tensor in {each.block.tensor for each in wanted}
                for part in self.left.parts[position, tensor][version]
            ),
            wanted,
            copies_of,
            lambda source, _: _TIERS.index(source.tier),
            lambda owner: owner.copy.rank,
        )
        moves = [plan.moves.get(number, ()) for number in range(len(tensors))]
        for each, found in zip(tensors, moves, strict=True):
            if sum(move.num_elements for _, move in found) != each.end - each.start:
                self.missing.append(f"place of {each.parameter} in the model")
        return moves

    def _entry(self, held: Any) -> TensorEntry:
        entry: TensorEntry = self.left.units[held.copy].tensors[held.number]
        return entry

    def _copy(
        self, held: Held, source: Source, move: Move, entry: TensorEntry, content: bytearray
    ) -> Source:
        """Copy the elements of a move; return where they were read, as another place may have to do."""
        read = self._read_copy(held.copy, source)
        saved = self._entry(held)
        if read is None or saved.is_absent:
            return source
        if held not in self._flat:
            self._flat[held] = _unpacked(saved, read[1])
        target = torch.frombuffer(
            content, dtype=DTYPES[entry.dtype], count=entry.end - entry.start, offset=entry.offset
        )
        for ours, theirs in boxes_of(move, saved.start, entry.start):
            _view(target, theirs).copy_(_view(self._flat[held], ours))
        return read[0]

    def _read_copy(self, copy: Copy, best: Source) -> tuple[Source, memoryview] | None:
        """Return the verified bytes of a unit and where they are; None, and say so, if none are intact."""
        self._used[copy] = None
        if copy not in self._contents:
            others = [each for each in self.left.sources[copy] if each is not best]
            found = (self._read_from(each, copy) for each in (best, *others))
            self._contents[copy] = next((each for each in found if each is not None), None)
            if self._contents[copy] is None:
                self.missing.append(f"{copy.unit} of rank {copy.rank} of the other layout")
        return self._contents[copy]

    def _read_from(self, source: Source, copy: Copy) -> tuple[Source, memoryview] | None:
        reader = self._readers.open(source)
        assert reader is not None  # its index is known
        try:
            entry, content = read_unit(reader, copy.unit, copy.position)
            if (entry.version, entry.checksum) != (copy.version, copy.checksum):
                raise CorruptStateError(f"unit {copy.unit} is another version there")
            check_is_finite(copy.unit, entry, content)
        except Exception as error:  # whatever a back end raises, the next source may have it
            self._readers.say(source, error)
            return None
        return source, content


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
