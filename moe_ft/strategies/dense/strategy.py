"""The strategy `dense`: every unit in full in every snapshot. Sources: CheckFreq, Gemini."""

from collections.abc import Collection, Iterable

from moe_ft.strategies.interface import SnapshotPlan, Strategy, WindowPlan
from moe_ft.units import Level, UnitId


class DenseStrategy(Strategy):
    """Takes windows of one snapshot with everything in it."""

    def __init__(self, units: Iterable[UnitId]) -> None:
        snapshot = SnapshotPlan(levels=dict.fromkeys(units, Level.FULL))
        self._plan = WindowPlan(snapshots=(snapshot,))

    @property
    def always(self) -> Collection[UnitId]:
        """All units."""
        return self._plan.snapshots[0].levels.keys()

    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        """Return the same window every time."""
        return self._plan
