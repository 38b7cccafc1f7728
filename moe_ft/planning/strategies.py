"""Strategies: which units a snapshot holds at which level. Pure; the engine knows only this interface."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from moe_ft.units import Level, UnitId

SnapshotPlan = Mapping[UnitId, Level]


class Strategy(Protocol):
    """Decides what each snapshot holds; the same on every rank that shares a unit."""

    def plan(self, iteration: int) -> SnapshotPlan:
        """Return the level of every unit of this rank in the snapshot of an iteration."""
        ...


class DenseStrategy:
    """Every unit FULL in every snapshot. Sources: CheckFreq, Gemini."""

    def __init__(self, units: Iterable[UnitId]) -> None:
        self._plan = dict.fromkeys(units, Level.FULL)

    def plan(self, iteration: int) -> SnapshotPlan:
        """Return FULL for every unit."""
        return self._plan
