"""The plan of sparse windows (MoEvement): bytes of snapshots and windows, iterations that run again.

Headers and records are left out. strategy.py orders and cuts units while training runs. The units of a job
are in planning/planned_job.py; planning/job_costs.py makes costs of the sizes. Last comes the strategy as the
registry lists it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import override

import numpy as np
import numpy.typing as npt
from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.experts import experts_of_stage
from moe_ft.planning.host_memory import Footprint, MemoryShare
from moe_ft.planning.job_costs import (
    Sizes,
    known_links,
    needed_links,
    places,
    storage_flags,
)
from moe_ft.planning.planned_job import PlannedJob, PlannedStage
from moe_ft.planning.report import StrategyPlan, Table, megabytes
from moe_ft.strategies.interface import Counting, ModelFacts, RankFacts, Strategy, StrategyKind
from moe_ft.strategies.sparse.strategy import MEMORY_MARGIN, SparseConfig, SparseStrategy
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    RankUnits,
    StageOrder,
    StageUnits,
    WindowCuts,
    cut_window,
    rank_units,
    reserved_window_bytes,
    shortest_window,
    snapshot_bytes,
)
from moe_ft.units import UnitId, UnitKind

_NUM_ORDERS = 4
_MOST_SNAPSHOT_ROWS = 16
WEIGHT_GRADIENT_SHARE = 1 / 3  # of a layer's matrix products: forward, input and weight gradients


@functools.lru_cache(maxsize=32)  # advice asks for the same orders again and again
def order_stage(
    stage: PlannedStage, num_experts: int, seed: int, *, is_grouped: bool
) -> StageOrder:
    """Return the units of a stage as the strategy orders them.

    Args:
        seed: draws how popular experts are; 0 draws the order that training begins with.
        is_grouped: whether a rank's experts of a layer are one module, frozen only as a whole.
    """
    layers, _ = experts_of_stage([rank.units for rank in stage.ranks], num_experts)
    grouped = frozenset(layers if is_grouped else ())
    ranks = [rank_units(rank.ep_rank, rank, grouped) for rank in stage.ranks]
    scores = np.random.default_rng(seed).random((len(layers), max(1, num_experts)))
    return StageUnits(ranks, layers).order(scores)


def position_work(
    order: StageOrder, elements: Mapping[UnitId, int], active_share: float, *, is_grouped: bool
) -> npt.NDArray[np.float64]:
    """Return ``[position]`` the parameters that a token passes through and that freeze there, on average.

    Experts that are one module are frozen for as long as the first of them is.

    Args:
        elements: parameters of each unit.
        active_share: of the experts of a layer, those that a token goes to.
    """
    work = np.zeros(order.sizes.num_positions)
    for number, column in enumerate(order.columns.values()):
        firsts: dict[str, int] = {}
        for place, unit in enumerate(column):
            if unit is None:
                continue
            if unit.kind is UnitKind.EXPERT:
                at = firsts.setdefault(unit.layer_name, place) if is_grouped else place
                work[at] += elements[unit] * active_share
            # An embedding is looked up: there is no matrix product whose gradient could be left out.
            elif number == 0 and unit.kind is not UnitKind.EMBEDDING:
                work[place] += elements[unit]
    return work


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSize:
    """Sizes of windows of one length, on the ranks that need the most.

    Attributes:
        cuts: ``[stage]``.
        snapshots: ``[snapshot]`` the most bytes that a rank of any stage saves.
        window_bytes: the most that a rank saves in a whole window.
        dense_bytes: the most that a rank saves in a snapshot of everything at FULL.
    """

    cuts: tuple[WindowCuts, ...]
    snapshots: tuple[int, ...]
    window_bytes: int
    dense_bytes: int

    @property
    def length(self) -> int:
        """Snapshots of the window."""
        return len(self.snapshots)

    @property
    def largest_bytes(self) -> int:
        """The largest snapshot of any rank."""
        return max(self.snapshots)

    @property
    def mean_bytes(self) -> float:
        """The mean over the snapshots of the largest of each."""
        return sum(self.snapshots) / self.length


def measure_window(stages: Sequence[PositionSizes], length: int) -> WindowSize:
    """Return what windows of a length take if the largest snapshot of each stage is the least possible."""
    cuts = tuple(cut_window(stage, length) for stage in stages)
    by_stage = [snapshot_bytes(stage, each.ends) for stage, each in zip(stages, cuts, strict=True)]
    return WindowSize(
        cuts=cuts,
        snapshots=tuple(np.max([of_stage.max(axis=0) for of_stage in by_stage], axis=0).tolist()),
        window_bytes=int(max(of_stage.sum(axis=1).max() for of_stage in by_stage)),
        dense_bytes=int(max(stage.full.sum(axis=1).max() for stage in stages)),
    )


def choose_length(stages: Sequence[PositionSizes], budget_bytes: float, longest: int) -> int:
    """Return the longest of the shortest windows that fit the stages.

    Args:
        stages: of the job, which agree on one length.
        budget_bytes: what any rank can copy in one snapshot.
        longest: snapshots that the window may have, which it has if none fits.

    Source: MoEvement, Algorithm 1, FindWindowSize, by bytes; see windows.py.
    """
    shortest = [shortest_window(stage, budget_bytes, longest) for stage in stages]
    return max(
        cuts.length if cuts.largest_bytes <= budget_bytes else _longest(stage, longest)
        for stage, cuts in zip(stages, shortest, strict=True)
    )


def region_bytes(
    stages: Sequence[PositionSizes], longest: int, margin: float, *, shortest: int = 1
) -> int:
    """Return what a region of the rank that needs the most has room for.

    It is made for the longest window, as the strategy's (see `reserved_window_bytes`).

    Args:
        stages: of the job, in the order that training begins with.
        margin: fraction that is also reserved, for other orders.
    """
    lengths = [_longest(stage, longest) for stage in stages]
    most = max(
        float(reserved_window_bytes(stage, min(shortest, length), length).max())
        for stage, length in zip(stages, lengths, strict=True)
    )
    return math.ceil(most * (1 + margin))


def _longest(stage: PositionSizes, longest: int) -> int:
    return max(1, min(longest, stage.num_positions))


def work_to_redo(window: int, lag: int) -> tuple[int, float, int]:
    """Return the least, mean and most iterations that a failure makes run again, conversion included.

    The newest window that peers have began ``window + lag`` to twice as many iterations ago; half an
    iteration that was under way is part of the mean. MoEvement (section 3.6) prints 0 to 2 W and a mean
    of 1.5 W; its least is reached only if recovery were free. The lag delays the next window too.

    Args:
        lag: iterations until peers have its last snapshot.
    """
    period = window + lag
    return period, 1.5 * period, 2 * period


def frozen_s(
    window: WindowSize, iteration_s: float, works: Sequence[npt.NDArray[np.float64]]
) -> float:
    """Return the time that frozen units save in the conversion of a window at best.

    A window of W snapshots is converted by W - 1 replays (recovery/restore.py; MoEvement, section 3.3,
    has one more). At best a frozen unit costs no weight gradient, and the slowest stage, which all wait for,
    does nothing else but matrix products.

    Args:
        works: ``[stage][position]`` as of `position_work`.
    """
    frozen = sum(
        min(
            _frozen_share(work, cuts.ends[replay])
            for work, cuts in zip(works, window.cuts, strict=True)
        )
        for replay in range(window.length - 1)
    )
    return frozen * WEIGHT_GRADIENT_SHARE * iteration_s


def _frozen_share(work: npt.NDArray[np.float64], end: int) -> float:
    total = float(work.sum())
    return float(work[end:].sum()) / total if total else 0.0


class SparsePlan(StrategyPlan):
    """Plan of sparse windows. What frozen units save is left out of the costs."""

    def __init__(
        self,
        job: PlannedJob,
        options: SparseConfig,
        *,
        window: int | None = None,
        is_grouped: bool | None = None,
    ) -> None:
        """Take the job.

        Args:
            window: snapshots of it, instead of what the options give.
            is_grouped: whether the experts of a layer on a rank freeze together, instead of what the job has.
        """
        super().__init__(job, "sparse")
        self._options = options
        self._given = options.window_snapshots if window is None else window
        self._is_grouped = job.model.is_grouped if is_grouped is None else is_grouped
        self.longest_window = self._given or options.max_window
        self._links = known_links(job)
        # Which experts will be popular does not depend on who owns them: orders are drawn. With one owner
        # of each expert it makes no difference.
        has_owners = job.model.num_moe_layers > 0 and job.num_expert_owners > 1
        self._num_orders = _NUM_ORDERS if has_owners else 1

    def _orders(self, seed: int = 0) -> list[StageOrder]:
        """Return ``[stage]`` an order of popularity; training begins with that of 0."""
        num_experts = self.job.model.num_experts
        return [
            order_stage(stage, num_experts, seed, is_grouped=self._is_grouped)
            for stage in self.job.stages
        ]

    @functools.cached_property
    def _largest(self) -> tuple[WindowSize, int]:
        """The window, and the order of popularity whose largest snapshot is the largest."""
        orders = [[order.sizes for order in self._orders(seed)] for seed in range(self._num_orders)]
        length = self._given
        if length is None:
            if self._links is None:
                raise ConfigError(
                    "--moe-ft-window=auto needs --iteration-s and --bandwidth: it is the shortest window "
                    "whose snapshots can be copied in an iteration. Give them before the --, or a number "
                    "with --moe-ft-window."
                )
            budget, most = self._links.budget_bytes, self._options.max_window
            length = max(choose_length(stages, budget, most) for stages in orders)
        windows = [measure_window(stages, length) for stages in orders]
        seed = max(range(self._num_orders), key=lambda number: windows[number].largest_bytes)
        return windows[seed], seed

    @property
    def window(self) -> WindowSize:
        """The window."""
        return self._largest[0]

    @functools.cached_property
    @override
    def sizes(self) -> Sizes:
        return Sizes(
            snapshots=self.window.snapshots,
            interval=1,
            persisted_bytes=self.window.window_bytes,
            read_bytes=self.window.window_bytes,
            whole_bytes=self.window.dense_bytes,
        )

    @functools.cached_property
    @override
    def footprint(self) -> Footprint:
        stages = [order.sizes for order in self._orders()]
        shortest = self._given or 1
        reserved = region_bytes(stages, self.longest_window, MEMORY_MARGIN, shortest=shortest)
        share = MemoryShare(
            region_bytes=reserved,
            breakpoint_bytes=self.job.breakpoint_bytes,
            index_bytes=self.job.index_bytes(self.longest_window),
        )
        return Footprint(
            share=share,
            checkpoint_bytes=self.job.num_ranks * reserved,
            num_older=int(self.job.config.storage.keeps_whole),
        )

    @override
    def choices(self) -> Mapping[str, Sequence[str]]:
        job, window = self.job, self.window
        period = window.length + needed_links(job).lag_iterations(window.snapshots)
        write_s = window.window_bytes / (job.measured.storage_bandwidth or math.inf)
        flags = [f"--moe-ft-window={window.length}"]
        return {
            place: [*flags, *storage_flags(job, period, write_s, at_peers=at_peers)]
            for place, at_peers in [*places(job).items()][:1]
        }

    @override
    def report(self) -> str:
        if self._links is not None or self.job.measured.mtbf_s is not None:
            needed_links(self.job)
        return super().report()

    @override
    def notes(self) -> list[str]:
        job, found = self.job, []
        compute = sum(each.compute for each in job.heaviest.sizes.values())
        found.append(
            f"sharding {job.config.strategy.sharding}; {compute / job.heaviest.num_elements:.3g} bytes of a "
            "parameter saved at COMPUTE"
        )
        if self._is_grouped:
            found.append(
                "grouped GEMM: a rank's experts of a layer freeze together, so they are saved together"
            )
        if self._num_orders > 1:
            found.append(
                f"who owns which expert matters: of {self._num_orders} orders of popularity, drawn at "
                "random, the one with the largest snapshot"
            )
        num_units = max(order.sizes.num_positions for order in self._orders())
        if self._given is not None and self._given > num_units:
            found.append(
                f"warning: --moe-ft-window={self._given} is more than the {num_units} units that a rank "
                "holds: snapshots without a unit save nothing and make every recovery longer. Give at most "
                f"{num_units}, or auto."
            )
        return found

    @override
    def rows(self) -> list[tuple[str, str]]:
        links, window = self._links, self.window
        if links is None:
            return [("window", f"{window.length}, as given")]
        budget, lag = links.budget_bytes, links.lag_iterations(window.snapshots)
        fits = window.largest_bytes <= budget
        why = (
            "the shortest whose snapshots fit" if fits else "the longest that is allowed: none fits"
        )
        way = "copied to the host"
        if links.hidden_s * links.bandwidth > budget:
            peers = "peer" if links.replication_factor == 1 else "peers"
            way = f"sent to {links.replication_factor} {peers}"
        found = [
            ("window", f"{window.length}, {why if self._given is None else 'as given'}"),
            (
                "budget of a snapshot",
                f"{megabytes(budget)} MB can be {way} in an iteration; the largest has "
                f"{megabytes(window.largest_bytes)} MB and {'fits' if fits else 'does NOT fit'}",
            ),
        ]
        if lag:
            value = (
                f"{lag} {'iteration' if lag == 1 else 'iterations'} after the window: one every "
                f"{window.length + lag} iterations"
            )
            found.append(("replicas of its last snapshot are complete", value))
        return found

    @override
    def tables(self) -> list[Table]:
        window, dense = self.window, self.window.dense_bytes
        rows: list[tuple[str, float]] = [
            ("first", window.snapshots[0]),
            ("largest", window.largest_bytes),
            ("mean", window.mean_bytes),
        ]
        if 1 < window.length <= _MOST_SNAPSHOT_ROWS:
            rows += [(f"{number}", size) for number, size in enumerate(window.snapshots, 1)]
        cells = [(name, megabytes(size), f"{1 - size / dense:.1%}") for name, size in rows]
        headers = ("snapshot, heaviest rank", "MB", "less than dense")
        return [(headers, [*cells, ("dense", megabytes(dense), "")])]

    @override
    def shares(self) -> dict[str, MemoryShare]:
        reserved = self.footprint.share
        now = dataclasses.replace(reserved, region_bytes=self.window.window_bytes)
        return {
            f"windows of {self.window.length}": now,
            "reserved": reserved,
            "dense": self.full_share,
        }

    @override
    def replays(self) -> list[str]:
        links, window = self._links, self.window
        assert links is not None
        lag = links.lag_iterations(window.snapshots)
        least, mean, most = work_to_redo(window.length, lag)
        saves = f"frozen units save {self._frozen_s():.3f} s of the conversion at best"
        model = self.job.model
        if model.num_experts not in (0, self.job.ep) and not self.job.config.elastic.expert_slots:
            other = SparsePlan(
                self.job, self._options, window=window.length, is_grouped=not self._is_grouped
            )
            way = "without" if self._is_grouped else "with"
            saves += (
                f", {other._frozen_s():.3f} s {way} grouped GEMM (largest snapshot "
                f"{megabytes(other.window.largest_bytes)} MB)"
            )
        return [
            f"iterations that run again, conversion included: {least} to {most}, {mean:.1f} on average; "
            f"{saves}"
        ]

    def _frozen_s(self) -> float:
        window, seed = self._largest
        share = self.job.model.active_share
        works = [
            position_work(order, stage.elements, share, is_grouped=self._is_grouped)
            for order, stage in zip(self._orders(seed), self.job.stages, strict=True)
        ]
        return frozen_s(window, self.job.measured.iteration_s or 0.0, works)


_UNITS = Decoder(tuple[int, RankUnits])


@dataclass(frozen=True, kw_only=True)
class Sparse(StrategyKind):
    """Needs a snapshot of every iteration."""

    @override
    def counting(self, config: MoeFtConfig) -> Counting:
        options: SparseConfig = self.options_in(config)
        return Counting.PROBABILITIES if options.is_soft else Counting.TOKENS

    @override
    def check(self, config: MoeFtConfig, model: ModelFacts) -> None:
        if config.strategy.interval != "1":
            raise ConfigError(
                f"--moe-ft-interval={config.strategy.interval} must be 1 with --moe-ft-strategy sparse: a "
                "window needs a snapshot of every iteration. Leave it out; --moe-ft-window says how much "
                "each of them holds."
            )
        options: SparseConfig = self.options_in(config)
        window, num_iterations = options.window_snapshots, model.num_iterations
        if window is not None and num_iterations is not None and window > num_iterations:
            raise ConfigError(
                f"--moe-ft-window={window} must be at most --train-iters={num_iterations}: a window is of "
                "use when it is complete. Lower it, or use auto."
            )

    @override
    def plan(self, job: PlannedJob) -> StrategyPlan:
        return SparsePlan(job, self.options_in(job.config))

    @override
    def contents(self, config: MoeFtConfig) -> str:
        options: SparseConfig = self.options_in(config)
        if options.window_snapshots is not None:
            return f"a part of the state, the whole in {options.window_snapshots}"
        return f"a part of the state, the whole in at most {options.max_window}"

    @override
    def longest_window(self, config: MoeFtConfig) -> int:
        options: SparseConfig = self.options_in(config)
        return options.window_snapshots or options.max_window

    @override
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        own_units = rank_units(facts.experts.ep_rank, facts.catalog, facts.grouped_layers)
        everyone = facts.gather((facts.rank, own_units), _UNITS)
        layers, _ = experts_of_stage(
            [tuple(units.sizes) for _, units in everyone], facts.experts.num_experts
        )
        options: SparseConfig = self.options_in(config)
        own = [member for member, _ in everyone].index(facts.rank)
        return SparseStrategy(own, [units for _, units in everyone], layers, options)


SPARSE = Sparse(
    name="sparse",
    options=SparseConfig,
    replays=True,
    memory_remedy="Give a shorter --moe-ft-window or --moe-ft-max-window.",
)
