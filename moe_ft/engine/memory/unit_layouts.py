"""Layouts of a rank's units in its regions and slots, for each plan of its strategy."""

from dataclasses import replace

from moe_ft.engine.memory.layout import Contents, FileLayout, UnitPlace, lay_out, lay_out_window
from moe_ft.planning.sharding import assign_weighted_slices
from moe_ft.state.catalog import Slices, UnitCatalog
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level, UnitId


class UnitLayouts:
    """Lays out the units of one rank."""

    def __init__(self, catalog: UnitCatalog, dp_rank: int) -> None:
        self._catalog, self._dp_rank = catalog, dp_rank
        self._places: dict[UnitId, UnitPlace] = {}
        self.region_bytes: int | None = None  # size of regions, once known

    def lay_out(self, plan: WindowPlan) -> FileLayout:
        """Return the layout of a region; all have the size of regions.

        Raises:
            SnapshotError: if the plan needs more than that.
        """
        return lay_out_window(
            (self._contents(snapshot) for snapshot in plan.snapshots), self.region_bytes
        )

    def _contents(self, plan: SnapshotPlan) -> Contents:
        slices = self._slices(plan)
        return [
            (unit, level, self._catalog.tensors(unit, level, slices))
            for unit, level in plan.levels.items()
            if level is not Level.NONE
        ]

    def _slices(self, plan: SnapshotPlan) -> Slices | None:
        """Return how the plan divides parameters that data-parallel ranks replicate."""
        if plan.shares is None:
            return None
        shared = [
            local
            for local in self._catalog.parameters
            if not local.is_sharded and not local.is_expert
        ]
        assigned = assign_weighted_slices([each.parameter.numel() for each in shared], plan.shares)
        own = assigned[self._dp_rank]
        return {local.name: slice_ for local, slice_ in zip(shared, own, strict=True)}

    def most_bytes(self, unit: UnitId) -> int:
        """Return the bytes that a slot needs for a unit, including versions that another start saved."""
        return self._catalog.most_bytes(unit)

    def place(self, unit: UnitId, offset: int) -> UnitPlace:
        """Return the place in a slot of a unit that this rank saves at least a part of."""
        if unit not in self._places:
            layout = lay_out([(unit, Level.FULL, self._catalog.tensors(unit, Level.FULL))])
            (self._places[unit],) = layout.units
        return replace(self._places[unit], offset=offset)
