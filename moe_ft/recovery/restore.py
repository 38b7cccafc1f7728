"""Puts one rank's state back: every unit from the best source that has it intact.

Two steps: `fetch` reads and verifies everything and changes nothing, so that all ranks can agree before
`put_back` overwrites the live state.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from moe_ft.engine.background import PhaseHook
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.formats import IterationRecord, TensorEntry, UnitEntry, tensor_bytes
from moe_ft.planning.recovery import Source, Tier
from moe_ft.recovery.sources import StateReader, read_unit
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import DTYPES, describe, drop_state, live_tensor, make_state
from moe_ft.units import Level

Opener = Callable[[Source], StateReader]


@dataclass(kw_only=True, slots=True)
class FetchedState:
    """One rank's state as its sources have it.

    Attributes:
        record: of the state's iteration, None if no source had one.
        units: unit versions by name with their bytes, every one verified.
        sources: number of units that came from each tier.
        problems: what was corrupt or could not be read, whether or not another source had it.
        missing: units that no source had intact.
    """

    record: IterationRecord | None = None
    units: dict[str, tuple[UnitEntry, memoryview]] = field(default_factory=dict)
    sources: Counter[Tier] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether the rank can put back all of its state."""
        return self.record is not None and not self.missing


def owned_units(parameters: Sequence[LocalParameter]) -> dict[str, list[LocalParameter]]:
    """Return the parameters of which this rank saves a part, by unit name."""
    units: dict[str, list[LocalParameter]] = {}
    for local in parameters:
        if local.start < local.end:
            units.setdefault(str(local.unit), []).append(local)
    return units


def fetch(
    sources: Sequence[Source], parameters: Sequence[LocalParameter], open_source: Opener
) -> FetchedState:
    """Read and verify one rank's slices of master weights and moments.

    Args:
        sources: where this rank's state is, best first.
        parameters: of this rank.
        open_source: opens a source; raises OSError if it cannot be read.
    """
    fetched = FetchedState()
    readers: dict[Source, StateReader | None] = {}
    for source in sources[:1]:  # also for a rank that owns nothing: it has a record
        _open(source, readers, open_source, fetched)
    for name, owned in owned_units(parameters).items():
        if not _fetch_unit(name, owned, sources, readers, open_source, fetched):
            fetched.missing.append(name)
    for reader in readers.values():
        if reader is not None:
            fetched.record = fetched.record or reader.index.records[-1]
            reader.close()
    return fetched


def _fetch_unit(
    name: str,
    owned: Sequence[LocalParameter],
    sources: Sequence[Source],
    readers: dict[Source, StateReader | None],
    open_source: Opener,
    fetched: FetchedState,
) -> bool:
    """Fetch a unit from the first source that has it intact; return whether there was one."""
    for source in sources:
        reader = _open(source, readers, open_source, fetched)
        if reader is None:
            continue
        try:
            unit, content = read_unit(reader, name)
            _check_tensors(owned, unit.tensors, name)
        except Exception as error:  # whatever a back end raises, the next source may have it
            fetched.problems.append(f"{source.tier} {_where(source)}: {error}")
            continue
        fetched.units[name] = (unit, content)
        fetched.sources[source.tier] += 1
        return True
    return False


@torch.no_grad()
def put_back(
    fetched: FetchedState,
    parameters: Sequence[LocalParameter],
    iteration: int,
    phase_hook: PhaseHook,
) -> None:
    """Copy fetched slices of master weights and moments into the live state.

    What other ranks own, the weights that forward uses and the record are not put back here.
    """
    units = owned_units(parameters)
    for count, (name, owned) in enumerate(units.items()):
        if count == len(units) // 2:
            phase_hook(Phase.RECOVERY, iteration)
        unit, content = fetched.units[name]
        for tensor in unit.tensors:
            _write(owned, tensor, content)


def _open(
    source: Source,
    readers: dict[Source, StateReader | None],
    open_source: Opener,
    fetched: FetchedState,
) -> StateReader | None:
    if source not in readers:
        try:
            readers[source] = open_source(source)
            _check_is_planned(readers[source], source)
        except Exception as error:  # as above
            readers[source] = None
            fetched.problems.append(f"{source.tier} {_where(source)}: {error}")
    return readers[source]


def _check_is_planned(reader: StateReader | None, source: Source) -> None:
    """Raise CorruptStateError if a place holds something else than when the recovery was planned."""
    assert reader is not None
    index, version = reader.index, source.version
    found = (index.rank, index.iteration, index.identity.lineage, index.identity.history)
    if found != (version.rank, version.iteration, version.lineage, version.history):
        raise CorruptStateError(
            f"it now holds iteration {index.iteration} of rank {index.rank}, not what was planned"
        )


def _where(source: Source) -> str:
    version = source.version
    place = "storage" if version.node is None else f"node {version.node}"
    return f"({place}, {version.path})"


def _check_tensors(
    owned: Sequence[LocalParameter], tensors: Sequence[TensorEntry], name: str
) -> None:
    """Raise CorruptStateError unless a unit version has exactly this rank's slices."""
    expected = {
        (each.parameter, each.key, each.start, each.end, each.dtype)
        for local in owned
        for each in describe(local, Level.FULL)
    }
    found = {(each.parameter, each.key, each.start, each.end, each.dtype) for each in tensors}
    if expected != found:
        odd = sorted(expected ^ found)[0]
        raise CorruptStateError(
            f"unit {name} is cut differently there, for example {odd[0]}/{odd[1]}[{odd[2]}:{odd[3]}]"
        )


def _write(owned: Sequence[LocalParameter], tensor: TensorEntry, content: memoryview) -> None:
    local = next(each for each in owned if each.name == tensor.parameter)
    if tensor.is_absent:
        drop_state(local)
        return
    dtype = DTYPES[tensor.dtype]
    if tensor.key not in ("param", "weight"):
        make_state(local, tensor.key, dtype)
    target = live_tensor(local, tensor.key)
    assert target is not None
    part = content[tensor.offset : tensor.offset + tensor_bytes(tensor)]
    target.copy_(torch.frombuffer(part, dtype=dtype))
