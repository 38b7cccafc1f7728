"""Copies of one window in several places of a node's memory, and the parameters that it belongs to."""

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from moe_ft.engine.memory.job_directory import own_directory, replica_directory
from moe_ft.format.encoding import encode
from moe_ft.format.entries import UnitEntry
from moe_ft.planning.recovery import Source
from moe_ft.planning.tiers import MEMORY
from moe_ft.recovery.fetch import read_window
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.inventory import look_at_memory
from moe_ft.recovery.left import Left
from moe_ft.recovery.readers import FetchedUnit, MemoryReader, Readers
from moe_ft.recovery.transfer import OwnUnits
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import Level, UnitId
from tests.unit.moe_ft.builders import WINDOW_UNITS, fill_window, make_window
from tests.unit.moe_ft.small_rank import SmallRank

NUM_ELEMENTS = 33
WINDOW = make_window()
ENTRIES = list(WINDOW.index.entries())
NAMES = [str(unit) for unit in WINDOW_UNITS]
EMBEDDING = "embedding"


def make_parameters(*, is_sharded: bool = True) -> list[LocalParameter]:
    """Return the parameters of `make_window`, as a start has them: all zero and without moments."""
    # This optimizer has one moment.
    return SmallRank(num_elements=NUM_ELEMENTS, kind="lion", is_sharded=is_sharded).parameters


def make_catalog(*, is_sharded: bool = True) -> UnitCatalog:
    return UnitCatalog(make_parameters(is_sharded=is_sharded), leaves_out_frozen=False)


class Copies:
    """Copies of a window in several places of one node's memory, best first."""

    def __init__(self, node_dir: Path, count: int = 2) -> None:
        self.node_dir = node_dir
        holders = [own_directory(node_dir, 0)]
        holders += [replica_directory(node_dir, 0, 9 + number) for number in range(count - 1)]
        self.regions = [fill_window(directory)[0] for directory in holders]
        found = {
            version.path: version for version in look_at_memory(node_dir, "node-a", "job").versions
        }
        paths = [str(region.index_path.relative_to(node_dir)) for region in self.regions]
        self.sources = [Source(tier=MEMORY, version=found[path]) for path in paths]
        self.readers = Readers(lambda source: MemoryReader(node_dir / source.version.path))

    def spoil(self, number: int, entry: UnitEntry) -> None:
        """Flip a bit of a version in a copy."""
        self.regions[number].mapping[entry.offset + entry.num_bytes - 1] ^= 0x40

    def change_index(self, number: int, **changes: object) -> None:
        """Have a copy with another index."""
        index = msgspec.structs.replace(
            WINDOW.index, file=self.regions[number].data_path.name, **changes
        )
        self.regions[number].commit(encode(index), index.iteration)

    def fetch(
        self, catalog: UnitCatalog | None = None, units: Iterable[UnitId] = WINDOW_UNITS
    ) -> Fetched:
        """Read the window."""
        left = Left(self.readers, self.sources)
        index = left.first_index()
        assert index is not None
        return read_window(left, OwnUnits(left, catalog or make_catalog()), index, units)


def all_fetched(fetched: Fetched) -> dict[tuple[str, str, int], FetchedUnit]:
    """Return every version that was read by name, level and iteration."""
    found = [*fetched.units.items()]
    found += [item for units in fetched.compute for item in units.items()]
    return {(name, each.entry.level, each.entry.iteration): each for name, each in found}


def key_of(name: str, entry: UnitEntry) -> tuple[str, str, int]:
    return name, entry.level, entry.iteration


def content_of(entry: UnitEntry) -> bytes:
    return WINDOW.content[entry.offset : entry.offset + entry.num_bytes]


def missing_of(entries: Collection[tuple[str, UnitEntry]]) -> set[str]:
    """Return how versions are called that no source has."""
    return {
        name if entry.level == Level.FULL else f"weights of {name} at iteration {entry.iteration}"
        for name, entry in entries
    }
