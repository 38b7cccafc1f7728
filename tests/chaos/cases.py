"""Cases of chaos: a seed draws a small job, and the faults that strike it from outside.

Pure: nothing starts here. tests/chaos/job.py runs the job, strikes.py the faults, and verdict.py judges.
Scenarios take turns with the seed, so that as many seeds as there are scenarios have each of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any

NUM_RANKS, NUM_ITERATIONS = 4, 60
EVALUATED_EVERY, EXITS_EVERY = 6, 20
HEARTBEAT_S, LOST_AFTER_S = 6, 4
_PHASES = ("forward", "backward", "before-step", "in-step", "after-step", "between")


class Kind(StrEnum):
    """Faults, and the return of a node. Targets are ranks, or numbers of nodes."""

    KILL_RANKS = "kill ranks"  # at one moment
    TERMINATE_RANK = "terminate rank"
    STOP_RANK = "stop rank"
    TRUNCATE = "truncate memory"  # a file of a rank
    FLIP = "flip a bit in memory"  # of a rank, and kill it
    KILL_FORK_SERVER = "kill fork server"
    KILL_AGENT = "kill agent"  # torchrun, or the process of `keep`
    TERMINATE_AGENT = "terminate agent"
    LOSE_NODES = "lose nodes"  # at one moment, with their memory
    STOP_NODE = "stop node"
    CUT_NODE = "cut node"
    RETURN_NODE = "return node"
    FILL = "fill storage"
    FREEZE = "freeze storage"
    READ_ONLY = "storage read-only"


OF_STORAGE = (Kind.FILL, Kind.FREEZE, Kind.READ_ONLY)
OF_AGENTS = (Kind.KILL_AGENT, Kind.TERMINATE_AGENT)
_OF_NODES = ("node", "agent", "fork server")
OF_NODES = tuple(each for each in Kind if any(name in each for name in _OF_NODES))


class When(StrEnum):
    """Kinds of moments."""

    START = "start"  # ranks run, and no iteration has ended in this start
    PHASE = "phase"  # of an iteration of some rank, some iterations after the last strike
    LINE = "line"  # printed since the last strike that did not wait for one
    STORING = "storing"  # a checkpoint is on storage in part


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault and its moment."""

    kind: Kind
    targets: tuple[int, ...] = ()
    when: When = When.PHASE
    what: str = ""  # the phase, or a pattern of the line
    iterations: int = 1  # to wait for before the moment, from the last strike on
    every: int = 1  # iterations that count are multiples of it
    delay_s: float = 0.0  # from the moment to the strike
    hold_s: float = 0.0  # how long it lasts, if it is taken back
    may_end: bool = False  # the job may end with it, to be started again


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and its faults; `changes` of the model's flags decide the state, other flags do not."""

    seed: int
    name: str
    layout: Mapping[str, int]
    flags: tuple[str, ...]
    strikes: tuple[Strike, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)
    ranks_per_node: int = 0  # under `keep --nodes`; 0 under torchrun, which starts `keep`
    num_spares: int = 0
    fewest: int = 0  # nodes, if the job is elastic
    has_networks: bool = False
    has_disk: bool = False
    is_real: bool = (
        False  # processes import what they need, as on a machine, and are no forks of ours
    )

    @property
    def num_nodes(self) -> int:
        """Nodes that train."""
        return NUM_RANKS // (self.ranks_per_node or NUM_RANKS)


class Draw:
    """Random choices of a case: strikes, and what the job is. docs/testing_chaos.md has the scenarios."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.choice, self.strikes = self.random.choice, list[Strike]()
        self.has_agents = False  # that are nodes of `keep`

    def ranks(self, count: int = 1) -> tuple[int, ...]:
        return tuple(sorted(self.random.sample(range(NUM_RANKS), count)))

    def strike(self, kind: Kind, *targets: int, least: int = 1, **others: Any) -> None:
        """Add a strike, in some phase at least some iterations later unless its moment is another."""
        when, is_late = others.pop("when", When.PHASE), self.random.random() < 0.3
        most_s = others.pop("within_s", 0.1 if is_late else 0.0)
        what = others.pop("what", self.choice(_PHASES) if when is When.PHASE else "")
        ends = others.pop("may_end", kind in OF_AGENTS or kind in OF_STORAGE)
        if self.has_agents:
            ends |= when is not When.PHASE or kind is Kind.TERMINATE_RANK
            ends |= kind in OF_NODES and 0 in targets
        others |= dict(delay_s=round(self.random.uniform(0, most_s), 3), when=when, what=what)
        others |= dict(iterations=self.random.randint(least, least + 3), may_end=ends)
        self.strikes.append(Strike(kind=kind, targets=targets, **others))

    def kill(self, count: int = 1, **others: Any) -> None:
        """Add the death of some ranks at one moment."""
        self.strike(Kind.KILL_RANKS, *self.ranks(count), **others)

    def under_torchrun(self, *flags: str, **job: Any) -> dict[str, Any]:
        """Return a job on one node with repairs, of some layout and strategy unless that is given."""
        strategy = (*REPAIR, *self.choice(STRATEGIES), *flags)
        return {"layout": self.choice(LAYOUTS), "flags": strategy, **job}


DENSE = ("--moe-ft-strategy", "dense")
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
ALONE = ("--moe-ft-upstream-log", "--moe-ft-breakpoints")  # stages recover alone
EVERY_3 = (*DENSE, "--moe-ft-interval", "3")
STRATEGIES = (DENSE, EVERY_3, SPARSE, (*DENSE, *ALONE), (*SPARSE, *ALONE))
REPAIR = ("--moe-ft-repair", "auto", "--moe-ft-repair-heartbeat-s", str(HEARTBEAT_S))
PP_EP = {"pp": 2, "ep": 2}
LAYOUTS: tuple[Mapping[str, int], ...] = (PP_EP, {"pp": 4}, {"pp": 2, "tp": 2})
RECOVERED = "training continues after iteration"
# With which any number of ranks has the same losses, but for the order of sums.
ELASTIC: dict[str, Any] = dict(
    calculate_per_token_loss=True, hidden_dropout=0.0, bf16=False, global_batch_size=12
)
ELASTIC |= dict(moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.0)


def evaluations(draw: Draw) -> dict[str, Any]:
    for count in (1, 1, 1, 2):
        draw.kill(count, what="between", every=EVALUATED_EVERY, least=0, within_s=0.4)
    changes = {"eval_interval": EVALUATED_EVERY, "eval_iters": 8}
    return draw.under_torchrun(layout=PP_EP, flags=(*REPAIR, *DENSE), changes=changes)


def volleys(draw: Draw) -> dict[str, Any]:
    for count in (1, 2, 3, 1, 4):
        draw.kill(count)
    return draw.under_torchrun()


def lost_nodes(draw: Draw) -> dict[str, Any]:
    draw.has_agents = True
    draw.strike(Kind.LOSE_NODES, 1, least=3)
    if draw.random.random() < 0.5:
        draw.strike(Kind.LOSE_NODES, 2, when=When.LINE, what="node n2 takes over", within_s=2.5)
    draw.kill()
    draw.strike(Kind.RETURN_NODE, 1)
    last = draw.choice((Kind.KILL_FORK_SERVER, Kind.KILL_AGENT, Kind.STOP_NODE, Kind.LOSE_NODES))
    draw.strike(last, draw.choice((0, 2)), least=6, hold_s=LOST_AFTER_S + 6)
    flags = (*REPAIR, *draw.choice(STRATEGIES))
    return {"layout": PP_EP, "flags": flags, "ranks_per_node": 2, "num_spares": 2}


def replays(draw: Draw) -> dict[str, Any]:
    for _ in range(2):
        draw.kill(least=4)
        draw.kill(when=When.LINE, what=RECOVERED, within_s=0.3)
    draw.kill(when=When.LINE, what="finished: no other rank", within_s=0.2)
    return draw.under_torchrun(flags=(*REPAIR, *SPARSE, *draw.choice(((), ALONE))))


def shared_work(draw: Draw) -> dict[str, Any]:
    draw.has_agents = True
    lost = draw.choice(((1,), (3,), (1, 3), (1, 3), (1, 3)))
    draw.strike(Kind.LOSE_NODES, *lost, least=3)
    draw.strike(Kind.KILL_RANKS, draw.choice((0, 2, *lost)))
    draw.strike(Kind.RETURN_NODE, lost[0])
    if draw.random.random() < 0.5:
        draw.strike(Kind.LOSE_NODES, lost[0], when=When.LINE, what="takes over", within_s=1.5)
    draw.strike(Kind.KILL_RANKS, draw.choice((0, 2)))
    flags = (*REPAIR, *DENSE, "--moe-ft-without-spare", "share")
    changes = {
        "hidden_dropout": 0.0,
        "bf16": False,
    }  # peers draw other numbers, and round elsewhere
    return {"layout": {"pp": 2}, "flags": flags, "ranks_per_node": 1, "changes": changes}


def crowded_nodes(draw: Draw) -> dict[str, Any]:
    draw.has_agents = True
    draw.strike(Kind.LOSE_NODES, 3, least=3)
    draw.strike(Kind.KILL_RANKS, draw.choice((0, 3)))
    draw.strike(Kind.LOSE_NODES, draw.choice((1, 2)), least=5)
    draw.strike(Kind.RETURN_NODE, 3)
    if draw.random.random() < 0.5:
        draw.strike(Kind.KILL_RANKS, 3, when=When.LINE, what="takes over", within_s=1.5)
    draw.strike(Kind.KILL_RANKS, draw.choice((0, 2)))
    flags = (*REPAIR, *DENSE, "--moe-ft-without-spare", "crowd")
    return {"layout": PP_EP, "flags": flags, "ranks_per_node": 1}


def exits(draw: Draw) -> dict[str, Any]:
    for _ in range(2):
        draw.kill(what="forward", every=EXITS_EVERY, within_s=0.2)
    draw.kill(every=NUM_ITERATIONS, within_s=0.5)
    flags = ("--exit-interval", str(EXITS_EVERY), "--moe-ft-persist-interval", "1000")
    return draw.under_torchrun(*flags, has_disk=True)


def storage(draw: Draw) -> dict[str, Any]:
    for fault in draw.random.sample(OF_STORAGE, 2):
        draw.kill(when=When.STORING, within_s=0.1)
        draw.strike(fault, hold_s=draw.choice((2, 8)))
    draw.kill(when=When.STORING, within_s=0.1)
    flags = ("--moe-ft-persist-interval", "1", "--moe-ft-keep", "2")
    return draw.under_torchrun(*flags, has_disk=True)


def elastic_nodes(draw: Draw) -> dict[str, Any]:
    draw.has_agents = True
    draw.strike(Kind.LOSE_NODES, 3, least=3)
    when = draw.choice((When.LINE, When.PHASE))
    what = {When.LINE: "all ranks begin again", When.PHASE: "backward"}[when]
    draw.strike(Kind.LOSE_NODES, 2, when=when, what=what, within_s=3)
    draw.strike(Kind.KILL_RANKS, 0)
    draw.strike(Kind.RETURN_NODE, 3)
    draw.strike(Kind.KILL_RANKS, 1, least=6, may_end=True)  # perhaps while all begin again
    draw.strike(Kind.RETURN_NODE, 2)
    flags = (*REPAIR, *DENSE, "--moe-ft-layout", "any", "--moe-ft-elastic")
    job = {"layout": {}, "flags": flags, "changes": ELASTIC}
    return {**job, "ranks_per_node": 1, "fewest": 2}


def processes(draw: Draw) -> dict[str, Any]:
    kinds = [Kind.KILL_FORK_SERVER, Kind.STOP_NODE, draw.choice(OF_AGENTS)]
    kinds += [Kind.TERMINATE_RANK, Kind.STOP_RANK, Kind.STOP_RANK]
    for kind in draw.random.sample(kinds, len(kinds)):
        target = 0 if kind in OF_NODES else draw.random.randrange(NUM_RANKS)
        draw.strike(kind, target, hold_s=draw.choice((2, HEARTBEAT_S + 4)))
    return draw.under_torchrun()


def files(draw: Draw) -> dict[str, Any]:
    for kind in 2 * (Kind.TRUNCATE, Kind.FLIP):
        draw.strike(kind, *draw.ranks(), least=3)
    flags = (*REPAIR, *DENSE, "--moe-ft-persist-interval", "3")
    return draw.under_torchrun(flags=flags, has_disk=True)


def cut_networks(draw: Draw) -> dict[str, Any]:
    draw.has_agents = True
    draw.strike(Kind.CUT_NODE, 1, hold_s=draw.choice((2, 8, 12)))
    draw.kill(least=3)
    draw.strike(Kind.CUT_NODE, draw.choice((1, 2)), least=4, hold_s=draw.choice((2, 8, 12)))
    draw.strike(draw.choice((Kind.LOSE_NODES, Kind.CUT_NODE)), 2, least=6, hold_s=8)
    job = {"layout": PP_EP, "flags": (*REPAIR, *DENSE), "ranks_per_node": 2}
    return {**job, "num_spares": 2, "has_networks": True}


def starts(draw: Draw) -> dict[str, Any]:
    draw.kill(when=When.START, within_s=3)
    draw.kill(when=When.START, within_s=3)
    draw.kill(least=3)
    draw.kill(when=When.LINE, what=RECOVERED, within_s=0.5)
    return draw.under_torchrun(flags=draw.choice(STRATEGIES))


SCENARIOS: tuple[Callable[[Draw], dict[str, Any]], ...] = (
    *(evaluations, volleys, lost_nodes, replays, shared_work, exits, storage, elastic_nodes),
    *(processes, files, cut_networks, starts, crowded_nodes),
)


def draw_case(seed: int, *, are_forks: bool = False) -> Case:
    """Return the case of a seed; one in four is real, unless all shall be forks."""
    draw, make = Draw(seed), SCENARIOS[seed % len(SCENARIOS)]
    is_real = draw.random.random() < 0.25
    drawn = make(draw)
    drawn |= {"strikes": tuple(draw.strikes), "is_real": is_real and not are_forks}
    return Case(seed=seed, name=make.__name__.replace("_", " "), **drawn)
