"""The plan of partial experts (MoC-System): bytes that each rank saves, and the host memory for them.

The strategy of training plans each snapshot; headers and records are left out. The units of a planned job are
planning/planned_job.py. The paper counts other bytes and other slices: benchmarks/papers/sizes.py. Last comes
the strategy as the registry lists it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, cast, override

import numpy as np
import numpy.typing as npt
from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.experts import ExpertLayout, experts_of_stage
from moe_ft.planning.host_memory import Footprint, MemoryShare, num_slots
from moe_ft.planning.job_costs import Sizes, interval_choices
from moe_ft.planning.planned_job import PlannedJob, PlannedRank, PlannedStage, UnitBytes
from moe_ft.planning.report import StrategyPlan, Table, megabytes
from moe_ft.strategies.interface import (
    Counting,
    ModelFacts,
    RankFacts,
    SnapshotPlan,
    StrategyKind,
    UnitSizes,
)
from moe_ft.strategies.partial.selection import PartialConfig, RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.units import Level, UnitId, UnitKind, UnitPart

Bytes = npt.NDArray[np.int64]  # [rank]
_MAX_RANK_ROWS = 16
_SIZE_HEADERS = (
    *("checkpoint", "k", "total, MB", "of full", "bottleneck, MB", "its rank", "times the mean"),
    "less than full",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Bytes that every rank saves in each of the snapshots after which the ranks' turns repeat.

    Attributes:
        rotation: ``[snapshot][rank]`` bytes.
    """

    rotation: tuple[tuple[int, ...], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of one snapshot over all ranks, the same for each."""
        return sum(self.rotation[0])

    @property
    def bottleneck_bytes(self) -> int:
        """The most that a rank ever saves in one snapshot."""
        return max(map(max, self.rotation))

    @property
    def bottleneck_rank(self) -> int:
        """The lowest rank that ever saves that much."""
        return self.most_by_rank().index(self.bottleneck_bytes)

    def most_by_rank(self) -> list[int]:
        """Return ``[rank]`` the most that it saves in one snapshot."""
        return [max(of_rank) for of_rank in zip(*self.rotation, strict=True)]

    def mean_by_rank(self) -> list[float]:
        """Return ``[rank]`` what it saves in a snapshot on average."""
        return [sum(of_rank) / len(of_rank) for of_rank in zip(*self.rotation, strict=True)]


class PartialPlan(StrategyPlan):
    """Plan of partial experts, with the options of the job or with some of them changed."""

    is_exact = False

    def __init__(self, job: PlannedJob, options: PartialConfig) -> None:
        super().__init__(job, "partial")
        self._options = options
        self._stages = [_StageSizes(job, stage, self._config()) for stage in job.stages]
        self._workloads: dict[int, Workload] = {}

    def _config(self, **changes: Any) -> MoeFtConfig:
        config = self.job.config
        options = {**config.options, "partial": replace(self._options, **changes)}
        return replace(config, options=options)

    def plan_workload(self, k: int) -> Workload:
        """Return what every rank of every stage saves while sequential selection goes around the experts."""
        if k not in self._workloads:
            config = self._config(
                k_snapshot=str(k), k_persist=1, dynamic_k=False, selection="sequential"
            )
            by_stage = [list(stage.rotation(config, k)) for stage in self._stages]
            rotation = zip(*by_stage, strict=True)
            self._workloads[k] = Workload(
                tuple(tuple(self.job.by_rank(of_stages)) for of_stages in rotation)
            )
        return self._workloads[k]

    def automatic_k(self, budget_bytes: float) -> int:
        """Return the k that --moe-ft-k-snapshot auto takes where ranks can copy so many bytes.

        It allows for one rank having all experts that are selected on its expert-parallel rank, and so is
        less than the largest that is hidden where several ranks share these.
        """
        config = self._config(k_snapshot="auto")
        return min(stage.heaviest(config).largest_k(budget_bytes) for stage in self._stages)

    def memory_share(self, k: int | None) -> MemoryShare:
        """Return the host memory of the rank that needs the most.

        Args:
            k: experts of each MoE layer in a snapshot; None for automatic k, where it may become all.
        """
        dynamic = self._options.dynamic_k and k is not None
        config = self._config(k_snapshot="auto" if k is None else str(k), dynamic_k=dynamic)
        shares = (share for stage in self._stages for share in stage.memory_shares(config))
        return replace(
            max(shares, key=lambda share: share.own_bytes(persists=False)),
            breakpoint_bytes=self.job.breakpoint_bytes,
            gradient_bytes=self.job.gradient_bytes(has_experts=False),
        )

    @cached_property
    def _k_snapshot(self) -> int:
        """Experts in a snapshot, an automatic number as training would choose it."""
        if self._options.k_in_memory is not None:
            return self._options.k_in_memory
        if self.job.measured.budget_bytes is None:
            raise ConfigError(
                "--moe-ft-k-snapshot=auto needs --iteration-s and --bandwidth: k is the number of experts "
                "that can be copied in an iteration. Give them before the --, or plan with 1 to "
                f"{self.job.model.num_experts}."
            )
        return self.automatic_k(self.job.measured.budget_bytes)

    @property
    def _checkpoints(self) -> dict[str, int]:
        """Experts of each MoE layer in a "snapshot" and in a "persist"."""
        k = self._k_snapshot
        return {"snapshot": k, "persist": min(k, self._options.k_persist)}

    @cached_property
    @override
    def sizes(self) -> Sizes:
        job, num_experts = self.job, self.job.model.num_experts
        ks = self._checkpoints.values()
        most, persisted = (self.plan_workload(k).bottleneck_bytes for k in ks)
        in_memory, on_storage = (num_experts / k for k in ks)
        return Sizes(
            snapshots=(most,),
            interval=job.interval(most, persisted),
            persisted_bytes=persisted,
            read_bytes=job.heaviest.full_bytes,
            whole_bytes=job.heaviest.full_bytes,
            rounds=(in_memory, on_storage),
            sent_share=job.sent_share(most, has_experts=False),
        )

    @cached_property
    @override
    def footprint(self) -> Footprint:
        # A checkpoint refers to the files of as many older ones as it takes until every expert was written.
        storage, num_experts = self.job.config.storage, self.job.model.num_experts
        k_persist = min(self._options.k_persist, num_experts)
        largest = num_experts if storage.persists_dense else k_persist
        return Footprint(
            share=self.memory_share(self._options.k_in_memory),
            checkpoint_bytes=self.plan_workload(largest).total_bytes,
            num_older=math.ceil(num_experts / k_persist) - 1 + storage.keeps_whole,
        )

    @override
    def choices(self) -> Mapping[str, Sequence[str]]:
        # As many experts as are hidden in snapshots, and an eighth of all on storage.
        job = self.job
        k_snapshot = max(1, self.automatic_k(job.measured.budget_bytes or 0.0))
        k_persist = min(k_snapshot, math.ceil(job.model.num_experts / 8))
        most, persisted = (self.plan_workload(k).bottleneck_bytes for k in (k_snapshot, k_persist))
        flags = [f"--moe-ft-k-snapshot={k_snapshot}"]
        if job.persists or job.measured.storage_bandwidth is not None:
            flags.append(f"--moe-ft-k-persist={k_persist}")
        return interval_choices(job, most, persisted, flags)

    @override
    def notes(self) -> list[str]:
        job, found = self.job, []
        if job.model.is_grouped:
            found.append(
                "grouped GEMM: slices are planned as if every expert were a module of its own"
            )
        if self._options.is_load_aware:
            found.append("selection load-aware: planned as if it were sequential")
        if job.is_optimizer_distributed or job.config.strategy.sharding == "adaptive":
            return found
        adaptive = PartialPlan(job.divided("adaptive"), self._options)
        for target, k in self._checkpoints.items():
            now, then = (each.plan_workload(k).bottleneck_bytes for each in (self, adaptive))
            if (saved := 1 - then / now) >= 0.001:
                found.append(
                    f"{target}: --moe-ft-sharding adaptive makes the heaviest rank {saved:.1%} lighter"
                )
        return found

    @override
    def rows(self) -> list[tuple[str, str]]:
        if (budget_bytes := self.job.measured.budget_bytes) is None:
            return []
        largest = largest_hidden_k(self.plan_workload, self.job.model.num_experts, budget_bytes)
        found = [("largest k-snapshot that stays hidden", f"{largest or 'none, not even 1'}")]
        if (automatic := self.automatic_k(budget_bytes)) != max(1, largest):
            value = "it allows for one rank having every selected expert that its expert-parallel rank holds"
            found.append((f"auto takes {automatic}", value))
        return found

    @override
    def tables(self) -> list[Table]:
        job, num_experts = self.job, self.job.model.num_experts
        full = self.plan_workload(num_experts)
        checkpoints = [(name, k, self.plan_workload(k)) for name, k in self._checkpoints.items()]
        found = [*checkpoints, ("full", num_experts, full)]
        if not job.is_optimizer_distributed:
            undivided = PartialPlan(job.divided("none"), self._options)
            baseline = undivided.plan_workload(num_experts)
            found.append(("full, sharding none", num_experts, baseline))
        rows = [
            (
                name,
                k,
                megabytes(workload.total_bytes),
                f"{workload.total_bytes / full.total_bytes:.1%}",
                megabytes(workload.bottleneck_bytes),
                workload.bottleneck_rank,
                f"{workload.bottleneck_bytes * job.num_ranks / workload.total_bytes:.2f}",
                f"{1 - workload.bottleneck_bytes / full.bottleneck_bytes:.1%}",
            )
            for name, k, workload in found
        ]
        names = [f"{name}, {what}, MB" for name, *_ in checkpoints for what in ("mean", "most")]
        columns = [
            column
            for *_, workload in checkpoints
            for column in (workload.mean_by_rank(), workload.most_by_rank())
        ]
        if job.num_ranks <= _MAX_RANK_ROWS:
            by_rank = [
                (f"{rank}", values) for rank, values in enumerate(zip(*columns, strict=True))
            ]
        else:
            means = [sum(column) / len(column) for column in columns]
            by_rank = [
                ("least", tuple(map(min, columns))),
                ("mean", tuple(means)),
                ("most", tuple(map(max, columns))),
            ]
        return [
            (_SIZE_HEADERS, rows),
            (
                ("rank" if job.num_ranks <= _MAX_RANK_ROWS else "over ranks", *names),
                [(name, *map(megabytes, values)) for name, values in by_rank],
            ),
        ]

    @override
    def shares(self) -> dict[str, MemoryShare]:
        k = self._k_snapshot
        return {
            f"k {k}": self.memory_share(k),
            "k auto, or Dynamic-K": self.memory_share(None),
            "dense": self.full_share,
        }


class _StageSizes:
    """The ranks of one stage and their strategies."""

    def __init__(self, job: PlannedJob, stage: PlannedStage, config: MoeFtConfig) -> None:
        self._job = job
        self._stage = stage
        self._everyone = [PARTIAL.tell(rank, config) for rank in stage.ranks]
        self._bytes, self._whole = _tabulate(stage)

    def _strategy(self, config: MoeFtConfig, rank: PlannedRank) -> PartialStrategy:
        """Return the strategy of a rank, as training builds it."""
        facts = RankFacts(
            rank=rank.rank,
            catalog=rank,
            experts=replace(self._job.experts, ep_rank=rank.ep_rank),
            dp_ep_ranks=self._stage.ep_ranks(rank.group),
            grouped_layers=frozenset(),
            replicated_bytes=rank.replicated[1],
            gather=lambda *_: self._everyone,
        )
        return PARTIAL.build(config, facts)

    def rotation(self, config: MoeFtConfig, k: int) -> Iterator[list[int]]:
        """Yield ``[rank]`` bytes, for each snapshot until the selection is that of the first."""
        strategy = self._strategy(config, self._whole)
        num_experts = self._job.model.num_experts
        always: dict[tuple[int, ...] | None, Bytes] = {}  # by the division of replicated state
        for number in range(num_experts // math.gcd(num_experts, k)):
            window = strategy.plan_window(number)
            (plan,) = window.snapshots
            if plan.shares not in always:
                always[plan.shares] = self._always(plan)
            yield (self._bytes.of(plan.rotating) + always[plan.shares]).tolist()
            strategy.note_begun(window)
            strategy.note_complete(window, number)

    def _always(self, plan: SnapshotPlan) -> Bytes:
        """Return ``[rank]`` bytes of what every snapshot holds, replicated state as a plan divides it."""
        if plan.shares is None:
            return self._bytes.of(plan.levels)
        ends, shared = list(accumulate(plan.shares, initial=0)), []
        for rank in self._stage.ranks:
            elements, num_bytes = rank.replicated
            first, last = (elements * ends[rank.dp_rank + each] // ends[-1] for each in (0, 1))
            shared.append((last - first) * (num_bytes // elements))
        experts = [unit for unit in plan.levels if unit.kind is UnitKind.EXPERT]
        return self._bytes.of(experts) + np.array(shared, np.int64)

    def heaviest(self, config: MoeFtConfig) -> PartialStrategy:
        """Return the strategy of the rank with the most in every snapshot."""
        always = self._bytes.of(self._strategy(config, self._whole).always)
        return self._strategy(config, self._stage.ranks[int(always.argmax())])

    def memory_shares(self, config: MoeFtConfig) -> Iterator[MemoryShare]:
        """Yield what the checkpoints take of the heaviest rank among those that save as much of experts."""
        plans = [
            each.snapshots[0] for each in self._strategy(config, self._whole).possible_windows()
        ]
        most = np.max([self._always(plan) for plan in plans], axis=0)
        by_experts: dict[tuple[int, ...], int] = {}
        index_bytes = self._job.index_bytes()
        for place, rank in enumerate(self._stage.ranks):
            key = tuple(
                each.full for unit, each in rank.sizes.items() if unit.kind is UnitKind.EXPERT
            )
            if most[by_experts.setdefault(key, place)] < most[place]:
                by_experts[key] = place
        for place in by_experts.values():
            rank = self._stage.ranks[place]
            strategy = self._strategy(config, rank)
            slots = num_slots(len(strategy.rotation.units), strategy.most_rotating)
            slot = max(map(rank.slot_bytes, strategy.rotation.units), default=0)
            yield MemoryShare(
                region_bytes=int(most[place]),
                pool_bytes=slots * slot,
                index_bytes=index_bytes,
            )


class _Bytes:
    """Bytes that the ranks of a stage save, by unit and part."""

    def __init__(self, stage: PlannedStage) -> None:
        units = dict.fromkeys(unit for rank in stage.ranks for unit in rank.sizes)
        parts = [replace(unit, part=part) for unit in units for part in UnitPart]
        self._columns = {unit: column for column, unit in enumerate(parts)}
        self._bytes = np.zeros((len(stage.ranks), len(parts)), np.int64)
        for row, rank in zip(self._bytes, stage.ranks, strict=True):
            for unit, sizes in rank.sizes.items():
                first = self._columns[unit.whole]
                row[first : first + len(UnitPart)] = [
                    sizes.at(part, Level.FULL) for part in UnitPart
                ]

    def of(self, units: Iterable[UnitId]) -> Bytes:
        """Return ``[rank]`` the bytes of some units."""
        columns = [self._columns[unit] for unit in units]
        return cast(Bytes, self._bytes[:, columns].sum(axis=1, dtype=np.int64))


@lru_cache(maxsize=16)  # advice asks for the same stages again and again
def _tabulate(stage: PlannedStage) -> tuple[_Bytes, PlannedRank]:
    """Return the bytes of all ranks, and a rank with every expert: its plans say which are selected."""
    largest: dict[UnitId, UnitBytes] = {}
    for rank in stage.ranks:
        for unit, sizes in rank.sizes.items():
            if unit not in largest or sizes.full > largest[unit].full:
                largest[unit] = sizes
    return _Bytes(stage), replace(stage.ranks[0], sizes=largest)


def largest_hidden_k(
    workload_of: Callable[[int], Workload], num_experts: int, budget_bytes: float
) -> int:
    """Return a k whose snapshots end while the next iteration runs forward and backward.

    Args:
        budget_bytes: that each rank can copy in that time.

    Returns:
        k such that k + 1 does not fit, 0 if not even one expert per layer is hidden. The bottleneck
        grows with k, except for a few bytes that depend on where snapshots begin.

    Source: MoC-System, section 5.3.
    """
    return bisect_right(
        range(1, num_experts + 1), budget_bytes, key=lambda k: workload_of(k).bottleneck_bytes
    )


_UNITS = Decoder(tuple[list[UnitId], int])


@dataclass(frozen=True, kw_only=True)
class Partial(StrategyKind):
    """Needs a model with experts."""

    @override
    def counting(self, config: MoeFtConfig) -> Counting:
        return Counting.TOKENS

    @override
    def contents(self, config: MoeFtConfig) -> str:
        options: PartialConfig = self.options_in(config)
        k = "as many as cost no time" if options.k_in_memory is None else str(options.k_in_memory)
        return f"all but experts, and of the experts of each MoE layer {k}"

    @override
    def division(self, config: MoeFtConfig) -> str:
        options: PartialConfig = self.options_in(config)
        flags = ["--moe-ft-partial-covers both"]  # a flag that there was: checkpoints hold the text
        flags += ["--moe-ft-master-always-full"] * options.master_always_full
        flags += ["--moe-ft-sharding none"] * (config.strategy.sharding == "none")
        return " ".join(flags)

    @override
    def can_shard_adaptively(self, config: MoeFtConfig) -> bool:
        options: PartialConfig = self.options_in(config)
        return not options.is_load_aware

    @override
    def check(self, config: MoeFtConfig, model: ModelFacts) -> None:
        options: PartialConfig = self.options_in(config)
        if model.num_experts == 0:
            raise ConfigError(
                "--moe-ft-strategy=partial needs a model with experts (--num-experts). Use dense."
            )
        if options.master_always_full and config.memory.sends_gradients:
            raise ConfigError(
                "--moe-ft-replicate=gradients cannot be used with --moe-ft-master-always-full: a step "
                "needs the moments of what every snapshot holds. Leave one of them out."
            )
        for flag, k in (("snapshot", options.k_in_memory), ("persist", options.k_persist)):
            if k is not None and k > model.num_experts:
                raise ConfigError(
                    f"--moe-ft-k-{flag}={k} must be at most --num-experts={model.num_experts}. Lower it, or "
                    "use --moe-ft-strategy dense to save all experts each time."
                )

    @override
    def plan(self, job: PlannedJob) -> StrategyPlan:
        return PartialPlan(job, self.options_in(job.config))

    def divide(
        self, units: Iterable[UnitId], config: MoeFtConfig
    ) -> tuple[list[UnitId], list[UnitId]]:
        """Divide units into those that every snapshot holds and those that rotate.

        An expert whose master weights are in every snapshot is in both, in two parts.
        """
        options: PartialConfig = self.options_in(config)
        always, rotating = [], []
        for unit in units:
            if unit.kind is not UnitKind.EXPERT:
                always.append(unit)
            elif options.master_always_full:
                always.append(replace(unit, part=UnitPart.WEIGHTS))
                rotating.append(replace(unit, part=UnitPart.MOMENTS))
            else:
                rotating.append(unit)
        return always, rotating

    def tell(self, catalog: UnitSizes, config: MoeFtConfig) -> tuple[Sequence[UnitId], int]:
        """Return what a rank gives to its stage: its units, and the bytes of the largest that rotates."""
        own = filter(catalog.owns, self.divide(catalog.units, config)[1])
        return catalog.units, max(map(catalog.num_bytes, own), default=0)

    @override
    def build(self, config: MoeFtConfig, facts: RankFacts) -> PartialStrategy:
        options: PartialConfig = self.options_in(config)
        catalog, experts = facts.catalog, facts.experts
        always, rotating = self.divide(catalog.units, config)
        own = [unit for unit in rotating if catalog.owns(unit)]
        everyone = facts.gather(self.tell(catalog, config), _UNITS)
        layers, frozen = experts_of_stage([units for units, _ in everyone], experts.num_experts)
        layout = ExpertLayout(
            num_layers=len(layers), num_experts=experts.num_experts, ep_size=experts.ep_size
        )
        run = PlannedRun.of(config, experts)
        share = RankShare(
            always_bytes=sum(map(catalog.num_bytes, always)),
            unit_bytes=max(num_bytes for _, num_bytes in everyone),
            replicated_bytes=facts.replicated_bytes * (config.strategy.sharding == "adaptive"),
            ep_ranks=tuple(facts.dp_ep_ranks),
        )
        return PartialStrategy(always, own, layers, layout, options, run, share, frozen)


PARTIAL = Partial(
    name="partial",
    options=PartialConfig,
    is_exact=False,
    fills_regions=False,
    follows_gradients=True,
    leaves_out_frozen=True,
    adaptive_with="--moe-ft-strategy partial and --moe-ft-selection sequential",
)
