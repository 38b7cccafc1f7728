"""Interface of the strategies: what the engine and recovery ask of one, and what they tell it.

A strategy decides which units each snapshot holds at which level. It copies nothing, sends nothing and reads
no clock. Its properties and `plan_window`, `possible_windows`, `is_whole`, `values` and `plan_persist` change
nothing, however often they are asked. What a strategy has to remember of an answer travels in the plan's memo
and comes back with `note_begun`, `note_complete` and `note_persisted`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import ConfigPart
from moe_ft.errors import ConfigError
from moe_ft.format.records import ExpertProgress, Gaps
from moe_ft.planning.experts import Counts, ExpertFacts
from moe_ft.planning.lost_tokens import Debts, Loss, UnitVersion
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.planning.report import StrategyPlan
from moe_ft.units import Level, UnitId


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotPlan:
    """Contents of one snapshot of a rank.

    Attributes:
        rotating: units that this snapshot holds and others do not, each with its routed tokens and its gaps
            (planning/lost_tokens.py); they go into slots of the pool, at FULL.
        remote: rotating units whose newest versions in memory, those of this snapshot included, go to peers;
            of all others peers keep the version that they have, and this rank keeps it too. None if peers
            get whatever they lack.
        shares: ``[data-parallel rank]`` division of the state that every snapshot holds and all these ranks
            have; None for the division that was made at start.
        progress: returns what the index says of all experts; None without experts to count.
    """

    levels: Mapping[UnitId, Level]
    rotating: Mapping[UnitId, tuple[int, Gaps]] = field(default_factory=dict)
    remote: frozenset[UnitId] | None = None
    shares: tuple[int, ...] | None = None
    progress: Callable[[], ExpertProgress] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """Contents of consecutive snapshots of a rank, which together hold every unit that is to be saved.

    Attributes:
        snapshots: ``[snapshot]``.
        key: equal for windows of one strategy whose units lie in the region in the same places.
        facts: fields of the event about this window; empty for windows that are all the same.
        hint: a sentence on how to make such snapshots smaller; empty if there is no way.
        memo: for the strategy alone, see `Strategy.note_begun`.
    """

    snapshots: tuple[SnapshotPlan, ...]
    key: Hashable = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""
    memo: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PersistPlan:
    """Rotating units of a rank whose versions in memory go to storage.

    Attributes:
        memo: for the strategy alone, see `Strategy.note_persisted`.
    """

    units: frozenset[UnitId] = frozenset()
    memo: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """State that a recovery has put back, as the strategy needs to know it.

    Attributes:
        window: snapshots in the window that it was recovered from.
        progress: of its experts; None if the strategy that saved it counted no tokens.
        restored: versions of the rotating units of the stage, by unit name; a unit that is missing got the
            state that the run began with.
        in_memory: likewise, the versions that memory has for the next snapshots; None if these are the
            restored ones.
        persisted: likewise, the versions in the newest checkpoint on storage.
        gaps_before: ``[expert]`` by layer name, of the newest state that is known.
    """

    iteration: int
    window: int = 1
    progress: ExpertProgress | None = None
    restored: Mapping[str, UnitVersion] = field(default_factory=dict)
    in_memory: Mapping[str, UnitVersion] | None = None
    persisted: Mapping[str, UnitVersion] = field(default_factory=dict)
    gaps_before: Mapping[str, Sequence[Gaps]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobLoss:
    """Cost of a recovery for the whole job: nothing, unless a strategy says otherwise.

    Attributes:
        lost_tokens, plt: by this recovery.
    """

    lost_tokens: int = 0
    plt: float = 0.0
    total_plt: float = 0.0

    def fields(self) -> dict[str, Any]:
        """Return the fields of the recovery's event."""
        return {"lost_tokens": self.lost_tokens, "plt": self.plt}


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBytes:
    """Bytes that a rank can move in an iteration, each None until measured.

    Attributes:
        copied_bytes: that it can copy while forward and backward run.
        flow_bytes: that it can commit and replicate.
        committed_bytes, sent_bytes: that it can commit, and send to its peers, each on its own.
        can_follow: whether its peers can make replicas of gradients.
    """

    copied_bytes: float | None = None
    flow_bytes: float | None = None
    committed_bytes: float | None = None
    sent_bytes: float | None = None
    can_follow: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """Units that only some windows hold: memory and storage keep the newest version of each.

    Attributes:
        units: of this rank, which may have none although others do.
        is_empty: whether every window of all ranks holds every unit; the same on all ranks.
    """

    units: frozenset[UnitId] = frozenset()
    is_empty: bool = True


PlanBreakpoint = Callable[[Callable[[], Counts | None]], SnapshotPlan]


class Strategy(ABC):
    """Decides the contents of each snapshot of a rank, in agreement with all ranks that share a unit.

    The defaults are those of a strategy whose windows all hold every unit. Owned by the training thread.
    """

    rotation = Rotation()
    """Units that only some windows hold; fixed when the strategy is built."""

    counted_layers: tuple[str, ...] = ()
    """MoE layers of the stage whose tokens `add_tokens` wants, of iterations that were not skipped."""

    debts: Debts | None = None
    """Tokens of these layers to be made up above the capacity of experts; None without such a boost."""

    @property
    @abstractmethod
    def always(self) -> Collection[UnitId]:
        """Units of this rank that every window holds."""

    @property
    def followable(self) -> Collection[UnitId]:
        """Rotating units of this rank that peers may ever follow by gradients."""
        return ()

    @property
    def followed(self) -> Collection[UnitId]:
        """Rotating units of this rank that peers follow in the next step: the next snapshot has them."""
        return ()

    @property
    def memory_margin(self) -> float:
        """Fraction by which a window may take more memory than each of `possible_windows`."""
        return 0.0

    @property
    def most_rotating(self) -> int:
        """The largest number of rotating units in a snapshot of this rank."""
        return 0

    @property
    def most_retained(self) -> int:
        """The largest number of rotating units of which peers have an older version than this rank."""
        return 0

    @abstractmethod
    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        """Return the contents of the next window.

        Args:
            is_whole: whether it must be one snapshot with every unit at this iteration: training has ended,
                or the state goes to storage as a whole. At the end, where memory has no room for that,
                windows are taken until `is_whole`.
        """

    def possible_windows(self) -> list[WindowPlan]:
        """Return windows that have all keys of the first plans, and the most memory that any may take."""
        return [self.plan_window(0)]

    def is_whole(self, iteration: int) -> bool:
        """Return whether the complete windows hold every unit of the stage at this iteration."""
        return True

    def values(self) -> list[int]:
        """Return this rank's part of the agreement, which takes the least; always equally many."""
        return []

    def plan_breakpoint(self) -> "PlanBreakpoint":
        """Return what plans one snapshot with every unit at FULL in its region, of the state as it is now.

        Any thread may call the result later, with what returns the tokens of an iteration that has stepped
        and that `add_tokens` has not been told of; None if there are none. What it returns, and its places,
        depend on no state but the counts.
        """
        plan = SnapshotPlan(levels=dict.fromkeys(sorted(self.always), Level.FULL))
        return lambda tokens: plan

    def plan_persist(self, *, is_whole: bool = False) -> PersistPlan:
        """Return the rotating units of this rank whose versions in memory go to storage now."""
        return PersistPlan()

    def add_tokens(self, counts: Counts) -> None:
        """Note the ``[layer, expert]`` tokens that the experts of the stage got in an iteration.

        With `debts`, those above their capacity follow as further rows.
        """

    def at_risk(self) -> Mapping[str, int]:
        """Return by target the tokens of the stage whose updates are not there yet; nothing if none count."""
        return {}

    def note_measured(self, measured: MeasuredBytes) -> None:
        """Note what this rank can do in an iteration, before `values` are asked for."""

    def agree(self, values: list[int]) -> dict[str, int]:
        """Act on the least values over all ranks; return what that changed, by name."""
        return {}

    def note_begun(self, plan: WindowPlan) -> None:
        """Note that a planned window was begun. Called on all ranks."""

    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        """Note that all ranks have a window, which ends at this iteration."""

    def note_sent(self, plan: WindowPlan) -> None:
        """Note that the peers of all ranks have what the complete window was to bring them.

        Called after `note_complete`, and not if a peer of any rank lacks something of it.
        """

    def note_persisted(self, plan: PersistPlan) -> None:
        """Note that the checkpoint with these units is complete on storage."""

    def resume(self, resumed: Resumed) -> Loss | None:
        """Continue from a recovered state; return its cost for the stage, None if it has none.

        Called on all ranks.
        """
        return None

    def settle_losses(self, losses: Sequence[Loss | None]) -> JobLoss | None:
        """Act on what the stages of all ranks have lost; return the cost for the job, None if it has none."""
        return None


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

    def owns(self, unit: UnitId) -> bool:
        """Return whether this rank saves something of a unit or a part of one."""

    def num_bytes(self, unit: UnitId, level: Level = Level.FULL, *, alignment: int = 1) -> int:
        """Return the bytes that this rank saves of it, each tensor rounded up to an alignment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """Facts about a rank that its strategy is built from.

    Attributes:
        dp_ep_ranks: ``[data-parallel rank]`` its expert-parallel rank.
        grouped_layers: layers whose experts on this rank are one module and can be frozen only together.
        replicated_bytes: state outside experts that all data-parallel ranks hold, undivided.
        gather: exchanges values of a type among the ranks of the stage, all of which must call it.
        gradient_bytes: of a gradient, as peers get it that follow.
    """

    rank: int
    catalog: UnitSizes
    experts: ExpertFacts
    dp_ep_ranks: Sequence[int]
    grouped_layers: frozenset[str]
    replicated_bytes: int
    gather: Callable[[Any, Decoder[Any]], list[Any]]
    gradient_bytes: int = 4


@dataclass(frozen=True, kw_only=True)
class StrategyKind(ABC):
    """A strategy before any rank has built it: its name, its options, and what it asks of a job.

    Attributes:
        options: dataclass whose fields become flags, None for a strategy without flags of its own.
        is_exact: whether a recovery brings back the state as it was, bit for bit.
        replays: whether a recovery runs iterations again. Their settings must then be those of the run.
        leaves_out_frozen: whether parameters that are not trained are in no unit.
        follows_gradients: whether peers can make its replicas of gradients: every snapshot is a window, and
            the region of each holds the same units at FULL. Of what lies in slots `Strategy.followed` is
            made of gradients too.
        fills_regions: whether all of a snapshot lies in its region, and nothing in slots of a pool.
        adaptive_with: flags that make `can_shard_adaptively` true; empty if none do.
        memory_remedy: what makes snapshots smaller, as a sentence; empty if nothing does.
        seen_on_gpu: date, card, versions and page of a run on a GPU; empty for none.
    """

    name: str
    options: type[ConfigPart] | None = None
    is_exact: bool = True
    replays: bool = False
    leaves_out_frozen: bool = False
    follows_gradients: bool = False
    fills_regions: bool = True
    adaptive_with: str = ""
    memory_remedy: str = ""
    seen_on_gpu: str = ""

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

    def contents(self, config: MoeFtConfig) -> str:
        """Return words for what a snapshot holds, as a start prints them."""
        return "what this strategy selects"

    def longest_window(self, config: MoeFtConfig) -> int:
        """Return the most snapshots of a window."""
        return 1

    def check(self, config: MoeFtConfig, model: ModelFacts) -> None:
        """Raise ConfigError if the strategy cannot work with these settings or this model.

        Called a second time when the number of iterations is known.
        """

    def plan(self, job: PlannedJob) -> StrategyPlan:
        """Return what the strategy costs a job that has it.

        Raises:
            ConfigError: if the job cannot be planned.
        """
        raise ConfigError(
            f"--moe-ft-strategy={self.name} cannot be planned: it brings no plan. Name another strategy."
        )

    @abstractmethod
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        """Return the strategy of a rank. Called by all ranks of a stage."""
