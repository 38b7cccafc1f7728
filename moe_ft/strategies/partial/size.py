"""Bytes that each rank of a planned job saves with partial experts, and the host memory for them.

The strategy of training plans each snapshot; headers and records are left out. The units of a planned job are
planning/planned_job.py. The paper counts other bytes and other slices: benchmarks/papers/sizes.py.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from moe_ft.config.config import MoeFtConfig
from moe_ft.planning.host_memory import MemoryShare, num_slots
from moe_ft.planning.planned_job import PlannedJob, PlannedRank, PlannedStage, UnitBytes
from moe_ft.strategies.interface import RankFacts, SnapshotPlan, Strategy
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.units import Level, Part, UnitId, UnitKind

Build = Callable[[MoeFtConfig, RankFacts], Strategy]
Sizes = npt.NDArray[np.int64]  # [rank] bytes


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


class PartialSizes:
    """Bytes that the ranks of a job save, with the options of the strategy or with some of them changed."""

    def __init__(self, job: PlannedJob, options: PartialConfig, build: Build) -> None:
        """Collect the ranks.

        Args:
            build: of the strategy's kind, as training calls it.
        """
        self._job, self._options = job, options
        self._stages = [_Stage(job, stage, build) for stage in job.stages]
        self._workloads: dict[int, Workload] = {}

    def _config(self, **changes: Any) -> MoeFtConfig:
        config = self._job.config
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
                tuple(tuple(self._job.by_rank(of_stages)) for of_stages in rotation)
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
        return max(shares, key=lambda share: share.own_bytes(persists=False))


class _Stage:
    """The ranks of one stage and their strategies."""

    def __init__(self, job: PlannedJob, stage: PlannedStage, build: Build) -> None:
        self._job, self._stage, self._build = job, stage, build
        self._gathered: list[list[Any]] = []
        self._bytes, self._whole = _tabulate(stage)

    def _strategy(self, config: MoeFtConfig, rank: PlannedRank) -> PartialStrategy:
        """Return the strategy of a rank, which gathers values of all ranks of the stage."""
        while True:
            try:
                found = self._build(config, self._facts(rank))
                return cast(PartialStrategy, found)
            except _GatherError:
                self._gathered.append([self._asked(config, each) for each in self._stage.ranks])

    def _asked(self, config: MoeFtConfig, rank: PlannedRank) -> Any:
        """Return the next value that a rank gives to the others."""
        try:
            self._build(config, self._facts(rank))
        except _GatherError as gathers:
            return gathers.value
        raise AssertionError("all ranks of a stage gather equally often")

    def _facts(self, rank: PlannedRank) -> RankFacts:
        answers = iter(self._gathered)

        def gather(value: Any, _: Any) -> list[Any]:
            for answer in answers:
                return answer
            raise _GatherError(value)

        return RankFacts(
            rank=rank.rank,
            catalog=rank,
            experts=replace(self._job.experts, ep_rank=rank.ep_rank),
            dp_ep_ranks=self._stage.ep_ranks(rank.group),
            grouped_layers=frozenset(),
            replicated_bytes=rank.replicated[1],
            gather=gather,
        )

    def rotation(self, config: MoeFtConfig, k: int) -> Iterator[list[int]]:
        """Yield ``[rank]`` bytes, for each snapshot until the selection is that of the first."""
        strategy = self._strategy(config, self._whole)
        num_experts = self._job.model.num_experts
        always: dict[tuple[int, ...] | None, Sizes] = {}  # by the division of replicated state
        for number in range(num_experts // math.gcd(num_experts, k)):
            window = strategy.plan_window(number)
            (plan,) = window.snapshots
            if plan.shares not in always:
                always[plan.shares] = self._always(plan)
            yield (self._bytes.of(plan.rotating) + always[plan.shares]).tolist()
            strategy.note_begun(window)
            strategy.note_complete(window, number)

    def _always(self, plan: SnapshotPlan) -> Sizes:
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
            slots = num_slots(len(strategy.rotating), strategy.most_rotating)
            slot = max(map(rank.slot_bytes, strategy.rotating), default=0)
            yield MemoryShare(
                region_bytes=int(most[place]),
                pool_bytes=slots * slot,
                index_bytes=index_bytes,
            )


class _GatherError(Exception):
    """A rank waits for the values of the others."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Bytes:
    """Bytes that the ranks of a stage save, by unit and part."""

    def __init__(self, stage: PlannedStage) -> None:
        units = dict.fromkeys(unit for rank in stage.ranks for unit in rank.sizes)
        parts = [replace(unit, part=part) for unit in units for part in Part]
        self._columns = {unit: column for column, unit in enumerate(parts)}
        self._bytes = np.zeros((len(stage.ranks), len(parts)), np.int64)
        for row, rank in zip(self._bytes, stage.ranks, strict=True):
            for unit, sizes in rank.sizes.items():
                first = self._columns[unit.whole]
                row[first : first + len(Part)] = [sizes.at(part, Level.FULL) for part in Part]

    def of(self, units: Iterable[UnitId]) -> Sizes:
        """Return ``[rank]`` the bytes of some units."""
        columns = [self._columns[unit] for unit in units]
        return cast(Sizes, self._bytes[:, columns].sum(axis=1, dtype=np.int64))


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
