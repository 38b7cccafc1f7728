"""The strategy `partial` as the registry lists it: what it asks of a job, and how a rank builds it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import override

from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs
from moe_ft.planning.experts import ExpertLayout, experts_of_stage
from moe_ft.planning.host_memory import Footprint
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.strategies.interface import Counting, ModelFacts, RankFacts, Strategy, StrategyKind
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.report import choices, costs, footprint, render
from moe_ft.strategies.partial.selection import RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.units import Part, UnitId, UnitKind

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
    def report(self, job: PlannedJob) -> str:
        return render(job, self.options_in(job.config), self.build)

    @override
    def costs(self, job: PlannedJob) -> Costs:
        return costs(job, self.options_in(job.config), self.build)

    @override
    def choices(self, job: PlannedJob) -> Mapping[str, Sequence[str]]:
        return choices(job, self.options_in(job.config), self.build)

    @override
    def footprint(self, job: PlannedJob) -> Footprint:
        return footprint(job, self.options_in(job.config), self.build)

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
                always.append(replace(unit, part=Part.WEIGHTS))
                rotating.append(replace(unit, part=Part.MOMENTS))
            else:
                rotating.append(unit)
        return always, rotating

    @override
    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        options: PartialConfig = self.options_in(config)
        catalog, experts = facts.catalog, facts.experts
        always, rotating = self.divide(catalog.units, config)
        own = [unit for unit in rotating if catalog.owns(unit)]
        # One exchange: a plan asks all ranks of a stage for what they give before the first can be built.
        most = max(map(catalog.num_bytes, own), default=0)
        everyone = facts.gather((catalog.units, most), _UNITS)
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
