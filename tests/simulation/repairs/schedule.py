"""Schedules of repairs: the ranks and nodes of a job, and the faults that hit it, drawn from a seed."""

import random

import msgspec

# Faults, each with its weight. Those that a repair mends come first.
MENDED = {
    "kill": 10,
    "stop": 5,
    "hang": 3,
    "pause-node": 1,
    "slow-store": 2,
    "stranger-in-store": 3,
}
RESTARTS = {
    "kill-zygote": 1,
    "stop-zygote": 2,
    "kill-store": 1,
    "stop-store": 1,
    "lose-node": 2,
    "kill-worker": 1,
    "raise": 1,
}
WITH_SPARES = {
    "lose-node": 6,
    "silence-node": 8,
    "kill": 4,
    "slow-store": 1,
    "stranger-in-store": 1,
}
IN_ITERATIONS = ("forward", "backward", "in step", "end", "between")
# Moments in a repair, which each rank passes once a round. The last three are also those of a start.
IN_REPAIRS = ("build", "leave", "meet", "finish", "swap", "recover", "restore")
OF_STARTS = IN_REPAIRS[-3:]
BEHIND = {
    "store": 300,
    "keeper": 30,
}  # of the store and of zygotes: how many a rank and start has, about
_WITH_RESTARTS = 0.25  # of the starts
_WITH_SPARES = 0.25  # of the schedules
# Faults in iterations, and in repairs; as many as the last are deaths alone, one in each round.
_NUM_FAULTS = ((1, 0), (1, 0), (3, 0), (5, 0), (1, 1), (1, 2), (2, 2), (1, 3), (1, 6))
_EACH_ROUND = 6


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault.

    Attributes:
        start: number of the start in which it happens.
        moment: name of the event at which it happens.
        time: how often that has passed by then, in all processes of the start.
        target: which rank; -1 for the one that passes the moment.
        amount: how long, from 0 to 1.
    """

    kind: str
    start: int
    moment: str
    time: int
    target: int = -1
    amount: float = 0.5

    def __str__(self) -> str:
        hit = "the one there" if self.target < 0 else f"rank {self.target}"
        place = f"start {self.start}, {self.moment}, time {self.time}"
        return f"{place}: {self.kind}, {hit} ({self.amount:.3f})"


class RepairSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides a simulation of repairs.

    Attributes:
        spares: nodes that wait. With any, `keep` starts the nodes, and without them the launcher.
        switching: probability with which another thread runs after an event.
    """

    seed: int
    ranks: int = 3
    nodes: int = 1
    spares: int = 0
    iterations: int = 6
    faults: tuple[Fault, ...]
    switching: float = 0.2

    def __str__(self) -> str:
        head = f"seed {self.seed}, switching {self.switching}: {self.ranks} ranks on {self.nodes} nodes"
        head += f" and {self.spares} spares" * bool(self.spares)
        return "\n".join(
            [f"{head}, {self.iterations} iterations", *(f"  {f}" for f in self.faults)]
        )

    def smaller(self) -> list["RepairSchedule"]:
        replace, faults = msgspec.structs.replace, self.faults
        found = [
            replace(self, faults=faults[:place] + faults[place + 1 :])
            for place in range(len(faults))
        ]
        simpler = {"nodes": 1 + bool(self.spares), "spares": 1, "ranks": 2, "iterations": 3}
        return found + [
            replace(self, **{name: value})
            for name, value in simpler.items()
            if getattr(self, name) > value and not (name == "ranks" and self.nodes > value)
        ]


def draw_with_spares(seed: int) -> RepairSchedule:
    """Draw a schedule with spare nodes."""
    return draw(seed, with_spares=1.0)


def draw(seed: int, with_spares: float = _WITH_SPARES) -> RepairSchedule:
    """Draw a schedule, with a probability of spare nodes."""
    rng = random.Random(f"repairs {seed}")
    ranks, iterations = rng.choice((2, 2, 3, 3, 4, 6)), rng.choice((4, 6, 8, 12))
    nodes = rng.choice([each for each in (1, 1, 2, 3) if each <= ranks])
    spares = 0
    of_spares = random.Random(f"spares {seed}")
    if of_spares.random() < with_spares:
        nodes = of_spares.choice([each for each in (2, 3) if ranks % each == 0])
        spares = of_spares.choice((1, 2, 3))
    faults: list[Fault] = []
    for number in range(rng.choice((1, 1, 1, 2))):
        kinds = MENDED if rng.random() >= _WITH_RESTARTS else {**RESTARTS, "kill": 3}
        first = {"kill": 6, "stop": 2, "hang": 1, "pause-node": 1}
        if spares:
            kinds = first = WITH_SPARES
        num_first, num_more = rng.choice(_NUM_FAULTS)
        moments: tuple[str, ...] = (*IN_REPAIRS, *BEHIND)
        if num_more == _EACH_ROUND:
            kinds, moments = {"kill": 1}, OF_STARTS
        for _ in range(num_first):
            time = 1 + rng.randrange(ranks * iterations)
            faults.append(_draw(rng, first, IN_ITERATIONS, number, ranks, time))
        for place in range(num_more):
            time = 1 + rng.randrange(ranks) + ranks * place
            faults.append(_draw(rng, kinds, moments, number, ranks, time))
    return RepairSchedule(
        seed=seed,
        ranks=ranks,
        nodes=nodes,
        spares=spares,
        iterations=iterations,
        faults=tuple(faults),
        switching=rng.choice((0.02, 0.1, 0.3, 0.6)),
    )


def _draw(
    rng: random.Random,
    kinds: dict[str, int],
    moments: tuple[str, ...],
    start: int,
    ranks: int,
    time: int,
) -> Fault:
    moment = rng.choice(moments)
    if moment in BEHIND:
        time = 1 + rng.randrange(BEHIND[moment] * ranks)
    return Fault(
        kind=rng.choices(list(kinds), list(kinds.values()))[0],
        start=start,
        moment=moment,
        time=time + ranks * (moment in OF_STARTS),
        target=-1 if rng.random() < 0.6 else rng.randrange(ranks),
        amount=round(rng.random(), 3),
    )
