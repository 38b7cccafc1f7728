"""Meeting of the ranks of a round in the job's store: who is replaced, and where the survivors' loop stands.

moe_ft/cluster/rounds.py has the rounds. Nothing here knows Megatron, or communicates in another way.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum, IntEnum, auto
from typing import Any, NoReturn

from moe_ft.cluster.link import Link
from moe_ft.cluster.membership import Stages
from moe_ft.cluster.rounds import Member, Rounds, member_of
from moe_ft.errors import RepairError, ReplacedError
from moe_ft.saying import say

# For the slowest rank to leave its fence and iteration, and for the replacement to be built.
_MEETING_S = 180.0


class Role(Enum):
    """Role of this process in the repair of a rank."""

    SURVIVOR = auto()  # it trains, or was training when another rank died
    JOINING = auto()  # it takes the place of a rank that has died, and is alone: then JOINED
    JOINED = auto()  # it has met the others; a SURVIVOR once an iteration is finished


class Done(IntEnum):
    """Parts of an iteration that a rank had finished when it was broken off. A number in the store."""

    NOTHING = 0  # it was in `train_step`
    STEP = 1  # in its log line
    LOG = 2  # it waited for the others to log
    EVALUATING = 3  # all had logged


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Counters of the loop as its next, or broken, iteration begins.

    Attributes:
        counters: Megatron's, by name, and the parts of the job for which there are data. Only ranks that
            read data know those, and Megatron has told the others.
        num_groups: process groups that have been made; the same on all ranks, or they do not fit together.
        gathers_weights: whether modules gather their weights before they run (--overlap-param-gather). They
            do after the first optimizer step of the loop.
        evaluations_draw: whether evaluations draw random numbers.
        done: parts of that iteration that are finished, if it was broken off later.
    """

    iteration: int
    counters: Mapping[str, float]
    num_groups: int
    gathers_weights: bool
    evaluations_draw: bool
    done: int = Done.NOTHING

    def facts(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """A round in which all ranks have met.

    Attributes:
        members: by rank.
        positions: of those that know where their loop is.
        absent: ranks that have died and are not replaced: peers play their roles.
        lost_s: time since 1970 when the last of them was heard that was lost.
    """

    round: int
    members: Sequence[Member]
    positions: Sequence[Position]
    absent: frozenset[int] = frozenset()
    lost_s: float = 0.0

    @property
    def survivors_position(self) -> Position:
        """Position of the survivors' loop; where they differ, the latest iteration, and the least of it."""
        return max(self.positions, key=lambda each: (each.iteration, -each.done))

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks that are replaced in this round."""
        return tuple(each.rank for each in self.members if each.died_s is not None)

    @property
    def died_s(self) -> float:
        """Time since 1970 when the first of them died; without any, when the last of those absent did."""
        found = (each.died_s for each in self.members if each.died_s is not None)
        return min(found, default=self.lost_s)

    @property
    def taken_over(self) -> Mapping[str, str]:
        """Nodes whose ranks are replaced, each with the one that runs them now."""
        return {each.lost_node: each.node for each in self.members if each.lost_node}

    @property
    def hung_s(self) -> dict[int, float]:
        """Seconds for which ranks had hung that were killed for it, by rank."""
        return {each.rank: each.hung_s for each in self.members if each.hung_s}


def met(
    number: int,
    members: Sequence[Member],
    absent: frozenset[int] = frozenset(),
    lost_s: float = 0.0,
) -> Met:
    """Return a round in which these have met.

    Raises:
        RepairError: if there are no survivors, or only some were in an evaluation.
    """
    positions = [Position(**each.facts) for each in members if each.facts]
    if not positions:
        raise RepairError("all ranks have died: nothing is left to repair")
    done = {each.done for each in positions}
    if Done.EVALUATING in done and min(done) < Done.LOG:
        raise RepairError("some ranks were in an evaluation, and others were not")
    return Met(
        round=number,
        members=members,
        positions=positions,
        absent=absent,
        lost_s=lost_s,
    )


def end_replaced(link: Link, rank: int, number: int) -> NoReturn:
    """End this process for good: its node was called lost, and another one has its rank since a round.

    Nothing of it may act any more, not even what runs at the end of a process.
    """
    link.retire()
    say(f"rank {rank} ends: another node has its place since round {number} of repairs")
    os.kill(os.getpid(), signal.SIGKILL)
    raise ReplacedError(f"another node has rank {rank}")


class Membership:
    """One rank in the rounds of a start. Owned by the training thread, as its connection.

    Attributes:
        position: of the loop when its last iteration began; None before that. A replacement has that of the
            survivors at first.
    """

    def __init__(self, link: Link, rounds: Rounds, rank: int) -> None:
        """Begin in the round that the link has: a replacement joined it before it was built."""
        self.role = Role.SURVIVOR if link.died_s is None else Role.JOINING
        self.position: Position | None = None
        self._link, self._rounds, self.rank = link, rounds, rank
        self._met: Met | None = None  # the last round in which all have met

    @property
    def round(self) -> int:
        """Number of the round that this rank has joined last; 0 is the start."""
        return self._link.round

    def note(self, done: Done) -> None:
        """Say at the next meeting what of the iteration is finished on this rank."""
        assert self.position is not None
        self.position = replace(self.position, done=done)

    @property
    def has_met(self) -> bool:
        """True if the others were met in a round of this start."""
        return self._met is not None

    @property
    def all_had_logged(self) -> bool:
        """True if all had logged the iteration of this rank when the last round began: nobody does again."""
        assert self._met is not None and self.position is not None
        latest = self._met.survivors_position
        return latest.iteration > self.position.iteration or latest.done >= Done.LOG

    def wait_for_survivors(self) -> Position:
        """Return where the survivors are, in the round that this replacement has joined or in a later one.

        Raises:
            RepairError: if they do not come, or there are none.
        """
        while True:
            try:
                members = self._rounds.wait_for_all(self.round, _MEETING_S)
                break
            except RepairError:
                if not self._rounds.is_declared(self.round + 1):
                    raise
                self._join_next()  # the one before is broken
        self._met = self._met_with(members)
        self.position = self._met.survivors_position
        return self.position

    def meet(self) -> Met:
        """Meet the others in the round that was declared; a replacement has met them. Called by all ranks.

        Raises:
            RepairError: if some do not come, the round is broken, or the members do not fit together.
        """
        if self.role is Role.JOINING:
            self.role = Role.JOINED
        else:
            self._join_next()
            members = self._rounds.wait_for_all(self.round, _MEETING_S)
            self._met = self._met_with(members)
        assert self._met is not None
        return self._met

    def _met_with(self, members: Sequence[Member]) -> Met:
        rounds, number = self._rounds, self.round
        return met(number, members, rounds.absent(number), rounds.lost_s(number))

    def _join_next(self) -> None:
        link, facts = self._link, {} if self.position is None else self.position.facts()
        if self.role is Role.SURVIVOR:
            member = Member(rank=self.rank, facts=facts)
        else:
            member = member_of(self.rank, link, facts)
        if self._rounds.is_own_lost(link.round + 1):
            end_replaced(link, self.rank, link.round + 1)
        link.round += 1
        self._rounds.join(link.round, member)

    def wait_until_ready(self) -> None:
        """Wait until all members can make connections. Called by all ranks.

        Raises:
            RepairError: if some cannot in time, or the round is broken.
        """
        self._rounds.wait_until_ready(self.round, _MEETING_S)

    def become_replaceable(self, stages: Stages = ()) -> None:
        """Have this rank replaced if it dies from now on: there is something to recover.

        Args:
            stages: of the job, if peers may play roles.
        """
        if not self._link.is_armed and self.rank == 0 and self.role is Role.SURVIVOR:
            self._rounds.finish(0, stages)
        self._link.arm()

    def end(self) -> None:
        """Note that the job has ended as planned: what it leaves is not for another start."""
        with suppress(RuntimeError):  # the node of the store may have ended already
            self._rounds.note_end()

    def finish(self) -> None:
        """Note that the broken iteration is finished: from now on this rank is like any other."""
        self._rounds.finish(self.round)
        self.role = Role.SURVIVOR
