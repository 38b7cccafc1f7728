"""Schedules: the flags of a job and the faults that hit it, drawn from a seed."""

import random
from collections.abc import Callable
from typing import Any

import msgspec

from moe_ft.planning.levels import FAN_OUT
from tests.simulation import layouts, parity, pipelined, variations
from tests.simulation.job import Setup

# Faults while ranks run, each with its weight. `Fault.target` chooses a rank, a node or a pair of nodes.
LIVE = {
    "kill-rank": 10,
    "kill-node": 3,
    "kill-all": 3,
    "lose-node": 5,
    "kill-writer": 3,
    "suspend-rank": 3,
    "suspend-writer": 1,
    "storage-error": 4,
    "storage-glitch": 4,
    "storage-full": 2,
    "storage-slow": 2,
    "storage-stuck": 2,
    "memory-full": 2,
    "memory-error": 1,
    "partition": 2,
    "network-stuck": 2,
    "network-slow": 2,
    "reset": 3,
    "refuse": 1,
    "wall-clock": 2,
    "corrupt": 2,
}
# Faults between two starts.
OFFLINE = {
    "flip-memory": 3,
    "flip-storage": 3,
    "cut-memory": 1,
    "cut-storage": 1,
    "lose-node": 3,
    "lose-all-memory": 2,
    "power-loss": 4,
    "set-aside": 2,
    "bring-back": 3,
    "move-ranks": 3,
}
_AFTER_RECOVERY = 0.4  # of the starts after the first are killed in their first iterations
_SOON = 0.2  # of the events of a start
_DAMAGED = 0.15  # of the schedules have damage and little else
_STRANGE = 0.3  # of the starts of jobs with breakpoints have a stranger in their store
_EVENTS_PER_ITERATION = 75  # of a rank, and more than most have, so that some faults come too late
_DEATHS_OF_PARITY = 0.7
_DAMAGED_STRIPES = 0.3  # of these
STRANGER = "stranger-in-store"
_OF_LATER = {"stages", "experts", "skips", "is_followed"}  # also those of layouts that come later
ENDS_PROCESSES = ("kill-rank", "kill-node", "kill-all", "lose-node")


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault.

    Attributes:
        start: number of the start in which it happens.
        event: after how many events of that start; -1 for before it.
        is_after_recovery: whether events count from when a rank has recovered.
        moment: if given, the event counts how often ranks pass a moment whose name begins like this.
        target: which of those that it can hit.
        amount: how long or how much, from 0 to 1.
    """

    kind: str
    start: int
    event: int = -1
    target: int = 0
    amount: float = 0.0
    is_after_recovery: bool = False
    moment: str = ""

    def __str__(self) -> str:
        place = "before it" if self.event < 0 else f"event {self.event}"
        if self.is_after_recovery:
            place += " after recovery"
        if self.moment:
            place = f"{self.moment}, time {self.event}"
        return f"start {self.start}, {place}: {self.kind} {self.target} ({self.amount:.3f})"


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a simulation.

    Attributes:
        switching: probability with which another thread runs after an event.
    """

    seed: int
    setup: Setup
    faults: tuple[Fault, ...]
    switching: float = 0.2

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, switching {self.switching}", f"  {self.setup}"]
        return "\n".join([*lines, *(f"  {each}" for each in self.faults)])

    def smaller(self) -> list["Schedule"]:
        """Return schedules with fewer faults, or of a simpler job."""
        replace = msgspec.structs.replace
        found = [
            replace(self, faults=self.faults[:place] + self.faults[place + 1 :])
            for place in range(len(self.faults))
        ]
        setup = self.setup
        simpler: list[dict[str, Any]] = [
            {
                "stages": 1,
                "nodes": min(setup.nodes, setup.dp),
                "upstream_log": False,
                "recovery": "auto",
            },
            {"later": setup.later[:-1]},
            {"skips": False},
            {"is_followed": False},
            {"state_dtype": ""},
            {"stop_interval": 0},
            {"on_error": "degrade"},
            {"is_sharded": True},
            {"persist_interval": 0},
            {"dense_interval": 0},
            {"replication": "0", "is_followed": False, "parity": 0},
            {"interval": "1"},
            {"iterations": 4},
            {"experts": 2},
            {"upstream_log": False, "recovery": "auto"},
            {"breakpoints": False, "upstream_log": False, "recovery": "auto"},
            {"fan_out": FAN_OUT},
        ]
        for changes in simpler:
            if setup.later and not _OF_LATER.isdisjoint(changes):
                continue
            if any(getattr(setup, name) != value for name, value in changes.items()):
                found.append(replace(self, setup=replace(setup, **changes)))
        return found


def draw(
    seed: int,
    *,
    share_of_layouts: float = layouts.SHARE,
    share_of_ages: float = layouts.SHARE_OF_AGES,
    share_of_followed: float = variations.SHARE_OF_FOLLOWED,
    is_selective: bool = False,
    share_of_parity: float = parity.SHARE,
) -> Schedule:
    rng = random.Random(f"schedule {seed}")
    setup = _draw_setup(rng)
    num_events = _EVENTS_PER_ITERATION * setup.shape.num_ranks * setup.iterations
    faults: list[Fault] = []
    for number in range(rng.choice((1, 1, 2, 2, 3, 4))):
        before = _draw_offline(rng, number, faults) if number and rng.random() < 0.5 else []
        during = [
            _draw(rng, LIVE, number, lambda: _draw_event(rng, num_events))
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ]
        kinds = {each.kind for each in during}
        if not kinds & set(ENDS_PROCESSES) and rng.random() < 0.8:
            # only a copy that is read shows that it is wrong
            kills = ("lose-node",) if "corrupt" in kinds else ENDS_PROCESSES
            weights = dict.fromkeys(kills, 1)
            during.append(_draw(rng, weights, number, lambda: _draw_event(rng, num_events)))
        faults += [*before, *sorted(during, key=lambda fault: fault.event)]
    switching = rng.choice((0.02, 0.1, 0.3, 0.6))
    more = random.Random(f"variation {seed}")
    setup = variations.vary(setup, more)
    setup = variations.add_dense_interval(setup, random.Random(f"dense {seed}"))
    faults = _add_faults(faults, more, num_events)
    if more.random() < _DAMAGED:
        faults = _damage(more, num_events)
    setup, faults = _add_storage_faults(setup, faults, random.Random(f"storage {seed}"), num_events)
    alone = random.Random(f"stages alone {seed}")
    if alone.random() < pipelined.SHARE:
        setup = pipelined.with_logs(setup, alone)
        faults = _draw_faults_of_stages(setup, alone)
    elif alone.random() < pipelined.SHARE_WITH_BREAKPOINTS:
        setup = msgspec.structs.replace(setup, breakpoints=True)
    setup, faults = _change_layouts(setup, faults, seed, share_of_layouts, share_of_ages)
    if setup.breakpoints:
        faults = _add_strangers(faults, random.Random(f"strangers {seed}"))
    setup = variations.add_levels(setup, random.Random(f"levels {seed}"))
    setup = variations.add_streams(setup, random.Random(f"connections {seed}"))
    many = random.Random(f"many ranks {seed}")
    if not setup.later and many.random() < variations.SHARE_OF_MANY:
        setup = variations.with_many_ranks(setup, many)
        faults = _draw_faults_of_many(setup, many)
    followers = random.Random(f"followers {seed}")
    if followers.random() < share_of_followed:
        setup = variations.with_followers(setup, is_made_possible=share_of_followed == 1.0)
    budgets = random.Random(f"selective {seed}")
    setup = variations.add_selective(setup, budgets, is_certain=is_selective)
    if is_selective:
        faults = _draw_deaths(setup, budgets)
    setup = variations.add_followed_experts(setup, random.Random(f"followed experts {seed}"))
    setup = variations.add_boost(setup, random.Random(f"boost {seed}"))
    setup, faults = _keep_parity(setup, faults, seed, share_of_parity)
    return Schedule(seed=seed, setup=setup, faults=tuple(faults), switching=switching)


def _keep_parity(
    setup: Setup, faults: list[Fault], seed: int, share: float
) -> tuple[Setup, list[Fault]]:
    """Return a job of which a share keeps parity, and its faults."""
    rng = random.Random(f"parity {seed}")
    if rng.random() >= share:
        return setup, faults
    setup = parity.with_parity(setup, rng)
    if rng.random() >= _DEATHS_OF_PARITY:
        return setup, faults
    faults = _draw_deaths(setup, rng)
    if rng.random() < _DAMAGED_STRIPES:  # in the middle of a stripe
        num_sent = setup.num_ranks * (setup.parity - 1) * setup.iterations
        damage = _draw(rng, {"corrupt": 1}, 0, lambda: 1 + rng.randrange(num_sent))
        faults.insert(0, msgspec.structs.replace(damage, moment="phase replicate"))
    return setup, faults


def _change_layouts(
    setup: Setup, faults: list[Fault], seed: int, share: float, share_of_ages: float
) -> tuple[Setup, list[Fault]]:
    """Return a job of which a share has several layouts, and its faults."""
    rng = random.Random(f"layouts {seed}")
    if rng.random() >= share:
        return setup, faults
    setup = layouts.with_layouts(setup, rng)
    aging = random.Random(f"ages {seed}")
    if aging.random() < share_of_ages:
        setup = layouts.with_ages(setup, aging)
        return setup, _draw_faults_of_ages(setup, aging)
    if rng.random() < layouts.SHARE_OF_DEATHS:
        return setup, _draw_faults_of_layouts(setup, rng)
    return setup, [each for each in faults if each.kind not in layouts.LEFT_OUT]


def _draw_faults_of_stages(setup: Setup, rng: random.Random) -> list[Fault]:
    """Return faults of a job whose stages recover alone, at moments that matter to them."""
    num_events = pipelined.EVENTS_PER_ITERATION * setup.shape.num_ranks * setup.iterations
    faults: list[Fault] = []
    for number in range(rng.choice((1, 2, 2, 3, 3, 4))):
        if number and rng.random() < 0.2:
            faults.append(_draw(rng, OFFLINE, number, lambda: -1))
        if number and rng.random() < 0.4:
            soon = int(pipelined.SOON * num_events)
            fault = _draw(rng, pipelined.LIVE, number, lambda soon=soon: rng.randrange(soon))
            here = [msgspec.structs.replace(fault, is_after_recovery=True)]
        else:
            moment, times = pipelined.draw_moment(setup, number, rng)
            fault = _draw(rng, pipelined.LIVE, number, lambda times=times: times)
            here = [msgspec.structs.replace(fault, moment=moment)]
        if rng.random() < 0.25:
            moment = rng.choice(pipelined.MOMENTS_OF_LEAVING)
            times = 1 + rng.randrange(setup.shape.num_ranks)
            fault = _draw(rng, pipelined.LIVE, number, lambda times=times: times)
            here.append(msgspec.structs.replace(fault, moment=moment))
        faults += here
    return faults


def _draw_faults_of_many(setup: Setup, rng: random.Random) -> list[Fault]:
    """Return faults of a job of many ranks: something befalls one of them, and soon the job dies."""
    num_events = _EVENTS_PER_ITERATION * setup.num_ranks * setup.iterations
    first = _draw(rng, variations.OF_ONE, 0, lambda: int(num_events * rng.uniform(0.1, 0.6)))
    soon = first.event + int(rng.uniform(0, 2) * num_events / setup.iterations)
    deaths = dict.fromkeys(ENDS_PROCESSES, 1)
    return [first, _draw(rng, deaths, 0, lambda: soon)]


def _draw_deaths(setup: Setup, rng: random.Random) -> list[Fault]:
    """Return faults of a job that dies, mostly with a node, when it has state that is worth something."""
    num_events = _EVENTS_PER_ITERATION * setup.num_ranks * setup.iterations
    kinds = {**dict.fromkeys(ENDS_PROCESSES, 1), "lose-node": 4}
    first = _draw(rng, kinds, 0, lambda: int(num_events * rng.uniform(0.2, 0.9)))
    later = [
        _draw(rng, kinds, number, lambda: int(num_events * rng.uniform(0.02, 0.1)))
        for number in range(1, rng.choice((1, 2, 3)))
    ]
    return [first, *(msgspec.structs.replace(each, is_after_recovery=True) for each in later)]


def _draw_faults_of_layouts(setup: Setup, rng: random.Random) -> list[Fault]:
    """Return faults of a job whose starts die when they have state, or right after they have recovered it."""
    kinds = dict.fromkeys(ENDS_PROCESSES, 1)
    faults: list[Fault] = []
    for number in range(1 + len(setup.later)):
        per_iteration = _EVENTS_PER_ITERATION * setup.shape_of(number).num_ranks
        if number and rng.random() < 0.25:
            faults.append(_draw(rng, layouts.OFFLINE, number, lambda: -1))
        is_soon = number > 0 and rng.random() < 0.6
        iterations = rng.uniform(0, 2) if is_soon else setup.iterations * rng.uniform(0.2, 0.7)
        event = int(per_iteration * iterations)
        fault = _draw(rng, kinds, number, lambda event=event: event)
        faults.append(msgspec.structs.replace(fault, is_after_recovery=is_soon))
    return faults


def _draw_faults_of_ages(setup: Setup, rng: random.Random) -> list[Fault]:
    """Return faults of a job whose experts have ages, and whose starts die, each in another layout."""
    faults: list[Fault] = []
    for number in range(1 + len(setup.later)):
        if number and rng.random() < (0.5 if setup.persists else 0.25):
            kinds = {**layouts.OFFLINE, "lose-all-memory": 8} if setup.persists else layouts.OFFLINE
            faults.append(_draw(rng, kinds, number, lambda: -1))
        moment, times = layouts.draw_death(setup, number, rng)
        fault = _draw(rng, layouts.DEATHS, number, lambda times=times: times)
        faults.append(msgspec.structs.replace(fault, moment=moment))
    return faults


def _add_strangers(faults: list[Fault], rng: random.Random) -> list[Fault]:
    """Add that a stranger writes to the store of a start in which ranks may leave."""
    starts = sorted({each.start for each in faults})
    chosen = [number for number in starts if rng.random() < _STRANGE]
    return [*(_draw(rng, {STRANGER: 1}, number, lambda: 0) for number in chosen), *faults]


def _damage(rng: random.Random, num_events: int) -> list[Fault]:
    """Return faults of a job that dies when it has state: then bits flip, or power is lost."""
    kills = {"kill-all": 1, "kill-rank": 1}
    if rng.random() < 0.25:  # late, so that something is on storage
        death = _draw(rng, kills, 0, lambda: int(num_events * rng.uniform(0.4, 1.0)))
        return [death, _draw(rng, {"power-loss": 1}, 1, lambda: -1)]
    death = _draw(rng, kills, 0, lambda: rng.randrange(num_events // 2))
    if rng.random() < 0.7:
        return [death, *[_draw(rng, {"flip-memory": 1}, 1, lambda: -1)] * rng.choice((2, 8, 32))]
    flips = [_draw(rng, {"flip-storage": 1}, 1, lambda: -1)] * rng.choice((2, 8, 32))
    return [death, _draw(rng, {"lose-all-memory": 1}, 1, lambda: -1), *flips]


def _add_faults(faults: list[Fault], rng: random.Random, num_events: int) -> list[Fault]:
    found = []
    for number in range(1 + max(each.start for each in faults)):
        here = [each for each in faults if each.start == number]
        if (kind := variations.draw_kind(rng, variations.OFFLINE, number)) is not None:
            here.insert(0, _draw(rng, {kind: 1}, number, lambda: -1))
        if (kind := variations.draw_kind(rng, variations.LIVE, number)) is not None:
            here.append(_draw(rng, {kind: 1}, number, lambda: _draw_event(rng, num_events)))
        if number and rng.random() < _AFTER_RECOVERY:
            kinds = dict.fromkeys(ENDS_PROCESSES, 1)
            fault = _draw(rng, kinds, number, lambda: int(_SOON * num_events * rng.random()))
            here = [each for each in here if each.event < 0]  # it is to be the first
            here.append(msgspec.structs.replace(fault, is_after_recovery=True))
        found += sorted(here, key=lambda fault: fault.event)
    return found


def _add_storage_faults(
    setup: Setup, faults: list[Fault], rng: random.Random, num_events: int
) -> tuple[Setup, list[Fault]]:
    kind = rng.choices(
        ("", "second-job", "prune", "garble-storage", "storage-away"), (14, 3, 1, 1, 1)
    )[0]
    last = max(each.start for each in faults)
    if not setup.persists or not kind:
        return setup, faults
    if kind == "second-job":
        event = int(_SOON / 4 * num_events * rng.random())  # of a start that nothing else disturbs
        second = Fault(kind=kind, start=last + 1, event=event, is_after_recovery=True)
        return setup, [*faults, second]
    if kind == "prune":  # each start leaves a checkpoint
        setup = msgspec.structs.replace(setup, keep=3, stop_interval=max(1, setup.iterations // 4))
        flips = [Fault(kind="flip-storage", start=2)] * rng.choice((1, 2, 8))
        return setup, [*flips, Fault(kind=kind, start=2)]
    if kind == "storage-away":  # the only fault of the second start
        target, amount = rng.randrange(3), 1.0  # longer than what passes between two starts
        kill = Fault(kind="kill-all", start=0, event=int(num_events * rng.uniform(0.2, 0.8)))
        return setup, [kill, Fault(kind=kind, start=1, target=target, amount=amount)]
    at = int(num_events * rng.uniform(0.4, 1.0))  # when something is on storage
    garble = Fault(kind=kind, start=0, event=int(at * rng.random()))
    kill = Fault(kind="kill-all", start=0, event=at)
    return setup, [garble, kill, Fault(kind="lose-all-memory", start=1)]


def _draw_offline(rng: random.Random, start: int, faults: list[Fault]) -> list[Fault]:
    """Return what happens before a start: a replaced node often comes back, bits often flip together."""
    gone = [each for each in faults if each.kind == "set-aside"]
    if gone and rng.random() < 0.7:
        return [msgspec.structs.replace(gone[-1], kind="bring-back", start=start)]
    first = _draw(rng, OFFLINE, start, lambda: -1)
    if first.kind.startswith("flip-") and rng.random() < 0.5:
        return [first] * rng.choice((2, 4, 8))
    others = rng.choice((0, 0, 0, 1, 2))
    return [first, *(_draw(rng, OFFLINE, start, lambda: -1) for _ in range(others))]


def _draw_event(rng: random.Random, num_events: int) -> int:
    """Return when: anywhere, or soon, where a start recovers."""
    return int(num_events * (rng.random() if rng.random() < 0.7 else 0.2 * rng.random()))


def _draw(rng: random.Random, kinds: dict[str, int], start: int, event: Callable[[], int]) -> Fault:
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    return Fault(
        kind=kind,
        start=start,
        event=event(),
        target=rng.randrange(64),
        amount=round(rng.random(), 3),
    )


def _draw_setup(rng: random.Random) -> Setup:
    strategy = rng.choice(("dense", "dense", "sparse", "sparse", "partial"))
    stages, dp = rng.choice(((1, 1), (1, 2), (1, 2), (2, 1), (2, 2)))
    nodes = rng.choice([each for each in (1, 2, 2, 3) if each <= stages * dp])
    ep = rng.choice([each for each in (1, 2) if dp % each == 0])
    options: dict[str, Any] = {}
    interval = "1"
    if strategy == "sparse":
        options = {"window": rng.choice(("1", "2", "3", "auto")), "max_window": 4}
    elif strategy == "partial":
        k = rng.choice((1, 2))
        selection = rng.choice(("sequential", "load-aware"))
        options = {"k_snapshot": str(k), "k_persist": rng.randint(1, k), "selection": selection}
    else:
        interval = rng.choice(("1", "1", "2", "auto"))
    is_sharded = rng.random() < 0.7
    return Setup(
        stages=stages,
        dp=dp,
        ep=ep,
        experts=rng.choice((2, 4)),
        is_sharded=is_sharded,
        skips=rng.random() < 0.3,
        nodes=nodes,
        iterations=rng.choice((4, 6, 8, 10)),
        strategy=strategy,
        options=options,
        interval=interval,
        sharding="equal" if is_sharded else rng.choice(("none", "equal")),
        replication="auto" if nodes > 1 and rng.random() < 0.8 else "0",
        persist_interval=rng.choice((0, 1, 1, 2)),
        keep=rng.choice((1, 2)),
        state_dtype="master=split" if rng.random() < 0.15 else "",
    )
