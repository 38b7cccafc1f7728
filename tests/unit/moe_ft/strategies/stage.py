"""One rank of a stage, as strategies see it, and any strategy of the registry on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import ConfigPart
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.exchange import decode, encode
from moe_ft.planning.experts import ExpertFacts
from moe_ft.strategies.interface import RankFacts, Strategy, StrategyKind
from moe_ft.units import Level, UnitId, UnitKind

NUM_LAYERS, NUM_EXPERTS = 2, 4


@dataclass(frozen=True)
class Catalog:
    """Units whose sizes are given; this rank saves all of each."""

    sizes: Mapping[UnitId, int]

    @property
    def units(self) -> tuple[UnitId, ...]:
        """Whole units."""
        return tuple(self.sizes)

    def owns(self, unit: UnitId) -> bool:
        """Return true."""
        return True

    def num_bytes(self, unit: UnitId, level: Level = Level.FULL, *, alignment: int = 1) -> int:
        """Return the size, or a sixth of it for what only computes."""
        whole = UnitId(kind=unit.kind, block=unit.block, layer=unit.layer, expert=unit.expert)
        size = self.sizes[whole] // (1 if level is Level.FULL else 6)
        return -(-size // alignment) * alignment


EXPERTS = [
    UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
    for layer in range(NUM_LAYERS)
    for expert in range(NUM_EXPERTS)
]
OTHERS = [
    UnitId(kind=UnitKind.EMBEDDING),
    *(UnitId(kind=UnitKind.NON_EXPERT, layer=layer) for layer in range(NUM_LAYERS)),
]
CATALOG = Catalog({**dict.fromkeys(EXPERTS, 1200), **dict.fromkeys(OTHERS, 3000)})


def facts_of(catalog: Catalog = CATALOG, num_experts: int = NUM_EXPERTS) -> RankFacts:
    """Return the facts of a rank that is alone in its stage."""
    return RankFacts(
        rank=3,
        catalog=catalog,
        experts=ExpertFacts(
            num_experts=num_experts,
            ep_rank=0,
            ep_size=1,
            tokens_per_sample=8,
            planned_samples=100,
            samples_per_iteration=2,
        ),
        dp_ep_ranks=[0],
        grouped_layers=frozenset(),
        replicated_bytes=500,
        gather=lambda value, decoder: [decode(encode(value), decoder)],
    )


def config_of(
    kind: StrategyKind, options: ConfigPart | None = None, **strategy: Any
) -> MoeFtConfig:
    """Return settings that choose a strategy."""
    return MoeFtConfig(
        strategy=StrategyConfig(strategy=kind.name, **strategy),
        options={} if options is None else {kind.name: options},
    )


def build(kind: StrategyKind, options: ConfigPart | None = None, **strategy: Any) -> Strategy:
    """Return the strategy of the rank."""
    return kind.build(config_of(kind, options, **strategy), facts_of())
