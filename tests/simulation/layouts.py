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
SHARE_OF_AGES = 0.35  # of these: their experts have ages
# Of the changes: each rank then has the same experts, and memory of the same sizes.
_SHARE_OF_TWINS = 0.4
_SHARE_OF_CUTS = 0.4
# Deaths of jobs whose experts have ages, and the moments at which they come, by the beginning of their names.
DEATHS = {"kill-all": 4, "kill-rank": 2, "kill-node": 2, "lose-node": 2}
_MOMENTS = ("before step", "phase snapshot", "phase replicate")
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


def with_ages(setup: Setup, rng: random.Random) -> Setup:
    """Return a job of several layouts whose experts have ages, and were all saved when it first dies."""
    k = rng.choice((1, 2, 2, 3))
    options = {
        "k_snapshot": str(k),
        "k_persist": rng.randint(1, k),
        "selection": rng.choice(("sequential", "load-aware")),
        "dynamic_k": rng.random() < 0.2,
    }
    # Three ranks cut experts in parts; two or four hold whole ones.
    cut = {"stages": 1, "dp": 3, "tp": 1, "ep": 1, "layers": _LAYERS, "is_sharded": True}
    first = cut if rng.random() < _SHARE_OF_CUTS else {}
    shapes: list[Shape] = [msgspec.structs.replace(setup.shape, **first)]
    for each in setup.later:
        is_twin = rng.random() < _SHARE_OF_TWINS
        shapes.append(_twin_of(shapes[-1]) if is_twin else each)
    changed: Setup = msgspec.structs.replace(
        setup,
        strategy="partial",
        options=options,
        interval="1",
        iterations=10,
        later=tuple(shapes[1:]),
        persist_interval=rng.choice((0, 0, 1, 1, 2)),
        dense_interval=0,
        stop_interval=0,
        state_dtype="",
        **first,
    )
    return changed


def _twin_of(shape: Shape) -> Shape:
    """Return another layout of as many ranks in which each has the same experts, if there is one."""
    tp = 3 - shape.tp
    dp = shape.dp * shape.tp // tp
    is_possible = dp * tp == shape.width
    changed: Shape = msgspec.structs.replace(shape, dp=dp, tp=tp) if is_possible else shape
    return changed


def draw_death(setup: Setup, start: int, rng: random.Random) -> tuple[str, int]:
    """Return the moment at which a start dies, and which time ranks pass it.

    The first one has then saved each expert, mostly. A later one often has not completed a snapshot of its
    own, or has not saved each expert again.
    """
    ranks = setup.shape_of(start).num_ranks
    first = -(
        -_EXPERTS // int(setup.options["k_snapshot"])
    )  # iterations until each expert was saved
    if not start:
        iterations = first + rng.choice((-1, 1, 1, 2, 2, 3))
    else:
        iterations = rng.choice((0, 0, 0, 1, 1, 2, first + 1))
    times = max(0, iterations) * ranks + rng.randrange(ranks)
    return rng.choice(_MOMENTS), 1 + times


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
