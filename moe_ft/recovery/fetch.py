"""Fifth phase of a start: a rank reads and verifies its part of the state that a plan names.

Reading changes nothing, so that all ranks can agree on what they have before any live state is overwritten.
recovery/rotating.py reads the units that only some snapshots hold, recovery/readers.py a single unit.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from moe_ft.engine.links.peers import PeerConnection
from moe_ft.format.entries import FROZEN, UnitEntry, lossy_packings
from moe_ft.format.index import Index
from moe_ft.planning.local_recovery import LocalPlan
from moe_ft.planning.recovery import Plan, Source, Tier
from moe_ft.planning.remains import Place, place_of
from moe_ft.recovery.borders import Borders, read_borders
from moe_ft.recovery.claim import Claimed
from moe_ft.recovery.meet import Met
from moe_ft.recovery.readers import (
    FetchedUnit,
    MemoryReader,
    PeerReader,
    Readers,
    StateReader,
    StorageReader,
    fetch_unit,
)
from moe_ft.recovery.rotating import NO_ROTATION, Rotation, fetch_rotating
from moe_ft.state.catalog import Slices, UnitCatalog
from moe_ft.units import UnitId

Units = dict[str, FetchedUnit]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """One rank's window as its sources have it: verified bytes that are not in the model yet.

    Attributes:
        index: index of the best source; its last record is that of the last iteration. None if no source
            could be read.
        units: versions at FULL by unit name.
        compute: ``[snapshot]`` by unit name, the weights of units that only a later snapshot has at FULL;
            empty for a window of one.
        borders: of a rank that runs iterations again with some stages alone.
        unreadable: places of logs and records that these lack, and of the state if some of it is missing.
        stored_as: entries of what was read, if units were put together from them.
    """

    index: Index | None = None
    units: Mapping[str, FetchedUnit] = field(default_factory=dict)
    compute: Sequence[Mapping[str, FetchedUnit]] = ()
    rotation: Rotation = NO_ROTATION
    missing: tuple[str, ...] = ()
    borders: Borders | None = None
    unreadable: frozenset[Place] = frozenset()
    stored_as: Sequence[UnitEntry] = ()

    def close(self) -> None:
        """Close what borders are fetched with: the plan is given up."""
        if self.borders is not None:
            self.borders.close()

    @property
    def sources(self) -> Counter[Tier]:
        """Number of units that came from each tier."""
        return Counter(fetched.tier for fetched in self.units.values())

    @property
    def lossy(self) -> dict[str, str]:
        """Formats of the tensors that were kept in fewer bits than they have, by tensor key."""
        own = (fetched.entry for fetched in self.units.values())
        return lossy_packings((*own, *self.stored_as))

    def position_of(self, fetched: FetchedUnit) -> int:
        """Return the number of the snapshot that has a unit at FULL."""
        if not self.compute:
            return 0
        assert self.index is not None
        return fetched.entry.iteration - _first_iteration(self.index)

    def snapshot(self, position: int) -> tuple[list[FetchedUnit], list[FetchedUnit]]:
        """Return the units of a snapshot: at FULL, and at COMPUTE."""
        full = [each for each in self.units.values() if self.position_of(each) == position]
        return full, list(self.compute[position].values()) if self.compute else []

    def slices(self, catalog: UnitCatalog) -> list[tuple[Slices, Slices]]:
        """Return ``[snapshot]`` the flat ranges it has of parameters that several ranks hold.

        Ranges of units at FULL and of units at COMPUTE, by parameter name.
        """
        shared = {local.name for local in catalog.parameters if not local.is_sharded}
        return [
            tuple(_slices_of(units, shared) for units in self.snapshot(position))  # type: ignore[misc]
            for position in range(max(1, len(self.compute)))
        ]


def _first_iteration(index: Index) -> int:
    return index.iteration - index.num_snapshots + 1


def _slices_of(units: Iterable[FetchedUnit], shared: Collection[str]) -> Slices:
    return {
        tensor.parameter: (tensor.start, tensor.end)
        for fetched in units
        for tensor in fetched.entry.tensors
        if tensor.parameter in shared
    }


def open_readers(met: Met, claimed: Claimed) -> Readers:
    """Return readers of this rank's sources; each source is opened when it is first read."""

    def open_source(source: Source) -> StateReader:
        version = source.version
        if source.tier is Tier.MEMORY:
            pool = [claimed.memory.pool] if claimed.memory.pool is not None else []
            return MemoryReader(met.site.node_dir / version.path, [*claimed.memory.regions, *pool])
        if source.tier is Tier.STORAGE:
            assert claimed.storage is not None
            return StorageReader(claimed.storage, version)
        assert version.node is not None
        address = met.site.topology.lowest_on_node(version.node).address
        assert address is not None
        return PeerReader(PeerConnection(address, met.token), version)

    return Readers(open_source)


def fetch(
    plan: Plan,
    met: Met,
    readers: Readers,
    origins: Mapping[str, str],
    most_iteration: int | None,
) -> Fetched:
    """Read and verify what this rank needs for a plan. Called by all ranks.

    Args:
        most_iteration: latest iteration of versions of units that only some snapshots hold; None for any.
    """
    rank, catalog, strategy = met.site.rank, met.live.catalog, met.strategy
    sources = plan.sources_of(rank)
    fetched = read_window(sources, strategy.always, catalog, readers)
    missing = list(fetched.missing)
    is_damaged = fetched.index is None or bool(missing)
    if fetched.index is not None and fetched.index.origins.get(FROZEN) != origins.get(FROZEN):
        missing.append("copy of the frozen parameters: this start has begun with others (--load?)")
    if strategy.saves_all:
        borders, lacking = (
            read_borders(plan, met, readers) if isinstance(plan, LocalPlan) else (None, {})
        )
        return replace(
            fetched,
            borders=borders,
            missing=(*missing, *lacking.values()),
            unreadable=frozenset(
                (*lacking, *(place_of(each.version) for each in sources if is_damaged))
            ),
        )
    if fetched.compute:
        missing.append("snapshot with all units: it is a window of several snapshots")
    rotation = fetch_rotating(
        plan.elsewhere.get(rank, ()),
        sorted(strategy.rotating),
        catalog,
        readers,
        origins,
        met.ranks.stage.gather,
        (plan.start.number, plan.iteration),
        most_iteration,
    )
    return replace(
        fetched,
        units={**fetched.units, **rotation.units},
        rotation=rotation,
        missing=(*missing, *rotation.missing),
    )


def read_window(
    sources: Sequence[Source], units: Iterable[UnitId], catalog: UnitCatalog, readers: Readers
) -> Fetched:
    """Read and verify what one rank saves of units in one window; its sources come best first."""
    opened = (readers.open(source) for source in sources)
    index = next((reader.index for reader in opened if reader is not None), None)
    if index is None:
        return Fetched()
    first = _first_iteration(index)
    full: Units = {}
    compute: list[Units] = [{} for _ in range(index.window)] if index.window > 1 else []
    missing: list[str] = []

    def read(unit: UnitId, iteration: int, position: int | None = None) -> FetchedUnit | None:
        found = (
            fetch_unit(source, unit, catalog, readers, iteration=iteration, position=position)
            for source in sources
        )
        return next((each for each in found if each is not None), None)

    for unit in (each for each in units if _is_expected(each, index, catalog)):
        # With another strategy this run may have saved the unit at another iteration only.
        is_of_window = compute and str(unit) in index.units
        found = read(unit, index.units[str(unit)].iteration if is_of_window else index.iteration)
        if found is None:
            missing.append(str(unit))
            continue
        full[str(unit)] = found
        for position in range(found.entry.iteration - first if compute else 0):
            weights = read(unit, first + position, position)
            if weights is None:
                missing.append(f"weights of {unit} at iteration {first + position}")
            else:
                compute[position][str(unit)] = weights
    return Fetched(index=index, units=full, compute=compute, missing=tuple(missing))


def _is_expected(unit: UnitId, index: Index, catalog: UnitCatalog) -> bool:
    """Return whether this rank saved something of a unit.

    Each snapshot may have divided the parameters that several ranks hold in another way.
    """
    has_own = any(
        local.is_sharded and local.start < local.end for local in catalog.parameters_of(unit)
    )
    return has_own or str(unit) in index.units
