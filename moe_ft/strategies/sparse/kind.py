"""The strategy `sparse` as the registry lists it: what it asks of a job, and how a rank builds it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import override

from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.costs import Costs
from moe_ft.planning.experts import experts_of_stage
from moe_ft.planning.host_memory import Footprint
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.strategies.interface import Counting, ModelFacts, RankFacts, Strategy, StrategyKind
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.positions import RankUnits, rank_units
from moe_ft.strategies.sparse.report import choices, costs, footprint, render
from moe_ft.strategies.sparse.strategy import SparseStrategy

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
    def report(self, job: PlannedJob) -> str:
        return render(job, self.options_in(job.config))

    @override
    def costs(self, job: PlannedJob) -> Costs:
        return costs(job, self.options_in(job.config))

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
    def choices(self, job: PlannedJob) -> Mapping[str, Sequence[str]]:
        return choices(job, self.options_in(job.config))

    @override
    def footprint(self, job: PlannedJob) -> Footprint:
        return footprint(job, self.options_in(job.config))

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
