"""Schedules of repairs: the ranks and nodes of a job, and the faults that hit it, drawn from a seed."""

import random
from typing import Any

import msgspec

from moe_ft.config.lost_nodes import CROWDED

# Faults, each with its weight. Those that a repair mends come first.
MENDED = {
    "kill": 10,
    "stop": 5,
    "hang": 3,
    "pause-node": 1,
    "slow-store": 2,
    "stranger-in-store": 3,
    "raise": 3,
}
RESTARTS = {
    "kill-fork-server": 1,
    "stop-fork-server": 2,
    "kill-store": 1,
    "stop-store": 1,
    "lose-node": 2,
    "kill-agent": 1,
}
WITH_SPARES = {
    "lose-node": 6,
    "power-node": 6,
    "silence-node": 8,
    "cut-node": 8,
    "flap-node": 4,
    "part-node": 4,
    "stop-agent": 4,
    "cut-store": 3,
    "kill": 4,
    "slow-store": 1,
    "stranger-in-store": 1,
}
OF_ELASTIC = {
    "lose-node": 8,
    "power-node": 4,
    "flap-node": 2,
    "silence-node": 4,
    "cut-node": 4,
    "tell-node": 3,
    "kill": 4,
    "slow-store": 1,
    "stranger-in-store": 1,
    "stop-store": 1,
}
# Of schedules that are about hangs: also what must not be taken for one.
OF_HANGS = {
    "hang": 8,
    "hang-all": 3,
    "compute-long": 3,
    "slow-storage": 3,
    "write-long": 2,
    "pause-node": 2,
    "kill": 1,
}
IN_ITERATIONS = ("forward", "backward", "in step", "end", "between", "log", "logged")
IN_SECTIONS = (*IN_ITERATIONS, "evaluate", "save", "exit")
# Moments in a repair, which each rank passes once a round. The last three are also those of a start.
IN_REPAIRS = ("build", "leave", "meet", "finish", "swap", "recover", "restore")
OF_STARTS = IN_REPAIRS[-3:]
BEHIND = {
    "store": 300,
    "keeper": 30,
}  # of the store and of agents: how many a rank and start has, about
_WITH_RESTARTS = 0.25  # of the starts
_WITH_SPARES = 0.25  # of the schedules
_ABOUT_HANGS = 0.25
_WITH_BAD_BATCH = 0.2
_WITHOUT_SPARE = ("end", "share", "share", "crowd", "crowd")  # with spares
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
        amount: how long, from 0 to 1. A hang below 0.5 looks like a wait for others.
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
        repairs: whether dead ranks are replaced; else the launcher starts all again.
        hang_limit: of --moe-ft-hang-limit.
        evaluation_steps: of each evaluation, of which there are some, as there are checkpoints; 0 for none.
        spares: nodes that wait. With any, `keep` starts the nodes, and without them the launcher.
        fewest: nodes with which all ranks begin again; with any, `keep` starts the nodes. 0 if none may be
            missing.
        keeps_apart: whether a node without ranks keeps the job's store, and not node 0.
        without_spare: of --moe-ft-without-spare.
        bad_batch: a rank and an iteration that it cannot run; no rank where there is none.
        restarts: of --max-restarts, in a row without a finished iteration; of nodes that `keep` starts.
        switching: probability with which another thread runs after an event.
    """

    seed: int
    ranks: int = 3
    nodes: int = 1
    spares: int = 0
    fewest: int = 0
    keeps_apart: bool = False
    without_spare: str = "end"
    restarts: int = 0
    bad_batch: tuple[int, int] = (-1, 0)
    iterations: int = 6
    repairs: bool = True
    hang_limit: str = "auto"
    evaluation_steps: int = 0
    faults: tuple[Fault, ...]
    switching: float = 0.2

    def __str__(self) -> str:
        head = f"seed {self.seed}, switching {self.switching}: {self.ranks} ranks on {self.nodes} nodes"
        head += f" and {self.spares} spares" * bool(self.spares)
        head += f", {self.fewest} at least" * bool(self.fewest)
        head += ", and one for the store" * self.keeps_apart
        head += f", {self.restarts} restarts" * bool(self.restarts)
        head += f", {self.without_spare} without a spare" + ", without repairs" * (not self.repairs)
        head += ", rank {} cannot run iteration {}".format(*self.bad_batch) * (
            self.bad_batch[0] >= 0
        )
        head += f", limit {self.hang_limit}, {self.evaluation_steps} steps of evaluations"
        return "\n".join(
            [f"{head}, {self.iterations} iterations", *(f"  {f}" for f in self.faults)]
        )

    def smaller(self) -> list["RepairSchedule"]:
        replace, faults = msgspec.structs.replace, self.faults
        found = [
            replace(self, faults=faults[:place] + faults[place + 1 :])
            for place in range(len(faults))
        ]
        is_kept = bool(self.spares or self.fewest or self.without_spare in CROWDED)
        simpler: dict[str, Any] = {
            "nodes": 1 + is_kept,
            "spares": 0 if self.fewest or self.without_spare in CROWDED else 1,
            "ranks": 2,
            "iterations": 3,
            "bad_batch": (-1, 0),
        }
        return found + [
            replace(self, **{name: value})
            for name, value in simpler.items()
            if getattr(self, name) > value
            and not (name == "ranks" and self.nodes > value)
            and not (name in ("ranks", "nodes") and self.fewest)
        ]


def draw_with_spares(seed: int) -> RepairSchedule:
    """Draw a schedule with spare nodes."""
    return draw(seed, with_spares=1.0)


def draw_bad_batches(seed: int) -> RepairSchedule:
    """Draw a schedule of a job in which a rank cannot run an iteration, without spare nodes."""
    found = draw(seed, with_spares=0.0)
    rng = random.Random(f"bad batch {seed}")
    bad_batch = rng.randrange(found.ranks), 1 + rng.randrange(found.iterations - 1)
    return msgspec.structs.replace(found, bad_batch=bad_batch)


def draw_corrupt(seed: int) -> RepairSchedule:
    """Draw a schedule in which a node computes wrongly, and others are lost after that."""
    rng = random.Random(f"corrupt {seed}")
    nodes, iterations = rng.choice((2, 2, 3)), rng.choice((8, 12))
    ranks = nodes * rng.choice((1, 1, 2))
    times = sorted(1 + rng.randrange(ranks * iterations) for _ in range(rng.choice((1, 2, 2, 3))))
    kinds = "corrupt-node", *rng.choices(("lose-node", "corrupt-node"), k=len(times) - 1)
    return RepairSchedule(
        seed=seed,
        ranks=ranks,
        nodes=nodes,
        spares=rng.choice((1, 1, 2)),
        keeps_apart=rng.random() < 0.7,
        restarts=rng.choice((0, 2)),
        iterations=iterations,
        faults=tuple(
            _draw(rng, {kind: 1}, IN_ITERATIONS, 0, ranks, time)
            for kind, time in zip(kinds, times, strict=True)
        ),
        switching=rng.choice((0.02, 0.1, 0.3)),
    )


def draw_elastic(seed: int) -> RepairSchedule:
    """Draw a schedule of a job that begins again on fewer nodes, and on more when some come back."""
    rng = random.Random(f"elastic {seed}")
    nodes, iterations = rng.choice((2, 3, 3)), rng.choice((4, 6, 8))
    ranks = nodes * rng.choice((1, 1, 2))
    return RepairSchedule(
        seed=seed,
        ranks=ranks,
        nodes=nodes,
        spares=rng.choice((0, 0, 1)),
        fewest=rng.choice((1, 1, 2)),
        keeps_apart=rng.random() < 0.7,
        iterations=iterations,
        faults=tuple(
            _draw(rng, OF_ELASTIC, moments, 0, ranks, 1 + rng.randrange(most))
            for moments, most in rng.choices(
                ((IN_ITERATIONS, ranks * iterations), (OF_STARTS, 6 * ranks), (IN_REPAIRS, ranks)),
                (3, 2, 1),
                k=rng.choice((1, 2, 3, 5, 8)),
            )
        ),
        switching=rng.choice((0.02, 0.1, 0.3)),
    )


def draw_hangs(seed: int) -> RepairSchedule:
    """Draw a schedule of hangs, and of what is none, in each section of the loop."""
    rng = random.Random(f"hangs {seed}")
    ranks, iterations = rng.choice((2, 2, 3, 4)), rng.choice((6, 8, 10))
    faults: list[Fault] = []
    for number in range(rng.choice((1, 1, 2))):
        for _ in range(rng.choice((1, 1, 1, 2))):
            moments: tuple[str, ...] = IN_SECTIONS
            most = ranks * iterations
            if rng.random() < 0.15:
                moments, most = OF_STARTS[1:], ranks
            moment = rng.choice(moments)
            faults.append(
                Fault(
                    kind=rng.choices(list(OF_HANGS), list(OF_HANGS.values()))[0],
                    start=number,
                    moment=moment,
                    time=1 + rng.randrange(ranks if moment == "exit" else most),
                    target=-1,
                    amount=round(rng.random(), 3),
                )
            )
    return RepairSchedule(
        seed=seed,
        ranks=ranks,
        iterations=iterations,
        repairs=rng.random() < 0.6,
        hang_limit=rng.choice(("auto", "auto", "25")),
        evaluation_steps=rng.choice((2, 6, 40)),
        faults=tuple(faults),
        switching=rng.choice((0.02, 0.1, 0.3)),
    )


def draw(seed: int, with_spares: float = _WITH_SPARES) -> RepairSchedule:
    """Draw a schedule, with a probability of spare nodes."""
    if with_spares < 1.0 and random.Random(f"about hangs {seed}").random() < _ABOUT_HANGS:
        return draw_hangs(seed)
    rng = random.Random(f"repairs {seed}")
    ranks, iterations = rng.choice((2, 2, 3, 3, 4, 6)), rng.choice((4, 6, 8, 12))
    nodes, spares, keeps_apart = 1, 0, False
    of_spares = random.Random(f"spares {seed}")
    if of_spares.random() < with_spares:
        nodes = of_spares.choice([each for each in (2, 3) if ranks % each == 0])
        spares, keeps_apart = of_spares.choice((1, 2, 3)), of_spares.random() < 0.5
    without_spare, restarts = "end", 0
    if spares:
        of_spares = random.Random(f"without a spare {seed}")
        without_spare = of_spares.choice(_WITHOUT_SPARE)
        spares = of_spares.choice((0, 0, 1, spares)) if without_spare in CROWDED else spares
        restarts = of_spares.choice((0, 0, 2))
    faults: list[Fault] = []
    for number in range(rng.choice((1, 1, 1, 2))):
        kinds = MENDED if rng.random() >= _WITH_RESTARTS else {**RESTARTS, "kill": 3}
        first = {"kill": 6, "stop": 2, "hang": 1, "pause-node": 1}
        if nodes > 1 and (spares or without_spare in CROWDED):
            kinds = first = {**WITH_SPARES, **({"raise": 5} if restarts else {})}
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
    of_batches, bad_batch = random.Random(f"bad batches {seed}"), (-1, 0)
    if of_batches.random() < _WITH_BAD_BATCH:
        bad_batch = of_batches.randrange(ranks), 1 + of_batches.randrange(iterations - 1)
    return RepairSchedule(
        seed=seed,
        bad_batch=bad_batch,
        ranks=ranks,
        nodes=nodes,
        spares=spares,
        keeps_apart=keeps_apart,
        without_spare=without_spare,
        restarts=restarts,
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
