"""Jobs whose peers have one region of each rank: their schedules, and mistakes in what they get when.

Nodes are lost at any moment, one or two at once. Memory has what was complete after the loss of one, and
after that of two if nothing was being sent.
"""

import random
from typing import Any

from moe_ft.engine.links.sender import ReplicaSender
from tests.simulation.active import Patches
from tests.simulation.job import Setup
from tests.simulation.mutations import of_group
from tests.simulation.schedule import Fault, Schedule

SHARE = 0.04  # of all schedules
OF_HALVES: set[str] = set()  # mistakes that only these jobs show
_EVENTS_PER_ITERATION = 60  # of a rank
_DEATHS = {"lose-node": 6, "lose-two": 3, "kill-all": 1, "kill-rank": 1}
_BEFORE = {"reset": 2, "network-slow": 2, "memory-glitch": 1, "partition": 1}


def draw_halved(seed: int) -> Schedule:
    """Return a schedule of a job that loses nodes in each start."""
    rng = random.Random(f"halves {seed}")
    nodes, dp = rng.choice(((3, 3), (3, 3), (3, 6), (4, 4)))
    is_sparse = rng.random() < 0.4
    setup = Setup(
        dp=dp,
        ep=1,
        nodes=nodes,
        experts=2,
        iterations=rng.choice((6, 8, 10)),
        strategy="sparse" if is_sparse else "dense",
        options={"window": rng.choice(("2", "3")), "max_window": 4} if is_sparse else {},
        interval="1" if is_sparse else rng.choice(("1", "2", "3", "auto")),
        is_sharded=rng.random() < 0.8,
        replication=rng.choice(("auto", "2", "2", "3")) if nodes > 3 else rng.choice(("auto", "2")),
        streams=rng.choice((1, 1, 2)),
        persist_interval=rng.choice((0, 0, 1)),
        breakpoints=rng.random() < 0.2,
    )
    num_events = _EVENTS_PER_ITERATION * setup.num_ranks * setup.iterations
    faults = []
    for number in range(rng.choice((1, 2, 2, 3))):
        share = rng.uniform(0.15, 0.9) if not number else rng.uniform(0.02, 0.3)
        here = [_draw(rng, _DEATHS, number, int(num_events * share))]
        if rng.random() < 0.2:
            here.insert(0, _draw(rng, _BEFORE, number, int(num_events * share * rng.random())))
        faults += here
    return Schedule(
        seed=seed,
        setup=setup,
        faults=tuple(faults),
        switching=rng.choice((0.02, 0.1, 0.3, 0.6)),
    )


def _draw(rng: random.Random, kinds: dict[str, int], start: int, event: int) -> Fault:
    return Fault(
        kind=rng.choices(list(kinds), list(kinds.values()))[0],
        start=start,
        event=event,
        is_after_recovery=start > 0,
        target=rng.randrange(64),
        amount=round(rng.random(), 3),
    )


@of_group(OF_HALVES)
def second_half_not_held_back(patches: Patches) -> None:
    """A rank sends a window to the other half of its peers before all ranks have it at the first half."""
    original = ReplicaSender._send_first

    def send_first(self: ReplicaSender, replica: Any) -> Any:
        result = original(self, replica)
        self._send_rest(replica)
        return result

    patches.set(ReplicaSender, "_send_first", send_first)


@of_group(OF_HALVES)
def next_window_not_held_back(patches: Patches) -> None:
    """The first half of the peers gets the next window before the other half has this one."""
    send_first, send_rest = ReplicaSender._send_first, ReplicaSender._send_rest
    waiting: dict[ReplicaSender, Any] = {}

    def first(self: ReplicaSender, replica: Any) -> Any:
        result = send_first(self, replica)
        if (before := waiting.pop(self, None)) is not None:
            send_rest(self, before)
        return result

    patches.set(ReplicaSender, "_send_first", first)
    patches.set(ReplicaSender, "_send_rest", waiting.__setitem__)
