"""Jobs whose starts have different layouts, and the faults that hit them."""

import random
from typing import Any

import msgspec

from tests.simulation.job import Setup
from tests.simulation.shape import Shape

SHARE = 0.15  # of the schedules
# Faults that mean something else after a change of layout: nodes that come back have state of another one.
LEFT_OUT = ("set-aside", "bring-back", "second-job", "prune", "storage-away")
SHARE_OF_DEATHS = 0.7  # of these schedules: each start dies when it has state
# Before a start, with their weights.
OFFLINE = {"lose-node": 3, "lose-all-memory": 2, "power-loss": 1, "flip-memory": 1, "move-ranks": 1}
_LAYERS = 2
_EXPERTS = 4
# stages, dp, tp, ep
_SIZES = (
    (1, 2, 1, 1),
    (1, 2, 1, 2),
    (1, 1, 2, 1),
    (1, 1, 2, 2),
    (2, 1, 1, 1),
    (1, 3, 1, 1),
    (2, 2, 1, 2),
    (1, 4, 1, 4),
    (1, 2, 2, 2),
    (2, 1, 2, 1),
)


def with_layouts(setup: Setup, rng: random.Random) -> Setup:
    """Return a job in which most starts have another layout than the one before."""
    skips = setup.skips
    first, *later = (_draw_shape(rng, skips=skips) for _ in range(rng.choice((2, 3, 4))))
    changes: dict[str, Any] = {name: getattr(first, name) for name in Shape.__struct_fields__}
    nodes = rng.choice((1, 2, 2))
    changes |= {
        "nodes": nodes,
        "replication": "auto" if nodes > 1 and rng.random() < 0.8 else "0",
        "later": tuple(later),
        "iterations": rng.choice((6, 8)),
        "sharding": "equal",
        "upstream_log": False,
        "recovery": "auto",
    }
    if setup.strategy == "sparse":  # longer windows run again, in which sums have another order
        changes["options"] = {**setup.options, "window": "1"}
    elif setup.strategy == "partial":
        changes["iterations"] = 8  # each expert is saved once
    changed: Setup = msgspec.structs.replace(setup, **changes)
    return changed


def _draw_shape(rng: random.Random, *, skips: bool) -> Shape:
    stages, dp, tp, ep = rng.choice(_SIZES)
    return Shape(
        stages=stages,
        dp=dp,
        tp=tp,
        ep=ep,
        layers=_LAYERS // stages,
        experts=_EXPERTS,
        is_sharded=rng.random() < 0.7,
        skips=skips,
    )
