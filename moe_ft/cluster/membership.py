"""Words of the law (law.py): a job's policy, nodes and state; events that happen to it, and commands.

A *slot* is the ranks that one node has at the start: slot k has ranks k * R to k * R + R - 1.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from moe_ft.verdicts import Failure

MOST_UNFINISHED = 3  # rounds, or smaller starts, in a row before an iteration is finished
WithoutSpare = Literal["end", "wait", "crowd", "share", "shrink"]


class Shape(NamedTuple):
    """Sizes of a job; `fewest` nodes can train, in another layout, or 0 if none may be missing."""

    num_nodes: int
    ranks_per_node: int
    fewest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """Choices of the user.

    Attributes:
        repair: whether dead ranks are replaced in place.
        without_spare: answer to a lost node that no spare replaces; where it fails, the job shrinks or ends.
        store: number of the node that keeps the store; one behind those that train has no ranks.
        max_restarts: starts in the same layout, in a row without a finished iteration.
        domains: failure domains by name of the node.
    """

    shape: Shape
    repair: bool = True
    without_spare: WithoutSpare = "end"
    store: int = 0
    max_restarts: int = 0
    domains: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node that is there.

    Attributes:
        id: of its process: a node that registers again has another one.
        number: with which it was started; those that train come first.
        code: exit code of its ranks; None while some run, or if there are none.
        room_bytes, used_bytes: for the memory of ranks, and by those that it has, as far as it is known.
        unreached: ids of nodes that it has reached, and does not any more.
        missed: ids of nodes whose kernels do not answer it.
    """

    id: str
    name: str
    number: int
    code: int | None = None
    room_bytes: float = math.inf
    used_bytes: int = 0
    unreached: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()


class OpenSlot(NamedTuple):
    """A slot without a node.

    Attributes:
        round: in which its ranks were left out; 0 until it has begun.
        lost: name of the node that had it.
        host: id of the node that gets it; empty if any spare may.
    """

    round: int
    lost: str
    host: str = ""


# Events


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReports:
    """Facts that the ranks of this start have reported so far.

    Attributes:
        newest: the last round that has begun.
        finished: the last one in which an iteration was finished; 0 at the start.
        trained: whether an iteration was finished in this start.
        ended: whether a rank has ended as planned.
        waiting: ranks that take no part.
        knowing: ranks that know where training is; None for all.
        full: whether no node can run the ranks of a lost one, too.
        in_place: whether ranks take part in rounds; False: --moe-ft-repair try, and the job cannot.
    """

    newest: int = 0
    finished: int = 0
    trained: bool = False
    ended: bool = False
    waiting: frozenset[int] = frozenset()
    knowing: frozenset[int] | None = None
    full: bool = False
    in_place: bool = True


class Registered(NamedTuple):
    """Nodes have come."""

    nodes: tuple[Node, ...]


class Changed(NamedTuple):
    """Facts of nodes have changed."""

    nodes: tuple[Node, ...]


class Lost(NamedTuple):
    """Nodes are silent."""

    ids: tuple[str, ...]
    why: str


class Quiet(NamedTuple):
    """Nodes have not beaten for a while: are they lost, as those see it who watch them?

    Attributes:
        silent_s: seconds by id of the node: as many at least as its kernel must be silent.
        heard: ids of nodes that were heard just now.
    """

    silent_s: Mapping[str, float]
    heard: frozenset[str]


class Failed(NamedTuple):
    """Ranks of this start have reported failures. It comes before the exit codes of their nodes."""

    failures: tuple[Failure, ...]


class ToldToEnd(NamedTuple):
    """Nodes are told to end."""

    ids: tuple[str, ...]


class StoreTold(NamedTuple):
    """The process that keeps the store is told to end."""


class Declared(NamedTuple):
    """The round that the last command declared has begun, with this number."""

    number: int


class Passed(NamedTuple):
    """The time of a `Wake` has passed, or all nodes were heard."""

    what: str


Event = (
    RankReports
    | Registered
    | Changed
    | Lost
    | Quiet
    | Failed
    | ToldToEnd
    | StoreTold
    | Declared
    | Passed
)


# Commands


class Seat(NamedTuple):
    """Have a node run the ranks of a slot.

    Attributes:
        round: in which they replace those of a lost node; 0 at a start.
        lost: name of that node.
        host: slot that the node has already, whose devices these ranks share; None if it has no other.
    """

    node: str
    slot: int
    round: int = 0
    lost: str = ""
    host: int | None = None


class EndSlot(NamedTuple):
    """Have a node end the ranks of a slot, and no others."""

    node: str
    slot: int


class Strike(NamedTuple):
    """Call nodes lost, and hear them no more."""

    nodes: tuple[str, ...]
    why: str


class Declare(NamedTuple):
    """Begin a round in which the processes of slots take no part; `Declared` is the next event.

    Attributes:
        is_loss: whether the nodes that were struck last had them; else ranks move to another node.
    """

    slots: tuple[int, ...]
    is_loss: bool = True


class Begin(NamedTuple):
    """Begin another start, of so many slots; their seats follow."""

    start: int
    size: int
    why: str


class Save(NamedTuple):
    """Have all ranks save their state and end."""

    why: str


class Wait(NamedTuple):
    """Have the ranks of a round wait for a spare, or no longer."""

    round: int
    is_over: bool = False


class Wake(NamedTuple):
    """Report `Passed` in some seconds; a later one of the same name takes its place."""

    what: str
    after_s: float


class HearAll(NamedTuple):
    """Report `Passed` ("heard") when all nodes whose ranks run have been heard twice."""


class Say(NamedTuple):
    """Print a line."""

    line: str
    is_warning: bool = False


class Over(NamedTuple):
    """End the job."""

    code: int
    why: str


Command = Seat | EndSlot | Strike | Declare | Begin | Save | Wait | Wake | HearAll | Say | Over


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """State of a job.

    Attributes:
        before: names of the nodes of the last start of the launcher, by slot.
        nodes: by id, in the order in which they came.
        seats: ids of nodes by slot; the slot that a node got last is its last.
        names: of the nodes that have had slots, by slot; a host that is crowded does not count.
        opened: slots that wait for their node.
        left: slots that nobody needs any more, with 1 if their ranks could not save.
        size: slots of this start.
        vain: starts in a row that followed a failure, without a finished iteration between.
        quiet: seconds for which no node has come, at least.
        told: ids of nodes that are told to end.
        parted: names of nodes that did not reach another one.
        stays: ids of nodes of which it was said that they stay.
        failures: that ranks have reported in this start, since the last round that was finished.
        last_failure: that has ended the start before.
        faulty: names of nodes whose device has failed once, in any start.
        unfit: names of nodes that get no ranks any more.
    """

    policy: Policy
    before: tuple[str, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    seats: Mapping[int, str] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    opened: Mapping[int, OpenSlot] = field(default_factory=dict)
    left: Mapping[int, int] = field(default_factory=dict)
    reports: RankReports = RankReports()
    start: int = 0
    size: int
    vain: int = 0
    quiet: float = 0.0
    told: frozenset[str] = frozenset()
    parted: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()
    failures: tuple[Failure, ...] = ()
    last_failure: Failure | None = None
    faulty: frozenset[str] = frozenset()
    unfit: frozenset[str] = frozenset()
    lost_bytes: float = 0.0  # `used_bytes` before nodes were struck
    waits_in: int = -1  # the round whose ranks wait for a spare
    is_deciding: bool = False  # more nodes may be told to end
    is_declaring: bool = False  # `Declared` comes next
    is_asking: bool = False  # whether all nodes live
    are_heard: bool = False
    is_ending: bool = False
    over: int | None = None

    @property
    def is_finished(self) -> bool:
        """True if an iteration was finished in the newest round."""
        return self.reports.finished == self.reports.newest

    def ranks_of(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of slots, ascending."""
        size = self.policy.shape.ranks_per_node
        return tuple(slot * size + each for slot in sorted(slots) for each in range(size))

    def slots_of(self, ids: Collection[str]) -> frozenset[int]:
        """Return the slots that nodes have."""
        return frozenset(slot for slot, node in self.seats.items() if node in ids)

    @property
    def fit(self) -> dict[str, Node]:
        """Nodes that may have ranks, by id."""
        return {id: each for id, each in self.nodes.items() if each.name not in self.unfit}

    @property
    def used_bytes(self) -> float:
        """The bytes that the ranks of a slot use, at most; 0 before they use any."""
        loads = Counter(self.seats.values())
        return max((self.nodes[id].used_bytes / num for id, num in loads.items()), default=0.0)

    @property
    def needed_bytes(self) -> float:
        """The bytes for which a node must have room that gets a slot."""
        return max(self.used_bytes, self.lost_bytes)

    @property
    def spares(self) -> list[Node]:
        """Nodes without ranks that have room for those of a slot."""
        taken, needed = {*self.seats.values()}, self.needed_bytes
        return [
            each for id, each in self.fit.items() if id not in taken and each.room_bytes >= needed
        ]

    @property
    def num_free(self) -> int:
        """Number of spares beyond the slots that wait for one; below 0 if there are too few."""
        return len(self.spares) - sum(not each.host for each in self.opened.values())
