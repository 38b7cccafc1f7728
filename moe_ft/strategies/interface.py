"""Strategies: which units a snapshot holds at which level. Pure; the engine knows only this interface."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import Part
from moe_ft.errors import ConfigError
from moe_ft.format.records import ExpertProgress
from moe_ft.planning.experts import Counts, ExpertFacts
from moe_ft.planning.lost_tokens import Gaps
from moe_ft.planning.planned_job import PlannedJob
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


class Counting(Enum):
    """Numbers that the routers of a run sum up for its strategy, by expert and iteration."""

    NOTHING = auto()
    TOKENS = auto()
    PROBABILITIES = auto()  # that the gate gives to all experts


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about the model and its training that strategies check at start.

    Attributes:
        num_experts: per MoE layer; 0 for a model without experts.
        num_iterations: of the whole training, None if that is not known yet.
    """

    num_experts: int
    num_iterations: int | None = None


class UnitSizes(Protocol):
    """The units of a rank and their sizes."""

    @property
    def units(self) -> tuple[UnitId, ...]:
        """Whole units."""
        ...

    def owns(self, unit: UnitId) -> bool:
        """Return whether this rank saves something of a unit or a part of one."""
        ...

    def num_bytes(self, unit: UnitId, level: Level = Level.FULL, *, alignment: int = 1) -> int:
        """Return the bytes that this rank saves of it, each tensor rounded up to an alignment."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Facts about a rank that its strategy is built from.

    Attributes:
        rank: global.
        catalog: the rank's units.
        experts: of the job.
        dp_ep_ranks: ``[data-parallel rank]`` its expert-parallel rank.
        grouped_layers: layers whose experts on this rank are one module and can be frozen only together.
        replicated_bytes: state outside experts that all data-parallel ranks hold, undivided.
        gather: exchanges values among the ranks of the stage, all of which must call it.
    """

    rank: int
    catalog: UnitSizes
    experts: ExpertFacts
    dp_ep_ranks: Sequence[int]
    grouped_layers: frozenset[str]
    replicated_bytes: int
    gather: Callable[[Any], list[Any]]


@dataclass(frozen=True, kw_only=True)
class StrategyKind(ABC):
    """A strategy before any rank has built it: its name, its options, and what it asks of a job.

    Attributes:
        name: value of --moe-ft-strategy.
        options: dataclass whose fields become flags, None for a strategy without flags of its own.
        is_exact: whether a recovery brings back the state as it was, bit for bit.
        replays: whether a recovery runs iterations again. Their settings must then be those of the run.
        leaves_out_frozen: whether parameters that are not trained are in no unit.
        adaptive_with: flags that make `can_shard_adaptively` true; empty if none do.
        memory_remedy: what makes snapshots smaller, as a sentence; empty if nothing does.
    """

    name: str
    options: type[Part] | None = None
    is_exact: bool = True
    replays: bool = False
    leaves_out_frozen: bool = False
    adaptive_with: str = ""
    memory_remedy: str = ""

    def options_in(self, config: MoeFtConfig) -> Any:
        """Return this strategy's options, the defaults if the settings hold none."""
        assert self.options is not None
        return config.options.get(self.name, self.options())

    def counting(self, config: MoeFtConfig) -> Counting:
        """Return what routers count."""
        return Counting.NOTHING

    def division(self, config: MoeFtConfig) -> str:
        """Return how experts are divided among snapshots and ranks; empty if they are not."""
        return ""

    def can_shard_adaptively(self, config: MoeFtConfig) -> bool:
        """Return whether replicated state may be divided by the selected experts of each rank."""
        return False

    def check(self, config: MoeFtConfig, model: ModelFacts) -> None:
        """Raise ConfigError if the strategy cannot work with these settings or this model.

        Called a second time when the number of iterations is known.
        """

    def plan(self, job: PlannedJob) -> str:
        """Return what `python -m moe_ft plan` says of a job.

        Raises:
            ConfigError: if the strategy cannot plan the job, or any.
        """
        raise ConfigError(
            f"--moe-ft-strategy={self.name} cannot be planned: it has no plan. Name another one."
        )

    @abstractmethod
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        """Return the strategy of a rank. Called by all ranks of a stage."""
