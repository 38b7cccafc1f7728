"""Chooses and reads versions of units that only some snapshots hold.

Several ranks may save parts of one unit. They all have to put back the same version: the newest one that
each of them has intact somewhere. A unit that was never saved, or of which nothing is left, keeps the weights
that the run began with, if this start has begun with the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_ft.format.files import Index, UnitEntry
from moe_ft.planning.lost_tokens import Gaps
from moe_ft.planning.recovery import Source
from moe_ft.planning.token_ledger import UnitVersion
from moe_ft.recovery.restore import FetchedState, Readers, fetch_unit
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import UnitId

Version = tuple[int, int]  # incarnation, iteration
Gather = Callable[[Any], list[Any]]  # of the ranks of the stage

ORIGIN: Version = (-1, -1)


@dataclass(kw_only=True, slots=True)
class RotatingState:
    """The versions that the experts of a stage get.

    Attributes:
        versions: by unit name, of the whole stage; units that keep the weights that the run began with are
            left out.
        kept: names of those, of the whole stage.
        missing: this rank's units that cannot be recovered.
        gaps: ``[expert]`` by layer name, of the newest state that anything was found of: what recoveries
            before this one have lost.
    """

    versions: dict[str, UnitVersion] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    gaps: Mapping[str, Sequence[Gaps]] = field(default_factory=dict)


def fetch_rotating(
    sources: Sequence[Source],
    units: Sequence[UnitId],
    catalog: UnitCatalog,
    readers: Readers,
    origins: Mapping[str, str],
    gather: Gather,
    most_iteration: int | None,
    fetched: FetchedState,
) -> RotatingState:
    """Agree on a version of each unit and read it. Called by all ranks of a stage.

    Args:
        sources: all that the run has left of this rank, best first.
        units: this rank's that only some snapshots hold and of which it saves something.
        catalog: of this rank.
        readers: open the sources.
        origins: checksums of the weights that this start has begun with.
        gather: exchanges values within the stage.
        most_iteration: of the snapshots that may be used, None for any.
        fetched: what is read is added here.
    """
    offers = _find_offers(sources, units, readers, origins, most_iteration)
    read: dict[str, Version] = {}
    failed = True
    while failed:
        everyone = gather({name: _tokens(found) for name, found in offers.items()})
        best = _best_common(everyone)
        has_failed = False
        for unit in units:
            version = best.get(str(unit), ORIGIN)
            if version == ORIGIN or read.get(str(unit)) == version:
                continue
            if _read(unit, offers[str(unit)][version], version, catalog, readers, fetched):
                read[str(unit)] = version
            else:
                del offers[str(unit)][version]
                has_failed = True
        failed = any(gather(has_failed))
    state = RotatingState(
        versions={
            name: next(each[name][version] for each in everyone if name in each)
            for name, version in best.items()
            if version != ORIGIN
        },
        kept={name for name, version in best.items() if version == ORIGIN},
        gaps=_newest_gaps(sources, readers, gather),
    )
    for unit in units:
        newest = best.get(str(unit))
        if newest is None:
            state.missing.append(str(unit))
        elif newest == ORIGIN:
            fetched.units.pop(str(unit), None)  # another rank did not have what was read at first
    return state


def _newest_gaps(
    sources: Sequence[Source], readers: Readers, gather: Gather
) -> Mapping[str, Sequence[Gaps]]:
    """Return the gaps of the newest state that a rank of the stage has found."""
    newest: tuple[Version, Index | None] = (ORIGIN, None)
    for source in sources:
        reader = readers.open(source)
        version = (source.version.start.number, source.version.iteration)
        if reader is not None and reader.index.progress is not None and version > newest[0]:
            newest = (version, reader.index)
    versions = gather(newest[0])
    is_it = newest[0] == max(versions) and newest[1] is not None
    progress = newest[1].progress if is_it and newest[1] is not None else None
    found = [each for each in gather(progress.gaps if progress else None) if each is not None]
    return found[0] if found else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Offer:
    """A source that has a version."""

    source: Source
    version: UnitVersion


_Offers = dict[str, dict[Version, list[_Offer]]]


def _find_offers(
    sources: Sequence[Source],
    units: Sequence[UnitId],
    readers: Readers,
    origins: Mapping[str, str],
    most_iteration: int | None,
) -> _Offers:
    """Return by unit name the versions that there are, and the sources of each, best first."""
    offers: _Offers = {str(unit): {} for unit in units}
    for source in sources if units else ():
        reader = readers.open(source)
        if reader is None:
            continue
        for name, found in offers.items():
            entry = reader.index.units.get(name)
            is_meant = most_iteration is None or source.version.iteration <= most_iteration
            if entry is not None and is_meant:
                offer = _Offer(source=source, version=_version_of(entry))
                found.setdefault(entry.version, []).append(offer)
            if name in origins and reader.index.origins.get(name) == origins[name]:
                found.setdefault(ORIGIN, [])
    return offers


def _tokens(found: Mapping[Version, Sequence[_Offer]]) -> dict[Version, UnitVersion]:
    nothing = UnitVersion(iteration=-1, routed_tokens=0)
    return {version: offers[0].version if offers else nothing for version, offers in found.items()}


def _best_common(everyone: Sequence[Mapping[str, Mapping[Version, Any]]]) -> dict[str, Version]:
    """Return by unit name the newest version that all ranks have that save a part of the unit."""
    common: dict[str, set[Version]] = {}
    for found in everyone:
        for name, versions in found.items():
            common[name] = common[name] & set(versions) if name in common else set(versions)
    return {name: max(versions) for name, versions in common.items() if versions}


def _read(
    unit: UnitId,
    offers: Sequence[_Offer],
    version: Version,
    catalog: UnitCatalog,
    readers: Readers,
    fetched: FetchedState,
) -> bool:
    """Read a version from the first source that has it intact; return whether there was one."""
    for offer in offers:
        found = fetch_unit(offer.source, unit, catalog, readers, version)
        if found is not None:
            fetched.add(found)
            return True
    return False


def versions_in(index: Index | None, units: Sequence[UnitId]) -> dict[str, UnitVersion]:
    """Return the versions of units that an index names."""
    if index is None:
        return {}
    found = {str(unit): index.units.get(str(unit)) for unit in units}
    return {name: _version_of(entry) for name, entry in found.items() if entry is not None}


def _version_of(entry: UnitEntry) -> UnitVersion:
    return UnitVersion(
        iteration=entry.iteration, routed_tokens=entry.routed_tokens, gaps=entry.gaps
    )
