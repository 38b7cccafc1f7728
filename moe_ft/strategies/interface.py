"""Strategies: which units a snapshot holds at which level. Pure; the engine knows only this interface."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from moe_ft.format.records import ExpertProgress
from moe_ft.planning.experts import Counts
from moe_ft.planning.lost_tokens import Gaps
from moe_ft.units import Level, UnitId


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """What one snapshot of a rank holds.

    Attributes:
        levels: units that go into the region, together.
        rotating: the units that this snapshot holds and others do not, with their routed tokens and
            their gaps (lost_tokens.py); they go into slots of the pool, at FULL.
        shares: ``[data-parallel rank]`` how the ranks that hold state alike divide the part of it that
            every snapshot holds; None for the division that was made at start.
        progress: returns what the index says of all experts; None without experts to count.
    """

    levels: Mapping[UnitId, Level]
    rotating: Mapping[UnitId, tuple[int, Gaps]] = field(default_factory=dict)
    shares: tuple[int, ...] | None = None
    progress: Callable[[], ExpertProgress] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """What consecutive snapshots of a rank hold, which together hold every unit that is to be saved.

    Attributes:
        snapshots: ``[snapshot]``.
        key: what windows of one strategy have in common whose units lie alike in the region.
        facts: what the event log says of the window; nothing where all are alike.
    """

    snapshots: tuple[SnapshotPlan, ...]
    key: Hashable = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Strategy(Protocol):
    """Decides what each snapshot holds; the same on every rank that shares a unit."""

    @property
    def saves_all(self) -> bool:
        """Whether every window holds every unit."""
        ...

    @property
    def rotating(self) -> frozenset[UnitId]:
        """Units of this rank that only some windows hold; their newest versions are kept."""
        ...

    @property
    def most_rotating(self) -> int:
        """The most of them that one snapshot of this rank holds."""
        ...

    @property
    def counted_layers(self) -> tuple[str, ...]:
        """MoE layers of the stage whose tokens `add_tokens` wants, of iterations that were not skipped."""
        ...

    def plan_window(self, iteration: int, *, is_last: bool = False) -> WindowPlan:
        """Return what the snapshots of a window hold.

        Args:
            iteration: of the state that the first one is of.
            is_last: whether training has ended, so that there is no further iteration for a second
                snapshot, and windows are taken until `is_whole`.
        """
        ...

    def possible_windows(self) -> list[WindowPlan]:
        """Return windows that have all keys of the first plans, and the most memory that any may take."""
        ...

    @property
    def memory_margin(self) -> float:
        """How much more memory than `possible_windows` another one may take, as a fraction."""
        ...

    def is_whole(self, iteration: int) -> bool:
        """Return whether the complete windows hold every unit of the stage at this iteration."""
        ...

    def values(self, copied_bytes: float | None, flow_bytes: float | None) -> list[int]:
        """Return what goes into the agreement, which takes the least; equally many at each call.

        Args:
            copied_bytes: what this rank can copy while forward and backward run, None until measured.
            flow_bytes: what it can commit and replicate in an iteration, None until measured.
        """
        ...

    def agree(self, values: list[int]) -> dict[str, int]:
        """Act on the least values over all ranks; return what that changed, by name."""
        ...

    def add_tokens(self, counts: Counts) -> None:
        """Note the ``[layer, expert]`` tokens that the experts of the stage got in an iteration."""
        ...

    def note_complete(self, iteration: int) -> None:
        """All ranks have the window of the last plan, which ends at this iteration."""
        ...

    def plan_persist(self, *, is_last: bool = False) -> frozenset[UnitId]:
        """Return the rotating units of this rank whose versions in memory go to storage now.

        Args:
            is_last: whether training has ended: everything goes.
        """
        ...

    def note_persisted(self) -> None:
        """The checkpoint of the last `plan_persist` is complete on storage."""
        ...


class SingleSnapshots(ABC):
    """Windows of one snapshot, for strategies that need no others."""

    memory_margin = 0.0

    @abstractmethod
    def plan(self, iteration: int, *, is_last: bool = False) -> SnapshotPlan:
        """Return what the snapshot of an iteration holds; see `Strategy.plan_window`."""

    @abstractmethod
    def possible_plans(self) -> list[SnapshotPlan]:
        """Return plans such that every plan divides what data-parallel ranks share like one of them."""

    def plan_window(self, iteration: int, *, is_last: bool = False) -> WindowPlan:
        """Return the plan as a window."""
        return _window_of(self.plan(iteration, is_last=is_last))

    def possible_windows(self) -> list[WindowPlan]:
        """Return the plans as windows."""
        return [_window_of(plan) for plan in self.possible_plans()]


def _window_of(plan: SnapshotPlan) -> WindowPlan:
    return WindowPlan(snapshots=(plan,), key=plan.shares)


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
