"""The strategy `selective` as the registry lists it: what it asks of a job, and how a rank builds it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import override

import numpy as np
from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import size_text
from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs
from moe_ft.planning.experts import Expert, ExpertLayout, experts_of_stage
from moe_ft.planning.host_memory import Footprint
from moe_ft.planning.job_costs import interval_flags, places
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.strategies.interface import Counting, ModelFacts, RankFacts, Strategy, StrategyKind
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.strategies.selective.config import NAME, SelectiveConfig
from moe_ft.strategies.selective.report import SelectiveSizes, costs, render
from moe_ft.strategies.selective.selection import RankLoads
from moe_ft.strategies.selective.strategy import SelectiveStrategy
from moe_ft.units import UnitId, UnitKind

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
    def report(self, job: PlannedJob) -> str:
        return render(job, self.options_in(job.config))

    @override
    def costs(self, job: PlannedJob) -> Costs:
        return costs(job, self.options_in(job.config))

    @override
    def choices(self, job: PlannedJob) -> Mapping[str, Sequence[str]]:
        sizes = SelectiveSizes(job, SelectiveConfig())
        return {
            place: interval_flags(
                job, sizes.snapshot_bytes, sizes.snapshot_bytes, at_peers=at_peers
            )
            for place, at_peers in places(job).items()
        }

    @override
    def footprint(self, job: PlannedJob) -> Footprint:
        sizes = SelectiveSizes(job, self.options_in(job.config))
        return Footprint(
            share=sizes.share,
            checkpoint_bytes=sum(job.by_rank(sizes.by_stage(job.heaviest.full_bytes))),
            num_older=math.ceil(sizes.rounds) - 1 + job.config.storage.keeps_whole,
        )

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
