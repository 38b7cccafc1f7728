"""Reads one rank's units from wherever they are intact, and puts them back.

Two steps: reading verifies everything and changes nothing, so that all ranks can agree before `put_back`
overwrites the live state. Which versions of rotating units to read is recovery/rotating.py.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from moe_ft.engine.background import PhaseHook
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.formats import Index, TensorEntry, UnitEntry, tensor_bytes
from moe_ft.planning.recovery import Source, Tier
from moe_ft.recovery.sources import StateReader, read_unit
from moe_ft.state.catalog import UnitCatalog
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
                self._readers[source] = self._open_source(source)
                _check_is_planned(self._readers[source], source)
            except Exception as error:  # whatever a back end raises, another source may do
                self._readers[source] = None
                self.say(source, error)
        return self._readers[source]

    def say(self, source: Source, error: Exception) -> None:
        """Remember what is wrong with a source."""
        version = source.version
        place = "storage" if version.node is None else f"node {version.node}"
        self.problems.append(f"{source.tier} ({place}, {version.path}): {error}")

    def close(self) -> None:
        """Close all of them."""
        for reader in self._readers.values():
            if reader is not None:
                reader.close()


def _check_is_planned(reader: StateReader | None, source: Source) -> None:
    """Raise CorruptStateError if a place holds something else than when the recovery was planned."""
    assert reader is not None
    index, version = reader.index, source.version
    found = (index.rank, index.iteration, index.identity.lineage, index.identity.history)
    if found != (version.rank, version.iteration, version.lineage, version.history):
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
    """One rank's state at one iteration as its sources have it.

    Attributes:
        index: of the best source; its last record is that of the iteration. None if none could be read.
        units: by name.
        missing: units that no source had intact.
    """

    index: Index | None = None
    units: dict[str, FetchedUnit] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    @property
    def sources(self) -> Counter[Tier]:
        """Number of units that came from each tier."""
        return Counter(fetched.tier for fetched in self.units.values())

    def add(self, fetched: FetchedUnit) -> None:
        """Add a unit."""
        self.units[str(fetched.unit)] = fetched

    def slices(self, catalog: UnitCatalog) -> dict[str, tuple[int, int]]:
        """Return which flat ranges of parameters that several ranks hold alike are among the units."""
        shared = {local.name for local in catalog.parameters if not local.is_sharded}
        return {
            tensor.parameter: (tensor.start, tensor.end)
            for fetched in self.units.values()
            for tensor in fetched.entry.tensors
            if tensor.parameter in shared
        }


def fetch(
    sources: Sequence[Source], units: Iterable[UnitId], catalog: UnitCatalog, readers: Readers
) -> FetchedState:
    """Read and verify what one rank saves of units at one iteration.

    Args:
        sources: where this rank's state of the iteration is, best first.
        units: those that every snapshot holds.
        catalog: of this rank.
        readers: open the sources.
    """
    fetched = FetchedState()
    for source in sources:  # also for a rank that owns nothing: it has a record
        if (reader := readers.open(source)) is not None:
            fetched.index = reader.index
            break
    for unit in units:
        if fetched.index is None or not _is_expected(unit, fetched.index, catalog):
            continue
        for source in sources:
            # With another strategy this run may have saved the unit at another iteration only.
            iteration = source.version.iteration
            found = fetch_unit(source, unit, catalog, readers, iteration=iteration)
            if found is not None:
                fetched.add(found)
                break
        else:
            fetched.missing.append(str(unit))
    return fetched


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
) -> FetchedUnit | None:
    """Read and verify a unit from one source; return None, and remember why, if it is not intact there.

    Args:
        source: where to look.
        unit: which one.
        catalog: of this rank.
        readers: open the source.
        version: that it must be; None for any.
        iteration: that it must be of; None for any.
    """
    reader = readers.open(source)
    if reader is None:
        return None
    try:
        entry, content = read_unit(reader, str(unit))
        _check_tensors(catalog.parameters_of(unit), unit, entry.tensors)
        if version not in (None, entry.version) or iteration not in (None, entry.iteration):
            raise CorruptStateError(f"unit {unit} is of iteration {entry.iteration} there")
    except Exception as error:  # whatever a back end raises, the next source may have it
        readers.say(source, error)
        return None
    return FetchedUnit(
        unit=unit, source=source, entry=entry, content=content, stays=reader.stays(entry)
    )


def _check_tensors(
    parameters: Sequence[LocalParameter], unit: UnitId, tensors: Sequence[TensorEntry]
) -> None:
    """Raise CorruptStateError unless a unit version has what this rank can put back.

    Of its own slices of parameters everything and nothing else; of parameters that several ranks hold
    alike any range, because all ranks together are checked later.
    """
    expected = {
        (each.parameter, each.key, each.start, each.end, each.dtype)
        for local in parameters
        if local.is_sharded
        for each in describe(local, Level.FULL, unit.part)
    }
    shared = {
        (each.parameter, each.key, each.dtype): each.end
        for local in parameters
        if not local.is_sharded
        for each in describe(_whole(local), Level.FULL, unit.part)
    }
    found = set()
    for each in tensors:
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
    fetched: FetchedState, catalog: UnitCatalog, iteration: int, phase_hook: PhaseHook
) -> None:
    """Copy fetched slices of master weights and moments into the live state.

    What other ranks own, the weights that forward uses and the record are not put back here.
    """
    for count, unit in enumerate(fetched.units.values()):
        if count == len(fetched.units) // 2:
            phase_hook(Phase.RECOVERY, iteration)
        by_name = {local.name: local for local in catalog.parameters_of(unit.unit)}
        for tensor in unit.entry.tensors:
            _write(by_name[tensor.parameter], tensor, unit.content)


def _write(local: LocalParameter, tensor: TensorEntry, content: memoryview) -> None:
    if tensor.is_absent:
        drop_state(local)
        return
    dtype = DTYPES[tensor.dtype]
    if tensor.key not in ("param", "weight"):
        make_state(local, tensor.key, dtype)
    if not local.is_sharded:
        local = replace(local, start=tensor.start, end=tensor.end)
    target = live_tensor(local, tensor.key)
    assert target is not None
    part = content[tensor.offset : tensor.offset + tensor_bytes(tensor)]
    target.copy_(torch.frombuffer(part, dtype=dtype))
