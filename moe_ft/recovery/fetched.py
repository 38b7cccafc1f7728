"""One rank's window as its sources have it: the value that the phases of a recovery hand on.

recovery/fetch.py makes it, recovery/agree.py compares those of all ranks.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moe_ft.format.entries import UNCUT, UnitEntry, lossy_packings
from moe_ft.format.index import Index
from moe_ft.format.records import Gaps
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.planning.scope import Place
from moe_ft.planning.tiers import Tier
from moe_ft.recovery.borders import Borders
from moe_ft.recovery.left import Copy
from moe_ft.recovery.readers import FetchedUnit
from moe_ft.state.catalog import Slices, UnitCatalog


@dataclass(frozen=True, kw_only=True, slots=True)
class StageVersions:
    """Versions of the units that only some snapshots hold, the same on all ranks of a stage.

    Several ranks may save parts of one unit. All of them put back the same version: the newest one that each
    of them has. A unit that was never saved, or of which nothing is left, keeps the weights that the run
    began with, if this start has begun with the same ones.

    Attributes:
        versions: versions that the units of the whole stage get, by name; a unit that keeps the weights that
            the run began with is left out.
        kept: names of the units that keep these weights, of the whole stage.
        gaps: ``[expert]`` by layer name, the tokens that recoveries before this one have lost: gaps of the
            newest state that anything was found of.
    """

    versions: Mapping[str, UnitVersion] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    gaps: Mapping[str, Sequence[Gaps]] = field(default_factory=dict)


NO_VERSIONS = StageVersions()


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
        lost: copies that are intact nowhere; without them another version of a unit may be chosen.
        needed_bytes, read_bytes: bytes of this rank's part, and by node (or "storage") those read for it.
        stored_as: entries of what was read, if units were put together from them.
    """

    index: Index | None = None
    units: Mapping[str, FetchedUnit] = field(default_factory=dict)
    compute: Sequence[Mapping[str, FetchedUnit]] = ()
    rotation: StageVersions = NO_VERSIONS
    missing: tuple[str, ...] = ()
    borders: Borders | None = None
    unreadable: frozenset[Place] = frozenset()
    lost: frozenset[Copy] = frozenset()
    needed_bytes: int = 0
    read_bytes: Mapping[str, int] = field(default_factory=dict)
    stored_as: Sequence[UnitEntry] = ()

    def close(self) -> None:
        """Close what borders are fetched with: the plan is given up."""
        if self.borders is not None:
            self.borders.close()

    @property
    def sources(self) -> Counter[Tier]:
        """Number of units that came from each tier."""
        return Counter(fetched.source.tier for fetched in self.units.values())

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
        return fetched.entry.iteration - first_iteration(self.index)

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


def first_iteration(index: Index) -> int:
    """Return the iteration of the first snapshot of a window."""
    return index.iteration - index.num_snapshots + 1


def _slices_of(units: Iterable[FetchedUnit], shared: Collection[str]) -> Slices:
    return {
        tensor.parameter: (tensor.start, tensor.end)
        for fetched in units
        for tensor in fetched.entry.tensors
        if tensor.parameter in shared and not tensor.key.startswith(UNCUT)
    }
