"""Scopes of a recovery: the stages that run iterations again together, and what answers at their borders.

A global recovery is the scope of everybody, which has no borders. planning/local_recovery.py finds
smaller ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_ft.format.boundary import Direction
from moe_ft.format.records import JobNumbers

# Node, path and iteration of a log, a record or a state, and the rank that reads it: the receiver of a log,
# the owner of a state. Any rank reads a record.
Place = tuple[str | None, str, int, int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SentLog:
    """Tensors that one rank has sent to a neighbour in one direction, while one iteration ran; all of them.

    Attributes:
        iteration: the one that ran: from the state of this number to the next.
        node: the node whose memory holds it; None for storage.
        path: its index, relative to the node's memory directory or the persist directory.
    """

    sender: int
    receiver: int
    direction: Direction
    iteration: int
    node: str | None
    path: str

    @property
    def place(self) -> Place:
        """Place of what it holds for its receiver."""
        return self.node, self.path, self.iteration, self.receiver


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRecord:
    """Record of one iteration by one rank.

    The record of state n + 1 answers what iteration n asks the whole job: gradient norms, number of tokens,
    found-inf. What belongs to the rank itself, such as random numbers and buffers, follows from its restored
    state, which has its own record.

    Attributes:
        node: the node whose memory holds it; None for storage.
        numbers: what it answers, if that is known without reading it.
    """

    rank: int
    iteration: int
    node: str | None
    path: str
    numbers: JobNumbers | None = None

    @property
    def place(self) -> Place:
        """Place that it is read from."""
        return self.node, self.path, self.iteration, None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """Stages that recover together. Two scopes need nothing of each other and run at the same time.

    Attributes:
        stages: ascending, those that run iterations again alone, with live links between neighbours. None at
            all if all stages recover together.
        logs: logs that are read at its borders, ordered by iteration and receiver.
        records: by stage, records that answer for the iterations after its window, one for each, ascending.
    """

    stages: tuple[int, ...] = ()
    logs: tuple[SentLog, ...] = ()
    records: Mapping[int, tuple[KeptRecord, ...]] = field(default_factory=dict)


EVERYBODY = Scope()
