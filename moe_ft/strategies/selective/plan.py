"""The plan of selective checkpoints: bytes of each rank in its budget, and the host memory for them.

Last comes the strategy as the registry lists it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import override

import numpy as np
from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import size_text
from moe_ft.errors import ConfigError
from moe_ft.planning.experts import Expert, ExpertLayout, experts_of_stage
from moe_ft.planning.host_memory import Footprint, MemoryShare, num_slots
from moe_ft.planning.job_costs import Sizes, interval_choices
from moe_ft.planning.planned_job import PlannedJob, PlannedRank
from moe_ft.planning.report import StrategyPlan, megabytes
from moe_ft.strategies.interface import Counting, ModelFacts, RankFacts, Strategy, StrategyKind
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.strategies.selective.selection import NAME, PAPER, RankLoads, SelectiveConfig
from moe_ft.strategies.selective.strategy import SelectiveStrategy
from moe_ft.units import UnitId, UnitKind


class SelectivePlan(StrategyPlan):
    """Plan of selective checkpoints: of each rank as much as its budget allows.

    Memory and peers are planned as if they had one budget, the smaller one. Without skew in the routing, the
    experts come in turn: that is the worst case.
    """

    is_exact = False

    def __init__(self, job: PlannedJob, options: SelectiveConfig) -> None:
        """Find the budgets.

        Raises:
            ConfigError: if a budget follows from what was not given.
        """
        super().__init__(job, NAME)
        self._options = options
        local = options.local_bytes
        if local is None and job.measured.budget_bytes is None:
            raise ConfigError(
                "--moe-ft-local-budget=auto needs --iteration-s and --bandwidth: it is what can be copied in "
                "an iteration. Give them before the --, or plan with a size like 2GiB."
            )
        self._local_bytes = float(job.measured.budget_bytes or 0 if local is None else local)
        self._remote_bytes = self._remote()
        self._follows = options.selective_rule != PAPER

    def _remote(self) -> float:
        measured, factor = self.job.measured, self.job.replication_factor
        if not factor:
            return math.inf
        if self._options.remote_bytes is not None:
            return float(self._options.remote_bytes)
        if measured.network_bandwidth is None or measured.iteration_s is None:
            return math.inf
        return measured.network_bandwidth * measured.iteration_s / factor

    def _saved_bytes(self, rank: PlannedRank) -> int:
        """Return the bytes of a snapshot of a rank."""
        budget_bytes = min(self._local_bytes, self._remote_bytes)
        return int(min(max(budget_bytes, _always(rank) + max(_experts(rank))), rank.full_bytes))

    @property
    def _rounds(self) -> float:
        """Snapshots until each expert had a turn, on the rank where that takes the longest."""
        return max(
            (rank.full_bytes - _always(rank)) / max(1, self._saved_bytes(rank) - _always(rank))
            if rank.full_bytes > _always(rank)
            else 1.0
            for rank in self.job.ranks
        )

    @cached_property
    @override
    def sizes(self) -> Sizes:
        job, most = self.job, max(map(self._saved_bytes, self.job.ranks))
        return Sizes(
            snapshots=(most,),
            interval=job.interval(most, most),
            persisted_bytes=most,
            read_bytes=job.heaviest.full_bytes,
            whole_bytes=job.heaviest.full_bytes,
            rounds=(self._rounds, self._rounds),
        )

    @cached_property
    @override
    def footprint(self) -> Footprint:
        job = self.job
        return Footprint(
            share=max(
                map(self._share_of, self.job.ranks),
                key=lambda share: share.own_bytes(persists=False),
            ),
            checkpoint_bytes=sum(job.full_bytes),
            num_older=math.ceil(self._rounds) - 1 + job.config.storage.keeps_whole,
        )

    def _share_of(self, rank: PlannedRank) -> MemoryShare:
        job = self.job
        takes_all = self._options.local_bytes is None or job.config.storage.persists_dense
        sizes = sorted(
            rank.num_bytes(unit)
            for unit in rank.sizes
            if unit.kind is UnitKind.EXPERT and rank.owns(unit)
        )
        slot = max(
            (rank.slot_bytes(unit) for unit in rank.sizes if unit.kind is UnitKind.EXPERT),
            default=0,
        )
        room = self._local_bytes - _always(rank)
        fitting = sum(int(end <= room) for end in np.cumsum(sizes))
        most = len(sizes) if takes_all else max(1, fitting)
        retained = len(sizes) if job.config.memory.num_replicas != 0 else 0
        return MemoryShare(
            region_bytes=_always(rank),
            pool_bytes=num_slots(len(sizes) + retained, most) * slot,
            breakpoint_bytes=job.breakpoint_bytes,
            gradient_bytes=job.gradient_bytes(has_experts=self._follows),
            index_bytes=job.index_bytes(),
        )

    @override
    def choices(self) -> Mapping[str, Sequence[str]]:
        most = max(map(SelectivePlan(self.job, SelectiveConfig())._saved_bytes, self.job.ranks))
        return interval_choices(self.job, most, most)

    @override
    def notes(self) -> list[str]:
        return [
            "Routing is taken as uniform; the more it is skewed, the less is lost at the same bytes."
        ]

    @override
    def shares(self) -> dict[str, MemoryShare]:
        return {**super().shares(), "dense": self.full_share}

    @override
    def rows(self) -> list[tuple[str, str]]:
        most, full = self.sizes.snapshots[0], self.job.heaviest.full_bytes
        remote = "none" if math.isinf(self._remote_bytes) else f"{megabytes(self._remote_bytes)} MB"
        rows = [
            (
                "budgets of a rank",
                f"{megabytes(self._local_bytes)} MB in memory, {remote} at each peer; planned as if both had "
                "the smaller one",
            ),
            (
                "snapshot",
                f"at most {megabytes(most)} MB of a rank, {most / full:.1%} of a full one",
            ),
        ]
        gradient_bytes = self.job.gradient_bytes()
        if self._follows and 0 < gradient_bytes <= self._remote_bytes and full <= self._local_bytes:
            value = f"{megabytes(gradient_bytes)} MB a snapshot, after which they lack nothing"
            rows.append(("peers can follow all experts by gradients", value))
        return rows


def _always(rank: PlannedRank) -> int:
    return sum(size.full for unit, size in rank.sizes.items() if unit.kind is not UnitKind.EXPERT)


def _experts(rank: PlannedRank) -> list[int]:
    return [0, *(size.full for unit, size in rank.sizes.items() if unit.kind is UnitKind.EXPERT)]


_UNITS = Decoder(list[UnitId])
_SIZES = Decoder(tuple[int, int, dict[Expert, int], int])


@dataclass(frozen=True, kw_only=True)
class Selective(StrategyKind):
    """Needs a model with experts."""

    @override
    def counting(self, config: MoeFtConfig) -> Counting:
        return Counting.TOKENS

    @override
    def contents(self, config: MoeFtConfig) -> str:
        options: SelectiveConfig = self.options_in(config)
        budget = "what costs no time" if options.local_bytes is None else options.local_budget
        return f"all but experts, and those with the most tokens at risk, up to {budget}"

    @override
    def division(self, config: MoeFtConfig) -> str:
        flags = [f"--moe-ft-strategy {NAME}"]
        flags += ["--moe-ft-sharding none"] * (config.strategy.sharding == "none")
        return " ".join(flags)

    @override
    def check(self, config: MoeFtConfig, model: ModelFacts) -> None:
        options: SelectiveConfig = self.options_in(config)
        if model.num_experts == 0:
            raise ConfigError(
                f"--moe-ft-strategy={NAME} needs a model with experts (--num-experts). Use dense."
            )
        if config.recovery.layout == "any":
            raise ConfigError(
                f"--moe-ft-layout=any is not supported with --moe-ft-strategy={NAME}: with a budget, experts "
                "that come from another layout may not reach memory and peers before the next failure. "
                "Use --moe-ft-layout same, or another strategy."
            )
        interval = config.strategy.interval_iterations
        if interval is not None and options.age_limit < interval:
            raise ConfigError(
                f"--moe-ft-age-limit={options.age_limit} must be at least --moe-ft-interval={interval}: "
                "every expert would be too old in every snapshot. Raise it."
            )

    @override
    def plan(self, job: PlannedJob) -> StrategyPlan:
        return SelectivePlan(job, self.options_in(job.config))

    @override
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        options: SelectiveConfig = self.options_in(config)
        catalog, experts = facts.catalog, facts.experts
        always = [unit for unit in catalog.units if unit.kind is not UnitKind.EXPERT]
        rotating = [unit for unit in catalog.units if unit.kind is UnitKind.EXPERT]
        own = [unit for unit in rotating if catalog.owns(unit)]
        layers, frozen = experts_of_stage(facts.gather(catalog.units, _UNITS), experts.num_experts)
        layout = ExpertLayout(
            num_layers=len(layers), num_experts=experts.num_experts, ep_size=experts.ep_size
        )
        sizes = {(unit.layer_name, unit.expert): catalog.num_bytes(unit) for unit in own}
        own_bytes = sum(map(catalog.num_bytes, always))
        everyone = facts.gather((facts.rank, own_bytes, sizes, facts.gradient_bytes), _SIZES)
        loads = _loads(everyone, layers, experts.num_experts)
        least, follows = loads.least_budget, config.memory.sends_gradients
        for flag, text, budget, needed in (
            ("local", options.local_budget, options.local_bytes, least),
            (
                "remote",
                options.remote_budget,
                options.remote_bytes,
                loads.least_sent if follows else least,
            ),
        ):
            if budget is not None and budget < needed:
                what = "gradients of the" if follows and needed < least else "the"
                raise ConfigError(
                    f"--moe-ft-{flag}-budget={text} must be at least {needed} bytes "
                    f"({size_text(needed)}): {what} state outside experts, and one expert. Raise it."
                )
        run = PlannedRun.of(config, experts)
        return SelectiveStrategy(
            *(always, own, layers, layout, options, run, loads),
            [rank for rank, *_ in everyone].index(facts.rank),
            frozen,
            has_peers=config.memory.num_replicas != 0,
            are_followed=follows,
        )


def _loads(
    everyone: Sequence[tuple[int, int, Mapping[Expert, int], int]],
    layers: Sequence[str],
    num_experts: int,
) -> RankLoads:
    """Return the bytes that the ranks of a stage save: of each always, and of its experts.

    A gradient counts with the most bytes that one has on any rank: all ranks must choose the same.
    """
    first = {layer: index * num_experts for index, layer in enumerate(layers)}
    costs = np.zeros((len(everyone), len(layers) * num_experts), np.int64)
    for row, (_, _, sizes, _) in enumerate(everyone):
        for (layer, expert), num_bytes in sizes.items():
            costs[row, first[layer] + expert] = num_bytes
    gradient_bytes = max(each for *_, each in everyone)
    return RankLoads([always for _, always, *_ in everyone], costs, gradient_bytes)


SELECTIVE = Selective(
    name=NAME,
    options=SelectiveConfig,
    is_exact=False,
    fills_regions=False,
    follows_gradients=True,
    leaves_out_frozen=True,
)
