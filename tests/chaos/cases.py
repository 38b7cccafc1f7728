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


class Launcher(StrEnum):
    """Programs that start the ranks."""

    TORCHRUN = "torchrun"  # with `keep` as the program that it starts
    NODES = "keep --nodes"


class Kind(StrEnum):
    """Faults, and the return of a node. Targets are ranks or numbers of nodes."""

    KILL_RANKS = "kill ranks"  # at one moment
    TERMINATE_RANK = "terminate rank"
    STOP_RANK = "stop rank"
    KILL_ZYGOTE = "kill zygote"
    KILL_AGENT = "kill agent"  # torchrun, or the process of `keep`
    TERMINATE_AGENT = "terminate agent"
    LOSE_NODES = "lose nodes"  # at one moment, with their memory
    STOP_NODE = "stop node"
    CUT_NODE = "cut node"
    RETURN_NODE = "return node"
    FILL = "fill storage"
    FREEZE = "freeze storage"
    READ_ONLY = "read-only storage"
    TRUNCATE = "truncate"  # a file of the memory of a rank
    FLIP = "flip"  # a byte of one, and kill its rank


OF_AGENTS = (Kind.KILL_AGENT, Kind.TERMINATE_AGENT)
OF_NODES = (Kind.LOSE_NODES, Kind.STOP_NODE, Kind.CUT_NODE, Kind.KILL_ZYGOTE, *OF_AGENTS)


class When(StrEnum):
    """Kinds of moments."""

    START = "start"  # ranks run, and no iteration has ended in this start
    PHASE = "phase"  # of an iteration of some rank, some iterations after the last strike
    EVALUATION = "evaluation"
    EXIT = "exit"  # in the last iteration before --exit-interval
    LINE = "line"  # printed since the last strike that did not wait for one
    STORING = "storing"  # a checkpoint is on storage in part
    END = "end"  # in the last iterations


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Time of a strike.

    Attributes:
        what: the phase, or a pattern of the line.
        iterations: to wait for before, from the last strike on.
        delay_s: after the moment.
    """

    when: When
    what: str = ""
    iterations: int = 0
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """One fault.

    Attributes:
        hold_s: how long it lasts, of those that are taken back.
        may_end: whether the job may end with it, to be started again.
    """

    kind: Kind
    at: Moment
    targets: tuple[int, ...] = ()
    hold_s: float = 0.0
    may_end: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and its faults.

    Attributes:
        changes: of the model's flags, as `model_flags` has them; they decide the state.
        flags: that do not.
        ranks_per_node, num_spares, fewest: of `keep --nodes`; fewest is 0 unless the job is elastic.
        is_real: whether processes import what they need, as on a machine, and are no forks of ours.
    """

    seed: int
    name: str
    launcher: Launcher = Launcher.TORCHRUN
    layout: Mapping[str, int]
    changes: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...]
    ranks_per_node: int = NUM_RANKS
    num_spares: int = 0
    fewest: int = 0
    has_networks: bool = False
    has_disk: bool = False
    exits: bool = False
    strikes: tuple[Strike, ...]
    is_real: bool = False

    @property
    def num_nodes(self) -> int:
        """Nodes that train."""
        return NUM_RANKS // self.ranks_per_node


class _Draw:
    """Random choices of a case."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.strikes: list[Strike] = []
        self.launcher = Launcher.TORCHRUN

    def phase(self, least: int = 1) -> Moment:
        """Return a moment in a phase of an iteration some iterations later, now and then a bit after it."""
        return Moment(
            when=When.PHASE,
            what=self.random.choice(_PHASES),
            iterations=self.random.randint(least, least + 3),
            delay_s=self.delay_s(0.1) if self.random.random() < 0.3 else 0.0,
        )

    def delay_s(self, most_s: float) -> float:
        return round(self.random.uniform(0, most_s), 3)

    def line(self, pattern: str, most_s: float) -> Moment:
        return Moment(when=When.LINE, what=pattern, delay_s=self.delay_s(most_s))

    def at(self, when: When, most_s: float = 0.3) -> Moment:
        return Moment(when=when, delay_s=self.delay_s(most_s))

    def ranks(self, count: int = 1) -> tuple[int, ...]:
        return tuple(sorted(self.random.sample(range(NUM_RANKS), count)))

    def add(
        self,
        kind: Kind,
        targets: tuple[int, ...] = (),
        at: Moment | None = None,
        hold_s: float = 0,
        may_end: bool = False,
    ) -> None:
        """Add a strike, in some phase of some iteration unless another moment is given."""
        at = at or self.phase()
        may_end |= kind in OF_AGENTS or (
            self.launcher is Launcher.NODES
            and (at.when is not When.PHASE or kind is Kind.TERMINATE_RANK)
        )
        may_end |= self.launcher is Launcher.NODES and kind in OF_NODES and 0 in targets
        self.strikes.append(
            Strike(kind=kind, at=at, targets=targets, hold_s=hold_s, may_end=may_end)
        )

    def add_any(self) -> None:
        """Add a strike at a rank."""
        act = self.random.choice(
            [
                *2 * [lambda: self.add(Kind.KILL_RANKS, self.ranks())],
                lambda: self.add(Kind.KILL_RANKS, self.ranks(self.random.randint(2, 3))),
                lambda: self.add(Kind.STOP_RANK, self.ranks(), hold_s=2),
                lambda: self.add(Kind.STOP_RANK, self.ranks(), hold_s=HEARTBEAT_S + 4),
                lambda: self.add(Kind.KILL_RANKS, self.ranks(), self.line("begins|continues", 3)),
            ]
        )
        act()


Drawn = dict[str, Any]
SCENARIOS: list[Callable[[_Draw], Drawn]] = []
DENSE = ("--moe-ft-strategy", "dense")
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
STRATEGIES = (
    DENSE,
    (*DENSE, "--moe-ft-interval", "3"),
    SPARSE,
    (*DENSE, "--moe-ft-upstream-log", "--moe-ft-breakpoints"),
    (*SPARSE, "--moe-ft-upstream-log", "--moe-ft-breakpoints"),
)
_REPAIR = ("--moe-ft-repair", "auto", "--moe-ft-repair-heartbeat-s", str(HEARTBEAT_S))
LAYOUTS: tuple[Mapping[str, int], ...] = ({"pp": 2, "ep": 2}, {"pp": 4}, {"pp": 2, "tp": 2})
_REPAIRED = "replaced in|are played|finished: no other"
_RECOVERED = "training continues after iteration"


def _scenario(make: Callable[[_Draw], Drawn]) -> Callable[[_Draw], Drawn]:
    SCENARIOS.append(make)
    return make


def _torchrun(draw: _Draw, *flags: str, **changes: Any) -> Drawn:
    strategy = draw.random.choice(STRATEGIES)
    layout = draw.random.choice(LAYOUTS)
    return {"layout": layout, "flags": (*_REPAIR, *strategy, *flags), "changes": changes}


@_scenario
def evaluations(draw: _Draw) -> Drawn:
    """Ranks die in evaluations."""
    for count in (1, 1, 1, 2):
        draw.add(Kind.KILL_RANKS, draw.ranks(count), draw.at(When.EVALUATION, 0.4))
    found = _torchrun(draw, eval_interval=EVALUATED_EVERY, eval_iters=8)
    return {**found, "layout": {"pp": 2, "ep": 2}, "flags": (*_REPAIR, *DENSE)}


@_scenario
def volleys(draw: _Draw) -> Drawn:
    """Several ranks die at one moment, at last all."""
    for count in (2, 3, 2, 4):
        draw.add(Kind.KILL_RANKS, draw.ranks(count))
    return _torchrun(draw)


@_scenario
def lost_nodes(draw: _Draw) -> Drawn:
    """Nodes are lost, their spares too, and what was silent comes back."""
    draw.launcher = Launcher.NODES
    draw.add(Kind.LOSE_NODES, (1,), draw.phase(3))
    if draw.random.random() < 0.5:
        draw.add(Kind.LOSE_NODES, (2,), draw.line("node n2 takes over", 2.5))
    draw.add(Kind.KILL_RANKS, draw.ranks())
    draw.add(Kind.RETURN_NODE, (1,))
    last = draw.random.choice((Kind.KILL_ZYGOTE, Kind.KILL_AGENT, Kind.STOP_NODE, Kind.LOSE_NODES))
    draw.add(last, (draw.random.choice((0, 2)),), draw.phase(6), hold_s=LOST_AFTER_S + 6)
    return {
        "layout": {"pp": 2, "ep": 2},
        "flags": (*_REPAIR, *draw.random.choice(STRATEGIES)),
        "ranks_per_node": 2,
        "num_spares": 2,
    }


@_scenario
def replays(draw: _Draw) -> Drawn:
    """Ranks die while a repair replays a window, and while it is finished."""
    for _ in range(2):
        draw.add(Kind.KILL_RANKS, draw.ranks(), draw.phase(4))
        draw.add(Kind.KILL_RANKS, draw.ranks(), draw.line(_RECOVERED, 0.3))
    draw.add(Kind.KILL_RANKS, draw.ranks(), draw.line(_REPAIRED, 0.2))
    return {**_torchrun(draw), "flags": (*_REPAIR, *draw.random.choice((SPARSE, STRATEGIES[4])))}


@_scenario
def played_roles(draw: _Draw) -> Drawn:
    """A node of each stage is lost at one moment, peers play; one comes back, and dies as it does."""
    draw.launcher = Launcher.NODES
    lost = (draw.random.choice((1, 3)),) if draw.random.random() < 0.4 else (1, 3)
    draw.add(Kind.LOSE_NODES, lost, draw.phase(3))
    draw.add(Kind.KILL_RANKS, (draw.random.choice((0, 2)),))
    draw.add(Kind.RETURN_NODE, lost[:1])
    if draw.random.random() < 0.5:
        draw.add(Kind.LOSE_NODES, lost[:1], draw.line("takes over the ranks", 1.5))
    draw.add(Kind.KILL_RANKS, (draw.random.choice((0, 2)),))
    flags = (*_REPAIR, *DENSE, "--moe-ft-without-spare", "reroute")
    return {"layout": {"pp": 2}, "flags": flags, "ranks_per_node": 1, "changes": {"clip_grad": 0.0}}


@_scenario
def exits(draw: _Draw) -> Drawn:
    """Ranks die in the last iteration before --exit-interval; the job is started again after each exit."""
    for _ in range(3):
        draw.add(Kind.KILL_RANKS, draw.ranks(), draw.at(When.EXIT, 0.2))
    draw.add(Kind.KILL_RANKS, draw.ranks(), draw.at(When.END, 0.5))
    flags = ("--exit-interval", str(EXITS_EVERY), "--moe-ft-persist-interval", "1000")
    return {**_torchrun(draw, *flags), "exits": True, "has_disk": True}


@_scenario
def storage(draw: _Draw) -> Drawn:
    """Ranks die while checkpoints go to storage, which is full, stands still, or is read-only."""
    faults = [Kind.FILL, Kind.FREEZE, Kind.READ_ONLY]
    draw.random.shuffle(faults)
    for fault in faults[:2]:
        draw.add(Kind.KILL_RANKS, draw.ranks(), draw.at(When.STORING, 0.1))
        draw.add(fault, (), hold_s=draw.random.choice((2, 8)), may_end=True)
    draw.add(Kind.KILL_RANKS, draw.ranks(), draw.at(When.STORING, 0.1))
    flags = ("--moe-ft-persist-interval", "1", "--moe-ft-keep", "2")
    return {**_torchrun(draw, *flags), "has_disk": True}


@_scenario
def elastic_nodes(draw: _Draw) -> Drawn:
    """Nodes are lost for good, one more during the change; they come back."""
    draw.launcher = Launcher.NODES
    again = "all ranks begin again"
    draw.add(Kind.LOSE_NODES, (3,), draw.phase(3))
    during = draw.random.random() < 0.5
    draw.add(Kind.LOSE_NODES, (2,), draw.line(again, 3) if during else draw.phase(2))
    draw.add(Kind.KILL_RANKS, (0,))
    draw.add(Kind.RETURN_NODE, (3,))
    draw.add(Kind.KILL_RANKS, (1,), draw.phase(6))
    draw.add(Kind.RETURN_NODE, (2,))
    flags = (*_REPAIR, *DENSE, "--moe-ft-layout", "any", "--moe-ft-elastic")
    changes = {
        "calculate_per_token_loss": True,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "hidden_dropout": 0.0,
        "bf16": False,
        "global_batch_size": 12,
    }
    return {"layout": {}, "flags": flags, "changes": changes, "ranks_per_node": 1, "fewest": 2}


@_scenario
def processes(draw: _Draw) -> Drawn:
    """Fork servers, agents and ranks are killed, stopped and told to end under torchrun."""
    acts = [
        (Kind.KILL_ZYGOTE, (0,), 0.0),
        (Kind.STOP_RANK, draw.ranks(), HEARTBEAT_S + 4.0),
        (Kind.TERMINATE_RANK, draw.ranks(), 0.0),
        (Kind.STOP_NODE, (0,), 5.0),
        (draw.random.choice(OF_AGENTS), (0,), 0.0),
    ]
    draw.random.shuffle(acts)
    for kind, targets, hold_s in acts:
        draw.add(kind, targets, hold_s=hold_s)
    return _torchrun(draw)


@_scenario
def files(draw: _Draw) -> Drawn:
    """Files in memory are cut, and bytes of them flip."""
    for _ in range(3):
        draw.add(Kind.TRUNCATE, draw.ranks(), draw.phase(3))
        draw.add(Kind.FLIP, draw.ranks(), draw.phase(3))
    found = _torchrun(draw)
    return {
        **found,
        "flags": (*_REPAIR, *DENSE, "--moe-ft-persist-interval", "3"),
        "has_disk": True,
    }


@_scenario
def cut_networks(draw: _Draw) -> Drawn:
    """Nodes are cut off, and come back."""
    draw.launcher = Launcher.NODES
    first = draw.random.choice((1, 2))
    draw.add(Kind.CUT_NODE, (1,), draw.phase(2), hold_s=draw.random.choice((2, 8, 12)))
    draw.add(Kind.KILL_RANKS, draw.ranks(), draw.phase(3))
    draw.add(Kind.CUT_NODE, (3 - first,), draw.phase(4), hold_s=draw.random.choice((2, 8, 12)))
    draw.add(draw.random.choice((Kind.LOSE_NODES, Kind.CUT_NODE)), (2,), draw.phase(6), hold_s=8)
    return {
        "layout": {"pp": 2, "ep": 2},
        "flags": (*_REPAIR, *DENSE),
        "ranks_per_node": 2,
        "num_spares": 1,
        "has_networks": True,
    }


@_scenario
def starts(draw: _Draw) -> Drawn:
    """Ranks die before the first iteration, and in starts again, without repairs."""
    for _ in range(2):
        draw.add(Kind.KILL_RANKS, draw.ranks(), draw.at(When.START, 3))
    draw.add(Kind.KILL_RANKS, draw.ranks(), draw.phase(3))
    draw.add(Kind.KILL_RANKS, draw.ranks(), draw.line(_RECOVERED, 0.5))
    found = _torchrun(draw)
    return {**found, "flags": draw.random.choice(STRATEGIES)}


@_scenario
def anything(draw: _Draw) -> Drawn:
    """Ranks of any layout and strategy die or stand still, in any phase."""
    for _ in range(6):
        draw.add_any()
    return _torchrun(draw)


def draw_case(seed: int, *, is_real: bool | None = None) -> Case:
    """Return the case of a seed; one in four is real, unless that is said."""
    draw, make = _Draw(seed), SCENARIOS[seed % len(SCENARIOS)]
    drawn_real = draw.random.random() < 0.25
    drawn = make(draw)
    return Case(
        seed=seed,
        name=make.__name__.replace("_", " "),
        launcher=draw.launcher,
        strikes=tuple(draw.strikes),
        is_real=drawn_real if is_real is None else is_real,
        **drawn,
    )
