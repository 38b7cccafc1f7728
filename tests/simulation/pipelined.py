"""Jobs whose stages may recover alone, and the moments at which faults hit them."""

import random
from typing import Any

import msgspec

from tests.simulation.job import Setup

SHARE = 0.3  # of the schedules
SHARE_WITH_BREAKPOINTS = 0.25  # of the others
EVENTS_PER_ITERATION = 40  # of a rank
SOON = 0.35  # of the events of a start: after a recovery, often before there is a window
LIVE = {
    "kill-rank": 8,
    "kill-this": 6,
    "kill-two": 3,
    "kill-node": 2,
    "lose-node": 5,
    "terminate": 6,
    "kill-all": 1,
    "suspend-rank": 1,
    "hang": 1,
    "reset": 1,
    "memory-glitch": 1,
}
# Names of events and threads, as they begin. How often ranks pass them depends on the job.
MOMENTS_OF_TRAINING = ("link", "before step", "in step", "after step")
MOMENTS_OF_RECOVERY = ("phase replay", "phase recovery", "moe_ft-boundary_")
MOMENTS_OF_LEAVING = ("in breakpoint", "told to end", "store")
_OFTEN = {"link": 16, "before step": 1, "in step": 1, "after step": 1}  # by a rank in an iteration


def draw_moment(setup: Setup, start: int, rng: random.Random) -> tuple[str, int]:
    """Return a moment for the first fault of a start, and which time it is passed."""
    kinds = MOMENTS_OF_TRAINING if not start or rng.random() < 0.6 else MOMENTS_OF_RECOVERY
    moment = rng.choice(kinds)
    per_iteration = setup.shape.num_ranks * _OFTEN.get(moment, 0)
    if not start:  # when there is a window
        iterations = rng.uniform(2, setup.iterations)
        return moment, 1 + int(per_iteration * iterations)
    return moment, 1 + rng.randrange(per_iteration * setup.iterations // 2 or setup.shape.num_ranks)


def with_logs(setup: Setup, rng: random.Random) -> Setup:
    """Return a job of several stages that keeps breakpoints and what its stages send."""
    stages, dp = rng.choice(((2, 1), (2, 2), (3, 1), (3, 1), (3, 2), (4, 1), (5, 1)))
    nodes = rng.choice([each for each in (1, 2, 3, stages) if each <= stages * dp])
    changes: dict[str, Any] = {
        "stages": stages,
        "dp": dp,
        "ep": rng.choice([each for each in (1, 2) if dp % each == 0]),
        "nodes": nodes,
        "layers": 1,
        "iterations": rng.choice((6, 8, 10)),
        "interval": rng.choice(
            ("1", "2", "3")
        ),  # where every state is in a snapshot, breakpoints are not read
        "sharding": "equal",
        "replication": rng.choice(("auto", "auto", "0")) if nodes > 1 else "0",
        "breakpoints": True,
        "upstream_log": True,
        "on_error": "degrade",  # a window that is late costs logs
        "recovery": rng.choice(("auto", "auto", "local", "global")),
    }
    if setup.strategy == "partial":
        changes |= {"strategy": "dense", "options": {}}
    if setup.persist_interval and rng.random() < 0.7:
        changes |= {"persist_interval": 0, "dense_interval": 0}
    changed: Setup = msgspec.structs.replace(setup, **changes)
    return changed
