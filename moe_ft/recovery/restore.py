"""Reads one rank's units from wherever they are intact, and puts them back.

Two steps: reading verifies everything and changes nothing, so that all ranks can agree before `put_back`
overwrites the live state. Which versions of rotating units to read is recovery/rotating.py.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from moe_ft.engine.background import PhaseHook
from moe_ft.engine.finite import check_is_finite
from moe_ft.engine.packed import unpack_into
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.format.contents import check_header
from moe_ft.format.entries import TensorEntry, UnitEntry, lossy_packings
from moe_ft.format.index import Index
from moe_ft.planning.recovery import Source, Tier
from moe_ft.recovery.sources import StateReader, read_unit
from moe_ft.state.catalog import Slices, UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import DTYPES, describe, drop_state, live_tensor, make_state
from moe_ft.units import Level, UnitId

Opener = Callable[[Source], StateReader]


class Readers:
    """The sources of one rank, opened when they are first needed.

    Attributes:
        problems: what could not be opened or read, and why.
    """

    def __init__(self, open_source: Opener) -> None:
        self._open_source = open_source
        self._readers: dict[Source, StateReader | None] = {}
        self.problems: list[str] = []

    def open(self, source: Source) -> StateReader | None:
        """Return the reader of a source, None if it cannot be read or holds something else by now."""
        if source not in self._readers:
            try:
                reader = self._readers[source] = self._open_source(source)
                _check_is_planned(reader, source)
                check_header(reader.index, reader.read_header(), source.version.path)
            except Exception as error:  # whatever a back end raises, another source may do
                self._readers[source] = None
                self.say(source, error)
        return self._readers[source]

    def say(self, source: Source, error: Exception) -> None:
        """Remember what is wrong with a source."""
        version = source.version
        place = "storage" if version.node is None else f"memory of node {version.node}"
        self.problems.append(f"{place}, {version.path}: {error}")

    def close(self) -> None:
        """Close all of them."""
        for reader in self._readers.values():
            if reader is not None:
                reader.close()


def _check_is_planned(reader: StateReader, source: Source) -> None:
    """Raise CorruptStateError if a place holds something else than when the recovery was planned."""
    index, version = reader.index, source.version
    found = (index.rank, index.iteration, index.identity.lineage, index.identity.history)
    is_same = found == (version.rank, version.iteration, version.lineage, version.history)
    if not is_same or (index.window, index.is_whole) != (version.window, True):
        raise CorruptStateError(
            f"it now holds iteration {index.iteration} of rank {index.rank}, not what was planned"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FetchedUnit:
    """A unit version that was read and verified.

    Attributes:
        stays: whether its bytes lie in memory of this rank that keeps them.
    """

    unit: UnitId
    source: Source
    entry: UnitEntry
    content: memoryview
    stays: bool

    @property
    def tier(self) -> Tier:
        """Where it came from."""
        return self.source.tier


@dataclass(kw_only=True, slots=True)
class FetchedState:
    """One rank's window as its sources have it.

    Attributes:
        index: of the best source; its last record is that of the last iteration. None if none could be
            read.
        units: by name, at FULL.
        compute: ``[snapshot]`` by name, the weights of units that only a later one has at FULL; empty for
            a window of one.
        missing: units that no source had intact.
    """

    index: Index | None = None
    units: dict[str, FetchedUnit] = field(default_factory=dict)
    compute: list[dict[str, FetchedUnit]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def sources(self) -> Counter[Tier]:
        """Number of units that came from each tier."""
        return Counter(fetched.tier for fetched in self.units.values())

    @property
    def lossy(self) -> dict[str, str]:
        """By key of the tensors that were kept in fewer bits than they have: how."""
        return lossy_packings(fetched.entry for fetched in self.units.values())

    @property
    def first_iteration(self) -> int:
        """The iteration of the first snapshot."""
        assert self.index is not None
        return self.index.iteration - self.index.num_snapshots + 1

    def position_of(self, fetched: FetchedUnit) -> int:
        """Return which snapshot has a unit at FULL."""
        return fetched.entry.iteration - self.first_iteration if self.compute else 0

    def add(self, fetched: FetchedUnit) -> None:
        """Add a unit."""
        self.units[str(fetched.unit)] = fetched

    def snapshot(self, position: int) -> tuple[list[FetchedUnit], list[FetchedUnit]]:
        """Return the units of a snapshot, those at FULL and those at COMPUTE."""
        full = [each for each in self.units.values() if self.position_of(each) == position]
        return full, list(self.compute[position].values()) if self.compute else []

    def slices(self, catalog: UnitCatalog) -> list[tuple[Slices, Slices]]:
        """Return ``[snapshot]`` which flat ranges of parameters that several ranks hold alike it has.

        Those of units at FULL and those of units at COMPUTE, by parameter name.
        """
        shared = {local.name for local in catalog.parameters if not local.is_sharded}
        return [
            tuple(_slices_of(units, shared) for units in self.snapshot(position))  # type: ignore[misc]
            for position in range(max(1, len(self.compute)))
        ]


def _slices_of(units: Iterable[FetchedUnit], shared: Collection[str]) -> Slices:
    return {
        tensor.parameter: (tensor.start, tensor.end)
        for fetched in units
        for tensor in fetched.entry.tensors
        if tensor.parameter in shared
    }


def fetch(
    sources: Sequence[Source], units: Iterable[UnitId], catalog: UnitCatalog, readers: Readers
) -> FetchedState:
    """Read and verify what one rank saves of units in one window.

    Args:
        sources: where this rank's window is, best first.
        units: those that every window holds.
        catalog: of this rank.
        readers: open the sources.
    """
    fetched = FetchedState()
    for source in sources:  # also for a rank that owns nothing: it has a record
        if (reader := readers.open(source)) is not None:
            fetched.index = reader.index
            break
    if fetched.index is None:
        return fetched
    if fetched.index.window > 1:
        fetched.compute = [{} for _ in range(fetched.index.window)]
    for unit in units:
        if _is_expected(unit, fetched.index, catalog):
            _fetch_versions(unit, fetched, sources, catalog, readers)
    return fetched


def _fetch_versions(
    unit: UnitId,
    fetched: FetchedState,
    sources: Sequence[Source],
    catalog: UnitCatalog,
    readers: Readers,
) -> None:
    """Read all versions of a unit in a window."""
    index = fetched.index
    assert index is not None
    # With another strategy this run may have saved the unit at another iteration only.
    iteration = index.iteration
    if fetched.compute and str(unit) in index.units:
        iteration = index.units[str(unit)].iteration
    found = _first_intact(sources, unit, catalog, readers, iteration, None)
    if found is None:
        fetched.missing.append(str(unit))
        return
    fetched.add(found)
    for position in range(fetched.position_of(found)):
        iteration = fetched.first_iteration + position
        weights = _first_intact(sources, unit, catalog, readers, iteration, position)
        if weights is None:
            fetched.missing.append(f"weights of {unit} at iteration {iteration}")
        else:
            fetched.compute[position][str(unit)] = weights


def _first_intact(
    sources: Sequence[Source],
    unit: UnitId,
    catalog: UnitCatalog,
    readers: Readers,
    iteration: int,
    position: int | None,
) -> FetchedUnit | None:
    """Return a unit from the best source that has it; see `fetch_unit`."""
    for source in sources:
        found = fetch_unit(source, unit, catalog, readers, iteration=iteration, position=position)
        if found is not None:
            return found
    return None


def _is_expected(unit: UnitId, index: Index, catalog: UnitCatalog) -> bool:
    """Return whether this rank saved something of a unit.

    Of parameters that several ranks hold alike each snapshot may have divided otherwise.
    """
    has_own = any(
        local.is_sharded and local.start < local.end for local in catalog.parameters_of(unit)
    )
    return has_own or str(unit) in index.units


def fetch_unit(
    source: Source,
    unit: UnitId,
    catalog: UnitCatalog,
    readers: Readers,
    version: tuple[int, int] | None = None,
    iteration: int | None = None,
    position: int | None = None,
) -> FetchedUnit | None:
    """Read and verify a unit from one source; return None, and remember why, if it is not intact there.

    Args:
        source: where to look.
        unit: which one.
        catalog: of this rank.
        readers: open the source.
        version: that it must be; None for any.
        iteration: that it must be of; None for any.
        position: of the snapshot that has it at COMPUTE; None for FULL.
    """
    reader = readers.open(source)
    if reader is None:
        return None
    try:
        entry, content = read_unit(reader, str(unit), position)
        _check_tensors(catalog.parameters_of(unit), unit, entry)
        check_is_finite(str(unit), entry, content)
        if version not in (None, entry.version) or iteration not in (None, entry.iteration):
            raise CorruptStateError(f"unit {unit} is of iteration {entry.iteration} there")
    except Exception as error:  # whatever a back end raises, the next source may have it
        readers.say(source, error)
        return None
    return FetchedUnit(
        unit=unit, source=source, entry=entry, content=content, stays=reader.stays(entry)
    )


def _check_tensors(parameters: Sequence[LocalParameter], unit: UnitId, entry: UnitEntry) -> None:
    """Raise CorruptStateError unless a unit version has what this rank can put back.

    Of its own slices of parameters everything and nothing else; of parameters that several ranks hold
    alike any range, because all ranks together are checked later.
    """
    level = Level(entry.level)
    expected = {
        (each.parameter, each.key, each.start, each.end, each.dtype)
        for local in parameters
        if local.is_sharded
        for each in describe(local, level, unit.part)
    }
    shared = {
        (each.parameter, each.key, each.dtype): each.end
        for local in parameters
        if not local.is_sharded
        for each in describe(_whole(local), level, unit.part)
    }
    found = set()
    for each in entry.tensors:
        most = shared.get((each.parameter, each.key, each.dtype))
        if most is None or each.end > most:
            found.add((each.parameter, each.key, each.start, each.end, each.dtype))
    if expected != found:
        odd = sorted(expected ^ found)[0]
        raise CorruptStateError(
            f"unit {unit} is cut differently there, for example {odd[0]}/{odd[1]}[{odd[2]}:{odd[3]}]"
        )


def _whole(local: LocalParameter) -> LocalParameter:
    return replace(local, start=0, end=local.parameter.numel())


@torch.no_grad()
def put_back(
    units: Sequence[FetchedUnit],
    catalog: UnitCatalog,
    iteration: int,
    phase_hook: PhaseHook | None,
) -> None:
    """Copy fetched slices into the live state: master weights and moments, or weights.

    What other ranks own, the weights that follow from masters and the record are not put back here.
    """
    for count, unit in enumerate(units):
        if count == len(units) // 2 and phase_hook is not None:
            phase_hook(Phase.RECOVERY, iteration)
        by_name = {local.name: local for local in catalog.parameters_of(unit.unit)}
        for tensor in unit.entry.tensors:
            _write(by_name[tensor.parameter], tensor, unit.content)


def _write(local: LocalParameter, tensor: TensorEntry, content: memoryview) -> None:
    if tensor.is_absent:
        drop_state(local)
        return
    if tensor.key not in ("param", "weight"):
        make_state(local, tensor.key, DTYPES[tensor.dtype])
    if not local.is_sharded:
        local = replace(local, start=tensor.start, end=tensor.end)
    target = live_tensor(local, tensor.key)
    assert target is not None
    unpack_into(target, tensor, content)
