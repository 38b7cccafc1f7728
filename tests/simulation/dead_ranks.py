"""Jobs with starts in which a rank is dead and a live one speaks for it: their schedules, and mistakes."""

import random
from typing import Any

import msgspec

from moe_ft.engine.voices import VoicedAgreement, Voices
from tests.simulation import halves, variations
from tests.simulation.active import Patches
from tests.simulation.job import Setup
from tests.simulation.mutations import of_group
from tests.simulation.schedule import ENDS_PROCESSES, Fault, Schedule, draw

SHARE = 0.03  # of all schedules
OF_DEAD: set[str] = set()  # mistakes that only these jobs show
_EVENTS_PER_ITERATION = 75  # of a rank
# A snapshot fails on one of two voices of a process. Then a node is lost.
FAILED_SEAT = Schedule(
    seed=1149,
    setup=Setup(dp=4, ep=1, dead=(-1, 1)),
    faults=(
        Fault(kind="kill-all", start=0, event=929),
        Fault(
            kind="memory-glitch",
            start=1,
            event=260,
            target=43,
            amount=0.272,
            is_after_recovery=True,
        ),
        Fault(kind="lose-node", start=1, event=631, is_after_recovery=True),
    ),
    switching=0.02,
)


def draw_some(seed: int) -> Schedule:
    """Return a schedule of any job."""
    if random.Random(f"one region {seed}").random() < halves.SHARE:
        return halves.draw_halved(seed)
    is_one = random.Random(f"dead ranks {seed}").random() < SHARE
    return draw_dead(seed) if is_one else draw(seed)


def draw_dead(seed: int) -> Schedule:
    """Return a schedule of a job that dies in each start that has a dead rank, and before the first one."""
    rng = random.Random(f"dead ranks in {seed}")
    found = draw(seed)
    setup = _with_dead_ranks(found.setup, rng)
    faults: list[Fault] = []
    for number in range(len(setup.dead)):
        deaths = {**dict.fromkeys(ENDS_PROCESSES, 1), "lose-node": 3}
        kinds = [variations.OF_ONE, deaths] if rng.random() < 0.5 else [deaths]
        faults += sorted(
            (_draw(rng, each, number, setup) for each in kinds), key=lambda fault: fault.event
        )
    changed: Schedule = msgspec.structs.replace(found, setup=setup, faults=tuple(faults))
    return changed


def _draw(rng: random.Random, kinds: dict[str, int], start: int, setup: Setup) -> Fault:
    num_events = _EVENTS_PER_ITERATION * setup.num_ranks * setup.iterations
    return Fault(
        kind=rng.choices(list(kinds), list(kinds.values()))[0],
        start=start,
        event=int(num_events * rng.uniform(0.02, 0.5)),
        target=rng.randrange(64),
        amount=round(rng.random(), 3),
        is_after_recovery=start > 0,
    )


def _with_dead_ranks(setup: Setup, rng: random.Random) -> Setup:
    """Return a job of which a rank is dead in the second start, and perhaps another one in the third."""
    stages, dp = rng.choice(((1, 2), (1, 3), (2, 2), (1, 4)))
    dead = (-1, rng.choice((0, rng.randrange(stages * dp))), rng.randrange(-1, stages * dp))
    nodes = rng.choice((1, 2, 2, min(3, stages * dp)))
    changes: dict[str, Any] = {
        "stages": stages,
        "dp": dp,
        "tp": 1,
        "ep": 1,
        "nodes": nodes,
        "replication": rng.choice(("auto", "auto", "0" if nodes == 1 else "1")),
        "iterations": 8,
        "strategy": "dense",
        "options": {},
        "sharding": "equal",
        "is_sharded": True,
        "is_followed": False,
        "stop_interval": 0,
        "breakpoints": False,
        "upstream_log": False,
        "recovery": "auto",
        "later": (),
        "dead": dead[: rng.choice((2, 3))],
    }
    changed: Setup = msgspec.structs.replace(setup, **changes)
    return changed


@of_group(OF_DEAD)
def votes_of_the_dead_left_out(patches: Patches) -> None:
    """A process votes with the progress of its own rank, not with that of the dead ones."""

    def begin(self: VoicedAgreement, values: Any) -> None:
        self._has_begun = True
        own = self._voice.voices.own
        self._voice.exchange(values, lambda given: self._processes.begin(given[own]))

    patches.set(VoicedAgreement, "begin", begin)


@of_group(OF_DEAD)
def lowest_live_rank_leads(patches: Patches) -> None:
    """The lowest live rank leads the agreement, not the one that speaks for rank 0."""
    original = Voices.__init__

    def begin(self: Voices, *given: Any) -> None:
        original(self, *given)
        self.live = tuple(sorted(self.live))

    patches.set(Voices, "__init__", begin)
