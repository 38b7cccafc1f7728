"""The strategy `dense`: every unit in full in every snapshot. Sources: CheckFreq, Gemini."""

from collections.abc import Iterable

from moe_ft.planning.experts import Counts
from moe_ft.strategies.interface import SingleSnapshots, SnapshotPlan
from moe_ft.units import Level, UnitId


class DenseStrategy(SingleSnapshots):
    """Every unit FULL in every snapshot. Sources: CheckFreq, Gemini."""

    saves_all = True
    rotating: frozenset[UnitId] = frozenset()
    most_rotating = 0
    counted_layers: tuple[str, ...] = ()

    def __init__(self, units: Iterable[UnitId]) -> None:
        self._plan = SnapshotPlan(levels=dict.fromkeys(units, Level.FULL))

    def plan(self, iteration: int, *, is_last: bool = False) -> SnapshotPlan:
        """Return FULL for every unit."""
        return self._plan

    def possible_plans(self) -> list[SnapshotPlan]:
        """Return the only one."""
        return [self._plan]

    def is_whole(self, iteration: int) -> bool:
        """Every snapshot is."""
        return True

    def values(self, copied_bytes: float | None, flow_bytes: float | None) -> list[int]:
        """Nothing is agreed on."""
        return []

    def agree(self, values: list[int]) -> dict[str, int]:
        """Nothing changes."""
        return {}

    def add_tokens(self, counts: Counts) -> None:
        """Nothing depends on them."""

    def note_complete(self, iteration: int) -> None:
        """Nothing depends on it."""

    def plan_persist(self, *, is_last: bool = False) -> frozenset[UnitId]:
        """Nothing rotates."""
        return frozenset()

    def note_persisted(self) -> None:
        """Nothing depends on it."""
