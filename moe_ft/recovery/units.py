"""Reading one unit version from one source, verified against its index and this rank's parameters."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ft.engine.finite import check_is_finite
from moe_ft.errors import CorruptStateError
from moe_ft.format.entries import UnitEntry
from moe_ft.planning.recovery import Source, Tier
from moe_ft.recovery.readers import Readers, read_unit
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import describe
from moe_ft.units import Level, UnitId


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
        """Tier of its source."""
        return self.source.tier


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
        source: the place to look at.
        catalog: parameters and units of this rank.
        version: the only version to accept; None for any.
        iteration: the only iteration to accept; None for any.
        position: number of the snapshot that has the unit at COMPUTE; None for FULL.
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

    It must have all of the rank's own slices, and nothing else. Of parameters that several ranks hold it may
    have any range, because all ranks are checked together later.
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
        for each in describe(local.whole, level, unit.part)
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
