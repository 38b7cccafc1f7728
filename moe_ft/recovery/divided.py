"""State of another layout, divided again: a rank reads what it needs of all ranks that were.

The result looks as if this rank had written it, so that all later phases stay as they are. Tensors are
compared by their places in the model. recovery/overview.py finds the ranks that have something of them.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, override

import msgspec
from msgspec.msgpack import Decoder

from moe_ft.errors import CorruptStateError
from moe_ft.format.entries import FROZEN, ParameterEntry, TensorEntry
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Plan, Source
from moe_ft.planning.relayout import (
    VersionNumber,
    blocks_of,
    complete_versions,
    merge_progress,
    wholes_of,
)
from moe_ft.planning.transfer import Move, Part, cut, plan_transfer
from moe_ft.recovery.fetch import Fetching
from moe_ft.recovery.left import Copy, Left, Position
from moe_ft.recovery.meet import Met
from moe_ft.recovery.new_record import make_record
from moe_ft.recovery.overview import Overview, in_order, look_at_share, merge, number_of
from moe_ft.recovery.readers import Readers
from moe_ft.recovery.transfer import SavedTensor, Transfer, UnitPlan, cuts
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import Level, UnitId

_OVERVIEW = Decoder(Overview)


class DividedUnits(Transfer):
    """Units of another layout, each made of what any of its ranks has saved. Owned by the training thread."""

    def __init__(self, left: Left, catalog: UnitCatalog, rank: int) -> None:
        super().__init__(left, catalog)
        self._rank = rank

    def numbers_of(self, units: Iterable[UnitId]) -> set[int]:
        """Return the numbers of the model's tensors that this rank has something of."""
        levels = (Level.FULL, Level.COMPUTE)
        needed = (part for unit in units for level in levels for part in self._needed(unit, level))
        return {number_of(part.block.tensor) for part in needed}

    @override
    def is_wanted(self, unit: UnitId) -> bool:
        return bool(self._needed(unit, Level.FULL))

    @override
    def versions(self, unit: UnitId, level: Level, position: Position) -> list[VersionNumber]:
        wanted = self._needed(unit, level)
        parts = self._parts_of(position, {each.block.tensor for each in wanted})
        return complete_versions(parts, wanted)

    @override
    def plan(
        self, unit: UnitId, level: Level, position: Position, version: VersionNumber
    ) -> UnitPlan:
        tensors = self._catalog.tensors(unit, level)
        entries = self._entries_of(unit)
        wanted = [
            part
            for number, each in enumerate(tensors)
            for part in _cut_tensor(number, entries[each.parameter], each)
        ]
        have = self._parts_of(position, {each.block.tensor for each in wanted})[version]

        def copies_of(owner: Any) -> list[Source]:
            found = self._left.readable(owner.copy)
            first = self._rank % len(found)  # other ranks begin with other sources
            return [*found[first:], *found[:first]]

        plan = plan_transfer(
            (part for part in have if self._left.readable(part.owner.copy)),
            wanted,
            copies_of,
            lambda source, _: source.tier.preference,
            lambda owner: owner.copy.rank,
        )
        found = [plan.moves.get(number, ()) for number in range(len(tensors))]
        for each, arriving in zip(tensors, found, strict=True):
            if sum(move.num_elements for _, move in arriving) != each.end - each.start:
                raise CorruptStateError(self._lack(unit, each, have if plan.missing else ()))
        sources: dict[Copy, Source] = {}
        for source, move in (each for arriving in found for each in arriving):
            sources.setdefault(move.source.owner.copy, source)
        if not sources:
            raise CorruptStateError(str(unit))
        moves = [[move for _, move in arriving] for arriving in found]
        saved = self._left.units[next(iter(sources))]
        if len(sources) == 1 and _is_same(tensors, saved.tensors, moves):
            return UnitPlan(sources=sources)
        return UnitPlan(sources=sources, tensors=tensors, moves=moves)

    def _lack(self, unit: UnitId, tensor: TensorEntry, have: Iterable[Part]) -> str:
        """Return what is missing of a tensor, of which there are parts that may be unreadable."""
        copies = {part.owner.copy for part in have}
        if ranks := sorted({copy.rank for copy in copies if not self._left.readable(copy)}):
            return f"{unit} of rank {', '.join(map(str, ranks))} of the other layout"
        return f"place of {tensor.parameter} in the model"

    @override
    def why_missing(self, unit: UnitId) -> str:
        tensors = {each.block.tensor for each in self._needed(unit, Level.FULL)}
        if ages := sorted({iteration for _, iteration in self._parts_of(None, tensors)}):
            return f"whole {unit} in the other layout (iterations there: {ages})"
        return f"{unit}: nothing of it was saved. Start in the layout of that run until every expert was"

    @cached_property
    def _parts(self) -> Mapping[tuple[Position, object], Mapping[VersionNumber, Sequence[Part]]]:
        """Parts of each tensor of the model that are there, by its position and version."""
        found: dict[tuple[Position, object], dict[VersionNumber, list[Part]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for copy, unit in self._left.units.items():
            parameters = self._left.parameters[copy]
            for number, tensor in enumerate(unit.tensors):
                for part in _cut_tensor(
                    SavedTensor(copy, number), parameters[tensor.parameter], tensor
                ):
                    found[copy.position, part.block.tensor][unit.version].append(part)
        return found

    def _parts_of(
        self, position: Position, tensors: Collection[object]
    ) -> dict[VersionNumber, list[Part]]:
        """Return what there is of tensors by version, without what ranks could not read."""
        found: dict[VersionNumber, list[Part]] = defaultdict(list)
        for tensor in tensors:
            for version, parts in self._parts.get((position, tensor), {}).items():
                found[version] += (each for each in parts if each.owner.copy not in self._left.lost)
        return found

    def _entries_of(self, unit: UnitId) -> dict[str, ParameterEntry]:
        return {local.name: local.entry for local in self._catalog.parameters_of(unit)}

    def _needed(self, unit: UnitId, level: Level) -> list[Part]:
        """Return what must be there of a unit: all of it, as ranks take one version."""
        entries = self._entries_of(unit)
        wholes = {
            block.tensor: block
            for each in self._catalog.tensors(unit, level)
            for block in wholes_of(entries[each.parameter].places or (), each.key)
        }
        return [Part(None, block, 0, prod(block.extent)) for block in wholes.values()]


def _cut_tensor(owner: Any, entry: ParameterEntry, tensor: TensorEntry) -> Iterable[Part]:
    """Return the parts of the model's tensors that a rank's tensor is."""
    blocks = blocks_of(entry.places or (), entry.shape, tensor.key)
    return cut(owner, blocks, tensor.start, tensor.end)


def _is_same(
    wanted: Sequence[TensorEntry], saved: Sequence[TensorEntry], moves: Sequence[Sequence[Move]]
) -> bool:
    """Return whether what one source has saved is what is wanted, element by element."""
    return cuts(wanted) == cuts(saved) and all(
        (move.source.block.start, move.source.block.local_shape)
        == (move.target.block.start, move.target.block.local_shape)
        for arriving in moves
        for move in arriving
    )


class DividedFetching(Fetching):
    """One rank's reading of a candidate of another layout. Owned by the training thread."""

    def __init__(
        self,
        plan: Plan,
        met: Met,
        readers: Readers,
        origins: Mapping[str, str],
        most_iteration: int | None,
    ) -> None:
        # Another layout has begun with other weights; frozen ones are in no snapshot.
        frozen = {name: each for name, each in origins.items() if name == FROZEN}
        super().__init__(plan, met, readers, frozen, most_iteration)

    @override
    def _look(self) -> DividedUnits:
        """Look together at all there is, and each rank at what it needs."""
        met, left = self._met, self._left
        units = DividedUnits(left, met.live.catalog, met.site.rank)
        sources = in_order(left.sources_to_open)
        share = look_at_share(
            sources, self._sources, self._readers, met.site.topology, met.site.rank
        )
        found = met.ranks.everyone.fold(share, merge, _OVERVIEW)
        needed = units.numbers_of([*met.strategy.always, *met.strategy.rotation.units])
        left.look_at({sources[place] for place in found.places_of(needed)})
        left.indexes, left.newest_gaps = found.indexes(), found.gaps
        self._ranks_there = found.ranks
        return units

    @override
    def _find_index(self) -> tuple[Index | None, Sequence[str]]:
        """Make an index as if this rank had written the state, without units.

        Raises:
            PlanError: if something that ranks had for themselves has no place here.
        """
        lost = {each.version.rank for each in self._sources} - self._ranks_there
        if lost:
            return None, [f"index of rank {rank} of the other layout" for rank in sorted(lost)]
        met, indexes = self._met, self._left.indexes
        counted = [index.progress for index in indexes.values() if index.progress is not None]
        window = self._plan.version.window
        index = msgspec.structs.replace(
            next(iter(indexes.values())),
            rank=met.site.rank,
            node=met.site.node,
            units={},
            compute=(),
            parameters={},
            records=tuple(make_record(indexes, met, position) for position in range(-window, 0)),
            progress=merge_progress(counted),
            model=met.live.model_places,
        )
        return index, ()
