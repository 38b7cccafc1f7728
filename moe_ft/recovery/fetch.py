"""Fifth phase of a start: a rank reads and verifies its part of the state that a plan names.

Reading changes nothing, so that all ranks can agree on what they have before any live state is overwritten.
A state of another layout is divided again: what is read looks as if this rank had written it, so that all
later phases stay as they are. recovery/left.py knows what there is, recovery/transfer.py reads single units.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec.msgpack import Decoder

from moe_ft.engine.links.peers import PeerConnection
from moe_ft.errors import CorruptStateError, PlanError
from moe_ft.format.entries import FROZEN
from moe_ft.format.index import Index
from moe_ft.format.records import Gaps
from moe_ft.planning.local_recovery import LocalPlan
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.planning.recovery import Plan, Source, Tier
from moe_ft.planning.relayout import VersionNumber, merge_progress
from moe_ft.planning.remains import place_of
from moe_ft.recovery.borders import read_borders
from moe_ft.recovery.claim import Claimed
from moe_ft.recovery.fetched import Fetched, Rotation, first_iteration
from moe_ft.recovery.left import Copy, Left, Position, model_blocks, own_blocks, version_of
from moe_ft.recovery.meet import Met
from moe_ft.recovery.new_record import make_record
from moe_ft.recovery.overview import Overview, in_order, look_at_share, merge
from moe_ft.recovery.readers import (
    FetchedUnit,
    MemoryReader,
    PeerReader,
    Readers,
    StateReader,
    StorageReader,
)
from moe_ft.recovery.transfer import Transfer
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import Level, UnitId

Units = dict[str, FetchedUnit]

ORIGIN: VersionNumber = (-1, -1)  # the weights that the run began with
_OVERVIEW = Decoder(Overview)
_OFFERS = Decoder(
    tuple[
        dict[str, dict[VersionNumber, UnitVersion]], dict[str, tuple[VersionNumber, Sequence[Gaps]]]
    ]
)
_NOTHING = UnitVersion(iteration=-1, routed_tokens=0)


def open_readers(met: Met, claimed: Claimed) -> Readers:
    """Return readers of this rank's sources; each source is opened when it is first read."""

    def open_source(source: Source) -> StateReader:
        version = source.version
        if source.tier is Tier.MEMORY:
            pool = [claimed.memory.pool] if claimed.memory.pool is not None else []
            return MemoryReader(met.site.node_dir / version.path, [*claimed.memory.regions, *pool])
        if source.tier is Tier.STORAGE:
            assert claimed.storage is not None
            return StorageReader.open(claimed.storage, version)
        assert version.node is not None
        address = met.site.topology.lowest_on_node(version.node).address
        assert address is not None
        connection = PeerConnection(address, met.token, met.config.memory.streams)
        return PeerReader(connection, version)

    return Readers(open_source)


def fetch_window(
    sources: Sequence[Source], units: Iterable[UnitId], catalog: UnitCatalog, readers: Readers
) -> Fetched:
    """Read and verify what one rank saved of units in one window; its sources come best first."""
    left = Left(readers, sources)
    transfer = Transfer(left, catalog, sources[0].version.rank, is_other_layout=False)
    return _fetch_window(left, transfer, units)


def _fetch_window(left: Left, transfer: Transfer, units: Iterable[UnitId]) -> Fetched:
    while not left.indexes and left.look_further():
        pass
    index = next(iter(left.indexes.values()), None)
    return Fetched() if index is None else _Window(left, transfer, index).fetch(units)


class Fetching:
    """One rank's reading of one candidate; all ranks fetch again without what turns out to be damaged.

    Owned by the training thread.
    """

    def __init__(
        self,
        plan: Plan,
        met: Met,
        readers: Readers,
        origins: Mapping[str, str],
        most_iteration: int | None,
    ) -> None:
        """Look at what there is. Called by all ranks.

        Args:
            most_iteration: latest iteration of versions of units that only some snapshots hold; None for any.
        """
        self._plan, self._met, self._readers, self._origins = plan, met, readers, origins
        rank, is_other = met.site.rank, plan.is_other_layout
        self._sources = plan.sources_of(rank)
        self._left = Left(
            readers,
            self._sources,
            () if met.strategy.saves_all else plan.elsewhere.get(rank, ()),
            blocks=model_blocks if is_other else own_blocks,
            most_iteration=most_iteration,
        )
        self._transfer = Transfer(self._left, met.live.catalog, rank, is_other_layout=is_other)
        self._ranks_there: set[int] = set()  # of another layout, whose state can be read
        if is_other:
            self._look_together()
        elif not met.strategy.saves_all:
            self._left.look_at_all()

    def _look_together(self) -> None:
        """Look at the state of another layout: all ranks together at all, this rank at what it needs."""
        met, left = self._met, self._left
        sources = in_order(left.sources_to_open)
        share = look_at_share(
            sources, self._sources, self._readers, met.site.topology, met.site.rank
        )
        found = met.ranks.everyone.fold(share, merge, _OVERVIEW)
        needed = self._transfer.numbers_of([*met.strategy.always, *met.strategy.rotating])
        left.look_at({sources[place] for place in found.places_of(needed)})
        left.indexes, left.newest_gaps = found.indexes(), found.gaps
        self._ranks_there = found.ranks

    def leave_out(self, lost: Iterable[Copy]) -> bool:
        """Do without copies that some rank could not read; return whether any of them is new.

        All ranks must leave out the same ones.
        """
        before = len(self._left.lost)
        self._left.lost.update(lost)
        return len(self._left.lost) > before

    def fetch(self) -> Fetched:
        """Read and verify what this rank needs. Called by all ranks."""
        strategy = self._met.strategy
        fetched = self._fetch_moved() if self._plan.is_other_layout else self._fetch_own()
        if not strategy.saves_all:
            fetched = self._with_rotation(fetched)
        if self._plan.is_other_layout or not strategy.saves_all:
            fetched = replace(fetched, lost=self._left.unreadable)
        return replace(
            fetched,
            needed_bytes=self._transfer.needed_bytes,
            read_bytes=dict(self._transfer.read_bytes),
        )

    def _fetch_own(self) -> Fetched:
        met, strategy = self._met, self._met.strategy
        fetched = _fetch_window(self._left, self._transfer, strategy.always)
        missing = list(fetched.missing)
        is_damaged = fetched.index is None or bool(missing)
        if fetched.index is not None and fetched.index.origins.get(FROZEN) != self._origins.get(
            FROZEN
        ):
            missing.append(
                "copy of the frozen parameters: this start has begun with others (--load?)"
            )
        if not strategy.saves_all:
            if fetched.compute:
                missing.append("snapshot with all units: it is a window of several snapshots")
            return replace(fetched, missing=tuple(missing))
        borders, lacking = (
            read_borders(self._plan, met, self._readers)
            if isinstance(self._plan, LocalPlan)
            else (None, {})
        )
        places = (place_of(each.version) for each in self._sources if is_damaged)
        return replace(
            fetched,
            borders=borders,
            missing=(*missing, *lacking.values()),
            unreadable=frozenset((*lacking, *places)),
        )

    def _fetch_moved(self) -> Fetched:
        """Read the state of another layout, and make an index as if this rank had written it.

        A unit that was never saved has nothing: another layout begins with other weights.
        """
        met, plan, left = self._met, self._plan, self._left
        lost = {each.version.rank for each in self._sources} - self._ranks_there
        if lost:
            names = tuple(f"index of rank {rank} of the other layout" for rank in sorted(lost))
            return Fetched(missing=names)
        try:
            index = _moved_index(left.indexes, plan, met)
            window = _Window(left, self._transfer, index, is_other_layout=True)
            fetched = window.fetch(met.strategy.always)
        except PlanError as error:
            return Fetched(missing=(str(error),))
        if met.live.catalog.frozen_names:
            frozen = "frozen parameters, which are in no snapshot"
            fetched = replace(fetched, missing=(frozen, *fetched.missing))
        return fetched

    def _with_rotation(self, fetched: Fetched) -> Fetched:
        """Add the units that only some snapshots hold. Called by all ranks of a stage."""
        units = sorted(self._met.strategy.rotating)
        own = {str(unit): self._offers(unit) for unit in units}
        everyone = self._met.ranks.stage.gather((own, self._left.newest_gaps), _OFFERS)
        wanted = self._plan.start.number, self._plan.iteration
        best = best_common([offers for offers, _ in everyone], wanted)
        gaps: dict[str, tuple[VersionNumber, Sequence[Gaps]]] = {}
        for layer, found in (item for _, each in everyone for item in each.items()):
            gaps[layer] = max(gaps.get(layer, found), found, key=lambda each: each[0])
        read, missing = dict(fetched.units), list(fetched.missing)
        for unit in units:
            version = best.get(str(unit))
            if version is None:
                missing.append(self._why_missing(unit))
            elif version != ORIGIN:
                try:
                    read[str(unit)] = self._transfer.read(unit, Level.FULL, None, version)
                except CorruptStateError as error:
                    missing.append(str(error))
        return replace(
            fetched,
            units=read,
            missing=tuple(missing),
            stored_as=self._transfer.stored_as,
            rotation=Rotation(
                versions={
                    name: next(each[name][version] for each, _ in everyone if name in each)
                    for name, version in best.items()
                    if version != ORIGIN
                },
                kept=frozenset(name for name, version in best.items() if version == ORIGIN),
                gaps={layer: found for layer, (_, found) in gaps.items()},
            ),
        )

    def _offers(self, unit: UnitId) -> dict[VersionNumber, UnitVersion]:
        """Return the versions of a unit that this rank has."""
        left, name = self._left, str(unit)
        entries = {copy.version: left.units[copy] for copy in left.copies.get((None, name), ())}
        try:
            versions = self._transfer.versions(unit, Level.FULL, None)
        except PlanError:  # reading it says why
            versions = []
        found = {version: version_of(entries[version]) for version in versions}
        if not self._plan.is_other_layout and (name, self._origins.get(name)) in left.origins:
            found[ORIGIN] = _NOTHING
        return found

    def _why_missing(self, unit: UnitId) -> str:
        return (
            str(unit)
            if not self._plan.is_other_layout
            else _why_moved_is_missing(self._transfer, unit)
        )


class _Window:
    """Units of one window, as one rank reads them."""

    def __init__(
        self, left: Left, transfer: Transfer, index: Index, *, is_other_layout: bool = False
    ) -> None:
        self._left, self._transfer, self._index = left, transfer, index
        self._is_other_layout = is_other_layout
        self._missing: list[str] = []

    def fetch(self, units: Iterable[UnitId]) -> Fetched:
        """Read and verify the units that this rank saved something of, or has something of now."""
        index, first = self._index, first_iteration(self._index)
        full: Units = {}
        compute: list[Units] = [{} for _ in range(index.window)] if index.window > 1 else []
        for unit in filter(self._transfer.is_wanted, sorted(units)):
            found = self._read(unit, Level.FULL, None, range(first, index.iteration + 1))
            if found is None:
                continue
            full[str(unit)] = found
            for position in range(found.entry.iteration - first if compute else 0):
                at = range(first + position, first + position + 1)
                weights = self._read(unit, Level.COMPUTE, position, at)
                if weights is not None:
                    compute[position][str(unit)] = weights
        return Fetched(
            index=index,
            units=full,
            compute=compute,
            missing=tuple(self._missing),
            stored_as=self._transfer.stored_as,
        )

    def _read(
        self, unit: UnitId, level: Level, position: Position, iterations: range
    ) -> FetchedUnit | None:
        """Return a unit in a version of some iterations; None, and say so, if there is none.

        In the same layout this rank may look at further sources, and at a state of another start: such whole
        states are the same. Of another layout all ranks must take the same version, which agree.py sees to.
        """
        tried = set[VersionNumber]()
        while True:
            versions = self._transfer.versions(unit, level, position)
            left = [each for each in versions if each[1] in iterations and each not in tried]
            if not self._is_other_layout:
                copies = self._left.copies[position, str(unit)]
                order = [copy.version for copy in copies]
                left.sort(key=order.index)
            for version in left:
                try:
                    return self._transfer.read(unit, level, position, version)
                except CorruptStateError as error:
                    tried.add(version)
                    if self._is_other_layout:
                        self._missing.append(str(error))
                        return None
            if not self._left.look_further():
                self._missing.append(self._name(unit, position))
                return None
            tried.clear()

    def _name(self, unit: UnitId, position: Position) -> str:
        if self._is_other_layout:
            return _why_moved_is_missing(self._transfer, unit)
        if position is None:
            return str(unit)
        return f"weights of {unit} at iteration {first_iteration(self._index) + position}"


def _why_moved_is_missing(transfer: Transfer, unit: UnitId) -> str:
    if ages := transfer.iterations(unit):
        return f"whole {unit} in the other layout (iterations there: {ages})"
    return (
        f"{unit}: nothing of it was saved. Start in the layout of that run until every expert was"
    )


def _moved_index(indexes: Mapping[int, Index], plan: Plan, met: Met) -> Index:
    """Return the index of this rank that a state of another layout would have, without units.

    Raises:
        PlanError: if something that ranks had for themselves has no place here.
    """
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


def best_common(
    everyone: Sequence[Mapping[str, Mapping[VersionNumber, Any]]], wanted: VersionNumber
) -> dict[str, VersionNumber]:
    """Return by unit name the best version that all ranks have that save a part of the unit.

    That is the version of the iteration that is recovered, else the newest. One from beyond that iteration
    loses nothing, but is trained with some tokens again.
    """
    common: dict[str, set[VersionNumber]] = {}
    for found in everyone:
        for name, versions in found.items():
            common[name] = common[name] & set(versions) if name in common else set(versions)
    return {
        name: wanted if wanted in versions else max(versions)
        for name, versions in common.items()
        if versions
    }


def versions_in(index: Index | None, units: Sequence[UnitId]) -> dict[str, UnitVersion]:
    """Return the versions of units that an index names."""
    if index is None:
        return {}
    found = {str(unit): index.units.get(str(unit)) for unit in units}
    return {name: version_of(entry) for name, entry in found.items() if entry is not None}
