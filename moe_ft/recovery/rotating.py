"""Versions of the units that only some snapshots hold: agreed on by all ranks of a stage, then read.

Several ranks may save parts of one unit. All of them must put back the same version: that of the recovered
iteration, and where one of them lacks it, the newest that each of them has intact somewhere. A version from
beyond that iteration loses nothing, but is trained with some tokens again. A unit that was never saved, or of
which nothing is left, keeps the weights that the run began with, if this start has begun with the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.format.records import Gaps
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.planning.recovery import Source
from moe_ft.recovery.readers import FetchedUnit, Readers, fetch_unit
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import UnitId

Version = tuple[int, int]  # incarnation, iteration
Gather = Callable[[Any], list[Any]]  # of the ranks of the stage

ORIGIN: Version = (-1, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """Versions of the units that only some snapshots hold.

    Attributes:
        versions: versions that the units of the whole stage get, by name; a unit that keeps the weights that
            the run began with is left out.
        kept: names of the units that keep these weights, of the whole stage.
        missing: this rank's units that cannot be recovered.
        gaps: ``[expert]`` by layer name, the tokens that recoveries before this one have lost: gaps of the
            newest state that anything was found of.
    """

    units: Mapping[str, FetchedUnit] = field(default_factory=dict)
    versions: Mapping[str, UnitVersion] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    gaps: Mapping[str, Sequence[Gaps]] = field(default_factory=dict)


NO_ROTATION = Rotation()


def fetch_rotating(
    sources: Sequence[Source],
    units: Sequence[UnitId],
    catalog: UnitCatalog,
    readers: Readers,
    origins: Mapping[str, str],
    gather: Gather,
    wanted: Version,
    most_iteration: int | None,
) -> Rotation:
    """Agree on a version of each unit and read it. Called by all ranks of a stage.

    Args:
        sources: everything that the run has left of this rank, best first.
        wanted: version of the units that were saved with the state that is recovered.
        most_iteration: latest iteration of snapshots that may be used; None for any.
    """
    offers = _find_offers(sources, units, readers, origins, most_iteration)
    read: dict[str, FetchedUnit] = {}
    has_failed = True
    while has_failed:
        everyone = gather({name: _tokens(found) for name, found in offers.items()})
        best = _best_common(everyone, wanted)
        has_failed = any(gather(_read_best(units, best, offers, catalog, readers, read)))
    newest = {str(unit): best.get(str(unit)) for unit in units}
    return Rotation(
        # A version that was read is dropped if another rank turned out to lack it.
        units={name: found for name, found in read.items() if newest[name] != ORIGIN},
        versions={
            name: next(each[name][version] for each in everyone if name in each)
            for name, version in best.items()
            if version != ORIGIN
        },
        kept=frozenset(name for name, version in best.items() if version == ORIGIN),
        missing=tuple(name for name, version in newest.items() if version is None),
        gaps=_newest_gaps(sources, readers, gather),
    )


def _read_best(
    units: Sequence[UnitId],
    best: Mapping[str, Version],
    offers: "_Offers",
    catalog: UnitCatalog,
    readers: Readers,
    read: dict[str, FetchedUnit],
) -> bool:
    """Read the best versions that are not read yet; return whether one of them was not intact.

    Such a version is no longer offered.
    """
    has_failed = False
    for unit in units:
        name = str(unit)
        version = best.get(name, ORIGIN)
        if version == ORIGIN or (name in read and read[name].entry.version == version):
            continue
        sources = (offer.source for offer in offers[name][version])
        found = (fetch_unit(source, unit, catalog, readers, version) for source in sources)
        intact = next((each for each in found if each is not None), None)
        if intact is not None:
            read[name] = intact
        else:
            del offers[name][version]
            has_failed = True
    return has_failed


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
    """Return the existing versions by unit name, with the sources of each, best first."""
    offers: _Offers = {str(unit): {} for unit in units}
    for source in sources if units else ():
        reader = readers.open(source)
        if reader is None:
            continue
        for name, found in offers.items():
            entry = reader.index.units.get(name)
            is_meant = most_iteration is None or source.version.iteration <= most_iteration
            if entry is not None and is_meant:
                offer = _Offer(source=source, version=version_of(entry))
                found.setdefault(entry.version, []).append(offer)
            if name in origins and reader.index.origins.get(name) == origins[name]:
                found.setdefault(ORIGIN, [])
    return offers


def _tokens(found: Mapping[Version, Sequence[_Offer]]) -> dict[Version, UnitVersion]:
    nothing = UnitVersion(iteration=-1, routed_tokens=0)
    return {version: offers[0].version if offers else nothing for version, offers in found.items()}


def _best_common(
    everyone: Sequence[Mapping[str, Mapping[Version, Any]]], wanted: Version
) -> dict[str, Version]:
    """Return by unit name the best version that all ranks have that save a part of the unit."""
    common: dict[str, set[Version]] = {}
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


def version_of(entry: UnitEntry) -> UnitVersion:
    """Return the version of an entry, as strategies know it."""
    return UnitVersion(
        iteration=entry.iteration, routed_tokens=entry.routed_tokens, gaps=entry.gaps
    )
