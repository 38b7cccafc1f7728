"""Fifth phase of a start: a rank reads and verifies its part of the state that a plan names.

Reading changes nothing, so that all ranks can agree on what they have before any live state is overwritten.
recovery/left.py knows what there is, recovery/transfer.py reads single units, recovery/divided.py a state of
another layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec.msgpack import Decoder

from moe_ft.errors import CorruptStateError, PlanError
from moe_ft.format.entries import FROZEN
from moe_ft.format.index import Index
from moe_ft.format.records import Gaps
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.planning.recovery import Plan
from moe_ft.planning.relayout import VersionNumber
from moe_ft.planning.remains import place_of
from moe_ft.recovery.borders import read_borders
from moe_ft.recovery.fetched import Fetched, StageVersions, first_iteration
from moe_ft.recovery.left import Copy, Left, Position, version_of
from moe_ft.recovery.meet import Met
from moe_ft.recovery.readers import FetchedUnit, Readers
from moe_ft.recovery.transfer import OwnUnits, Transfer
from moe_ft.units import Level, UnitId

Units = dict[str, FetchedUnit]

ORIGIN: VersionNumber = (-1, -1)  # the weights that the run began with
_FROZEN_DIFFER = (
    "copy of the frozen parameters, which are in no snapshot: this start has begun with others (--load?), or "
    "in another layout"
)
_OFFERS = Decoder(
    tuple[
        dict[str, dict[VersionNumber, UnitVersion]], dict[str, tuple[VersionNumber, Sequence[Gaps]]]
    ]
)
_NOTHING = UnitVersion(iteration=-1, routed_tokens=0)


class Fetching:
    """One rank's reading of one candidate; all ranks fetch again without what turns out to be damaged.

    recovery/divided.py reads a state of another layout. Owned by the training thread.
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
        self._plan = plan
        self._met = met
        self._readers = readers
        self._origins = origins
        rank = met.site.rank
        self._sources = plan.sources_of(rank)
        others = () if met.strategy.rotation.is_empty else plan.elsewhere.get(rank, ())
        self._left = Left(readers, self._sources, others, most_iteration=most_iteration)
        self._transfer = self._look()

    def _look(self) -> Transfer:
        """Look at what this rank has left; at the state itself only as far as it is needed."""
        if not self._met.strategy.rotation.is_empty:
            self._left.look_at_all()
        return OwnUnits(self._left, self._met.live.catalog)

    def _find_index(self) -> tuple[Index | None, Sequence[str]]:
        """Return the index of this rank's state, or None and what it lacks.

        Raises:
            PlanError: if there is none that fits.
        """
        return self._left.first_index(), ()

    def leave_out(self, lost: Iterable[Copy]) -> bool:
        """Do without copies that some rank could not read; return whether any of them is new.

        All ranks must leave out the same ones.
        """
        before = len(self._left.lost)
        self._left.lost.update(lost)
        return len(self._left.lost) > before

    def fetch(self) -> Fetched:
        """Read and verify what this rank needs. Called by all ranks."""
        fetched = self._fetch_state()
        if not self._met.strategy.rotation.is_empty:
            fetched = self._with_rotation(fetched)
        return replace(
            fetched,
            lost=self._left.unreadable,
            needed_bytes=self._transfer.needed_bytes,
            read_bytes=dict(self._transfer.read_bytes),
        )

    def _fetch_state(self) -> Fetched:
        """Read the units that each snapshot holds, and what answers to a replay by some stages alone."""
        strategy = self._met.strategy
        try:
            index, lacking = self._find_index()
            if index is None:
                fetched = Fetched(missing=tuple(lacking))
            else:
                fetched = read_window(self._left, self._transfer, index, strategy.always)
        except PlanError as error:
            fetched = Fetched(missing=(str(error),))
        missing = list(fetched.missing)
        is_damaged = fetched.index is None or bool(missing)
        places = [place_of(each.version) for each in self._sources if is_damaged]
        if fetched.index is not None:
            if fetched.index.origins.get(FROZEN) != self._origins.get(FROZEN):
                missing.append(_FROZEN_DIFFER)
            if fetched.compute and not strategy.rotation.is_empty:
                missing.append("snapshot with all units: it is a window of several snapshots")
        borders, lost = read_borders(self._plan, self._met, self._readers)
        missing += lost.values()
        places += lost
        return replace(
            fetched, borders=borders, missing=tuple(missing), unreadable=frozenset(places)
        )

    def _with_rotation(self, fetched: Fetched) -> Fetched:
        """Add the units that only some snapshots hold. Called by all ranks of a stage."""
        units = sorted(self._met.strategy.rotation.units)
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
                missing.append(self._transfer.why_missing(unit))
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
            rotation=StageVersions(
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
        if (name, self._origins.get(name)) in left.origins:
            found[ORIGIN] = _NOTHING
        return found


def read_window(left: Left, transfer: Transfer, index: Index, units: Iterable[UnitId]) -> Fetched:
    """Read and verify the units of a window that a rank saved something of, or has something of now."""
    first = first_iteration(index)
    full: Units = {}
    compute: list[Units] = [{} for _ in range(index.window)] if index.window > 1 else []
    missing: list[str] = []
    for unit in filter(transfer.is_wanted, sorted(units)):
        window = range(first, index.iteration + 1)
        found = _read_unit(left, transfer, unit, None, window)
        if isinstance(found, str):
            missing.append(found)
            continue
        full[str(unit)] = found
        for position in range(found.entry.iteration - first if compute else 0):
            at = first + position
            weights = _read_unit(left, transfer, unit, position, range(at, at + 1))
            if isinstance(weights, str):
                missing.append(f"weights of {weights} at iteration {at}")
            else:
                compute[position][str(unit)] = weights
    return Fetched(
        index=index,
        units=full,
        compute=compute,
        missing=tuple(missing),
        stored_as=transfer.stored_as,
    )


def _read_unit(
    left: Left, transfer: Transfer, unit: UnitId, position: Position, iterations: range
) -> FetchedUnit | str:
    """Return a unit in a version of some iterations, or the name of what is missing."""
    level = Level.FULL if position is None else Level.COMPUTE
    while True:
        problem = ""
        for version in transfer.versions(unit, level, position):
            if version[1] in iterations:
                try:
                    return transfer.read(unit, level, position, version)
                except CorruptStateError as error:
                    problem = str(error)
        # Further sources are of the same state, or of whole states that are the same.
        if not left.look_further():
            return problem or transfer.why_missing(unit)


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
