"""The strategy `dense` as the registry lists it."""

from dataclasses import dataclass

from moe_ft.config.config import MoeFtConfig
from moe_ft.planning.host_memory import Footprint
from moe_ft.planning.planned_job import PlannedJob
from moe_ft.strategies.dense.report import footprint, render
from moe_ft.strategies.dense.strategy import DenseStrategy
from moe_ft.strategies.interface import RankFacts, Strategy, StrategyKind


@dataclass(frozen=True, kw_only=True)
class Dense(StrategyKind):
    """Needs nothing of a job."""

    def report(self, job: PlannedJob) -> str:
        """Return the plan of a job."""
        return render(job)

    def footprint(self, job: PlannedJob) -> Footprint:
        """Return the room that checkpoints of a job take."""
        return footprint(job)

    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        """Return a strategy that saves all units of the rank."""
        return DenseStrategy(facts.catalog.units)


DENSE = Dense(name="dense")
