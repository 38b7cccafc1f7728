"""Settings that few schedules have, and faults that need them: drawn after the rest of a schedule.

Each has its own probability, so that what schedule.py draws from a seed stays the same.
"""

import random
from typing import Any

import msgspec

from moe_ft.planning.levels import FAN_OUT
from tests.simulation.job import Setup
from tests.simulation.shape import Shape, weights_of

# Faults while ranks run, with their weights.
LIVE = {
    "vanish": 4,
    "hang": 3,
    "torn-kill": 4,
    "memory-glitch": 3,
    "storage-denial": 3,
}
# Faults between two starts.
OFFLINE = {"reuse-name": 1}
_EXTRA = 0.5
SHARE_OF_FOLLOWED = 0.6  # of those that can be
_BYTES_OF_NUMBER = 12  # its master weight and two moments
_BYTES_OF_EXPERT = 14 * _BYTES_OF_NUMBER
SHARE_OF_MANY = 0.03  # of the schedules have more than FAN_OUT ranks
# What befalls one of many ranks before all of them die.
OF_ONE = {"memory-glitch": 4, "suspend-rank": 1, "reset": 1, "memory-full": 1}


def vary(setup: Setup, rng: random.Random) -> Setup:
    """Return a setup of which some settings were drawn again."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.5:
        changes |= {"persist_interval": rng.randint(0, 3), "keep": rng.randint(1, 3)}
    if rng.random() < 0.1:
        changes["on_error"] = "raise"
    if rng.random() < 0.1:
        changes |= _larger(setup, rng)
    options = dict(setup.options)
    if setup.strategy == "sparse":
        options |= {
            "window": rng.choice(("1", "2", "3", "4", "auto")),
            "max_window": rng.randint(1, 5),
            "unit_order": rng.choice(("count", "soft-count", "decayed")),
        }
        if setup.iterations >= 6 and rng.random() < 0.2:
            options |= {"window": "5", "max_window": 5}
    elif setup.strategy == "partial":
        options |= _partial_options(options, rng)
        is_load_aware = options["selection"] == "load-aware"
        if not setup.is_sharded and not is_load_aware and rng.random() < 0.5:
            changes["sharding"] = "adaptive"
    persists = changes.get("persist_interval", setup.persist_interval) > 0
    if rng.random() < (0.25 if persists else 0.1):
        changes["stop_interval"] = rng.randint(1, max(1, setup.iterations - 1))
    changed: Setup = msgspec.structs.replace(setup, options=options, **changes)
    return changed


def _partial_options(options: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    changes: dict[str, Any] = {"dynamic_k": rng.random() < 0.4}
    if rng.random() < 0.3:
        changes["master_always_full"] = True
    if rng.random() < 0.1:
        changes |= {"k_snapshot": "auto"}
    return changes


def _larger(setup: Setup, rng: random.Random) -> dict[str, Any]:
    """Return the sizes of a job with more ranks or nodes."""
    stages, dp, nodes = rng.choice(
        ((1, 3, 3), (3, 1, 3), (2, 3, 3), (1, 6, 2), (2, 4, 2), (1, 8, 4))
    )
    ep = rng.choice([each for each in (1, 2) if dp % each == 0])
    factor = rng.choice(("auto", "1", "2")) if nodes > 2 else "auto"
    return {
        "stages": stages,
        "dp": dp,
        "ep": ep,
        "nodes": nodes,
        "replication": factor,
        "iterations": min(setup.iterations, 6),
    }


def draw_kind(rng: random.Random, kinds: dict[str, int], number: int) -> str | None:
    known = {kind: weight for kind, weight in kinds.items() if weight}
    if rng.random() >= _EXTRA or (kinds is OFFLINE and (not number or rng.random() >= 0.2)):
        return None
    return rng.choices(list(known), list(known.values()))[0]


def add_selective(setup: Setup, rng: random.Random, *, is_certain: bool = False) -> Setup:
    """Return a setup in which half of the jobs with partial experts have budgets of bytes instead.

    Args:
        is_certain: whether all jobs have, and peers with older experts than their ranks.
    """
    changes: dict[str, Any] = {"strategy": "selective", "sharding": "equal", "is_followed": False}
    changes["later"] = ()
    if is_certain:
        # Where experts are repeated and the optimizer is not divided, each rank saves a half of each.
        changes |= {"is_sharded": rng.random() < 0.3, "ep": rng.choice((1, 1, 2))}
        changes |= {"stages": 1, "dp": 2, "tp": 1, "layers": 2, "experts": 4}
        changes |= {"nodes": 2, "replication": "auto", "iterations": 10, "interval": "1"}
        changes |= {"upstream_log": False, "recovery": "auto", "state_dtype": ""}
        changes |= {"persist_interval": 0, "dense_interval": 0, "stop_interval": 0}
        changes |= {"breakpoints": False, "on_error": "degrade"}
    elif setup.upstream_log or setup.strategy != "partial" or rng.random() < 0.5:
        return setup
    changed: Setup = msgspec.structs.replace(setup, **changes)
    least = _least_budget(changed.shape)
    more = [f"{least + number * _BYTES_OF_EXPERT}" for number in range(3)]
    budgets = ["auto"] if changed.state_dtype else ["auto", *more]
    options = {
        "local_budget": rng.choice(("auto", *more[1:]) if is_certain else budgets),
        "remote_budget": more[0] if is_certain else rng.choice(budgets),
        "selective_rule": rng.choice(("age", "age", "paper")),
        "age_limit": rng.choice((3, 4, 200)),
    }
    if changed.replication == "0":
        options["remote_budget"] = "auto"
    with_budgets: Setup = msgspec.structs.replace(changed, options=options)
    return with_budgets


def _least_budget(shape: Shape) -> int:
    """Return a budget with which every rank can save its state outside experts, and one of them."""
    most = 0
    for rank in range(shape.num_ranks):
        sizes: dict[bool, list[int]] = {True: [0], False: [0]}
        for each in weights_of(shape, rank):
            saved = each.end - each.start
            if not shape.is_sharded:  # all that have it divide it equally
                holders = shape.expert_peers(rank) if each.is_expert else shape.dense_peers(rank)
                saved = -(-each.size // len(holders)) + 2  # cut at units, which rounds twice
            sizes[each.is_expert].append(_BYTES_OF_NUMBER * saved)
        most = max(most, sum(sizes[False]) + max(sizes[True]))
    return most


def add_dense_interval(setup: Setup, rng: random.Random) -> Setup:
    """Return a setup in which some jobs also write whole states to storage, or these alone."""
    if rng.random() >= 0.3:
        return setup
    changes: dict[str, Any] = {"dense_interval": rng.randint(1, 4), "keep": rng.randint(1, 3)}
    if rng.random() < 0.5:
        changes["persist_interval"] = 0
    changed: Setup = msgspec.structs.replace(setup, **changes)
    return changed


def add_levels(setup: Setup, rng: random.Random) -> Setup:
    """Return a setup in which half of the jobs agree in levels, as only large ones do otherwise."""
    changed: Setup = msgspec.structs.replace(setup, fan_out=2 if rng.random() < 0.5 else FAN_OUT)
    return changed


def add_streams(setup: Setup, rng: random.Random) -> Setup:
    """Return a setup in which some pairs of ranks have several streams."""
    changed: Setup = msgspec.structs.replace(setup, streams=rng.choice((1, 1, 1, 2, 3)))
    return changed


def with_followers(setup: Setup, *, is_made_possible: bool) -> Setup:
    """Return a setup in which peers follow by gradients, where these can be, or in another one."""
    if is_made_possible:
        setup = msgspec.structs.replace(
            setup, strategy="dense", options={}, interval="1", sharding="equal"
        )
    is_divided = setup.sharding == "adaptive" or setup.options.get("master_always_full", False)
    is_due = setup.strategy != "sparse" and setup.interval == "1" and not is_divided
    if not is_due or setup.replication == "0":
        return setup
    later = tuple(msgspec.structs.replace(each, is_followed=True) for each in setup.later)
    changed: Setup = msgspec.structs.replace(setup, is_followed=True, later=later, state_dtype="")
    return changed


def add_followed_experts(setup: Setup, rng: random.Random) -> Setup:
    """Return a setup in which half of the jobs with budgets follow by gradients, where these can be."""
    if setup.strategy != "selective" or rng.random() < 0.5:
        return setup
    return with_followers(setup, is_made_possible=False)


def add_boost(setup: Setup, rng: random.Random) -> Setup:
    """Return a setup in which half of the jobs that lose tokens make them up above capacities."""
    if setup.strategy not in ("partial", "selective") or setup.later or rng.random() < 0.5:
        return setup
    changed: Setup = msgspec.structs.replace(setup, boost=0.1)
    return changed


def with_many_ranks(setup: Setup, rng: random.Random) -> Setup:
    """Return a job of more ranks than a group of the agreement has, as it is without changes."""
    dp = rng.choice((9, 10, 12))
    changes: dict[str, Any] = {
        "stages": 1,
        "dp": dp,
        "ep": rng.choice([each for each in (1, 2) if dp % each == 0]),
        "nodes": rng.choice((3,) if setup.replication == "2" else (2, 3)),
        "iterations": 4,
        "fan_out": FAN_OUT,
        "stop_interval": 0,
        "recovery": "auto",
        "upstream_log": False,
    }
    changed: Setup = msgspec.structs.replace(setup, **changes)
    return changed
