"""Member of the cluster: what a process of a rank knows of its job, and its part in the rounds of repairs.

Its assignment (assignment.py) does not change. Its link (link.py) is memory that it shares with the process
that has forked it. In the job's store it joins rounds (rounds.py), and learns there who is replaced and where
the survivors' loop stands. No torch, and nothing here communicates in another way.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import Enum, IntEnum, auto
from typing import Any, NoReturn

import msgspec

from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.failures import FailureNotes, left_out_by, report_failure
from moe_ft.cluster.link import RankLink
from moe_ft.cluster.rounds import Entry, RoundMark, Rounds
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.errors import RepairError, ReplacedError
from moe_ft.launches import Launch, launch_of
from moe_ft.saying import warn
from moe_ft.verdicts import Failure

# For the slowest rank to leave its fence and iteration, and for the replacement to be built.
_MEETING_S = 180.0


class Standing(Enum):
    """Standing of a process among those of the other ranks."""

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
class LoopPosition:
    """Counters of the loop as its next, or broken, iteration begins.

    Attributes:
        counters: Megatron's, by name, and the parts of the job for which there are data. Only ranks that
            read data know those, and Megatron has told the others.
        num_groups: process groups that have been made; the same on all ranks, or they do not fit together.
        gathers_weights: whether modules gather their weights before they run (--overlap-param-gather). They
            do after the first optimizer step of the loop.
        evaluations_draw: whether evaluations draw random numbers.
        done: parts of that iteration that are finished, if it was broken off later.
        sound: the latest iteration whose state lacks damage that a check has found; None for any.
    """

    iteration: int
    counters: Mapping[str, float]
    num_groups: int
    gathers_weights: bool
    evaluations_draw: bool
    done: int = Done.NOTHING
    sound: int | None = None

    def facts(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A round in which all ranks have met.

    Attributes:
        entries: of its ranks, in their order; of survivors at the same position, that of the first one.
        positions: of those that know where their loop is.
    """

    number: int
    entries: Sequence[Entry]
    positions: Sequence[LoopPosition]

    @property
    def survivors_position(self) -> LoopPosition:
        """Position of the survivors' loop; where they differ, the latest iteration, and the least of it."""
        return max(self.positions, key=lambda each: (each.iteration, -each.done))

    @property
    def dead_ranks(self) -> tuple[int, ...]:
        """Ranks that are replaced in this round."""
        return tuple(each.rank for each in self.entries if each.died_s is not None)

    @property
    def died_s(self) -> float:
        """Time since 1970 when the first of them died."""
        return min(each.died_s for each in self.entries if each.died_s is not None)

    @property
    def taken_over(self) -> Mapping[str, str]:
        """Nodes whose ranks are replaced, each with the one that runs them now."""
        return {each.lost_node: each.node for each in self.entries if each.lost_node}

    @property
    def left_out(self) -> dict[int, Failure]:
        """Iterations that are left out from this round on, with failures that their batches have led to."""
        return left_out_by(failure for each in self.entries for failure in each.left_out)

    @property
    def hung_s(self) -> dict[int, float]:
        """Seconds for which ranks had hung that were killed for it, by rank."""
        return {each.rank: each.hung_s for each in self.entries if each.hung_s}


def round_of(number: int, entries: Sequence[Entry]) -> Round:
    """Return a round in which ranks have met with these entries.

    Raises:
        RepairError: if there are no survivors, or only some were in an evaluation.
    """
    positions = [LoopPosition(**each.facts) for each in entries if each.facts]
    if not positions:
        raise RepairError("all ranks have died: nothing is left to repair")
    done = {each.done for each in positions}
    if Done.EVALUATING in done and min(done) < Done.LOG:
        raise RepairError("some ranks were in an evaluation, and others were not")
    return Round(number=number, entries=entries, positions=positions)


class Member:
    """One process of a rank, in one start. Owned by the training thread.

    Other threads use the link, and read `round`.

    Attributes:
        link: memory that it shares with the process that has forked it.
        round: number of the round that it has joined last; 0 is the start.
        standing: among the other ranks.
        position: of the loop when its last iteration began; None before that. A replacement has that of the
            survivors at first.
        rounds: as it sees them in the job's store; the caller of `connect` may use them.
        notes: of failures, in the same store.
        left_out: iterations that are left out in this start; the same on all ranks that have met.
    """

    rounds: Rounds
    notes: FailureNotes

    def __init__(self, assignment: Assignment) -> None:
        """Be in the start, without a connection."""
        self.assignment = assignment
        self.link = RankLink()
        self.round = 0
        is_alone = assignment.is_replacement
        self.standing = Standing.JOINING if is_alone else Standing.SURVIVOR
        self.position: LoopPosition | None = None
        self._met: Round | None = None  # the last round in which all have met
        self.left_out: dict[int, Failure] = {}

    @property
    def rank(self) -> int:
        """Number in the job."""
        return self.assignment.rank

    @property
    def token(self) -> str:
        """Secret of the start, which signs what ranks write in the job's store."""
        return self.assignment.token

    @property
    def is_replacement(self) -> bool:
        """True if this process takes the place of another one of its rank."""
        return self.assignment.is_replacement

    @property
    def launch(self) -> Launch:
        """The start that this process belongs to."""
        start, begun_from = self.assignment.start, self.assignment.begun_from
        return msgspec.structs.replace(launch_of(os.environ), start=start, begun_from=begun_from)

    def replacement(self, died_s: float) -> "Member":
        """Return the process that takes the place of this one on its node, which has died."""
        hung_s = self.link.hung_s
        return Member(replace(self.assignment, died_s=died_s, hung_s=hung_s, lost_node=""))

    def sign(self, store: Any) -> SignedStore:
        """Return a connection to the job's store whose values the ranks of this start sign."""
        return SignedStore(store, lambda: self.token)

    def connect(self, store: Any, world_size: int | None = None) -> Rounds:
        """Use a connection to the job's store, and return the rounds there.

        Args:
            world_size: number of ranks that train, where that is not the one of the assignment.
        """
        size = self.assignment.world_size if world_size is None else world_size
        signed = self.sign(store)
        self.rounds = Rounds(signed, self.rank, size)
        self.notes = FailureNotes(signed)
        return self.rounds

    def take_place(self) -> None:
        """Join the round in which this process takes the place of another one: all others wait for it.

        Raises:
            ReplacedError: if another node has the rank now.
            RepairError: if too many rounds have been broken.
        """
        since = self.assignment.round
        if self.assignment.lost_node:  # the round has begun with that
            self.rounds.join(since, self._entry())
            self.round = since
        else:
            self.round = self.rounds.join_for_dead(self._entry(), since)

    def _entry(self) -> Entry:
        facts = {} if self.position is None else self.position.facts()
        if self.standing is Standing.SURVIVOR:
            return Entry(rank=self.rank, facts=facts)
        own = self.assignment
        return Entry(
            rank=self.rank,
            died_s=own.died_s,
            hung_s=own.hung_s,
            facts=facts,
            node=own.node if own.lost_node else "",
            lost_node=own.lost_node,
            left_out=self.notes.left_out(),
        )

    def report_failure(self, failure: Failure) -> None:
        """Report a failure of this rank, or of another one, to the law; call it before the process ends."""
        report_failure(self.assignment, failure)

    def note(self, done: Done) -> None:
        """Tell at the next meeting what of the iteration is finished on this rank."""
        assert self.position is not None
        self.position = replace(self.position, done=done)

    def note_sound(self, iteration: int | None) -> None:
        """Tell at the next meeting which state is the latest that may be recovered; None for any."""
        assert self.position is not None
        self.position = replace(self.position, sound=iteration)

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

    def wait_for_survivors(self) -> LoopPosition:
        """Return where the survivors are, in the round that this replacement has joined or in a later one.

        Raises:
            RepairError: if they do not join, or there are none.
        """
        while True:
            try:
                self._met = self._wait_for_all()
                break
            except RepairError:
                if not self.rounds.is_declared(self.round + 1):
                    raise
                self._join_next()  # the one before is broken
        self.position = self._met.survivors_position
        return self.position

    def meet(self) -> Round:
        """Meet the others in the round that was declared; a replacement has met them. Called by all ranks.

        Raises:
            RepairError: if some do not join, the round is broken, or the entries do not fit together.
        """
        if self.standing is Standing.JOINING:
            self.standing = Standing.JOINED
        else:
            self._join_next()
            self._met = self._wait_for_all()
        assert self._met is not None
        self.left_out |= self._met.left_out
        return self._met

    def _wait_for_all(self) -> Round:
        return round_of(self.round, self.rounds.wait_for_all(self.round, _MEETING_S))

    def _join_next(self) -> None:
        entry, number = self._entry(), self.round + 1
        if self.rounds.is_own_lost(number):
            self.end_replaced(number)
        self.round = number
        self.rounds.join(number, entry)

    def end_replaced(self, number: int) -> NoReturn:
        """End this process for good: its node was called lost, and another one has its rank since a round.

        Nothing of it may act any more, not even what runs at the end of a process. Any thread.
        """
        self.link.retire()
        warn(f"rank {self.rank} ends: another node has its place since round {number} of repairs")
        os.kill(os.getpid(), signal.SIGKILL)
        raise ReplacedError(f"another node has rank {self.rank}")

    def wait_until_ready(self) -> None:
        """Wait until all ranks of the round can make connections. Called by all ranks.

        Raises:
            RepairError: if some cannot in time, or the round is broken.
        """
        self.rounds.wait_until_ready(self.round, _MEETING_S)

    def become_replaceable(self) -> None:
        """Have this rank replaced if it dies from now on: there is something to recover."""
        if not self.link.is_armed and self.rank == 0 and self.standing is Standing.SURVIVOR:
            self.rounds.note(RoundMark.FINISHED)
        self.link.arm()

    def end(self) -> None:
        """Note that the job has ended as planned: what it leaves is not for another start."""
        with suppress(RuntimeError):  # the node of the store may have ended already
            self.rounds.note(RoundMark.ENDED)

    def finish(self) -> None:
        """Note that the broken iteration is finished: from now on this rank is like any other."""
        self.rounds.note(RoundMark.FINISHED, self.round)
        self.standing = Standing.SURVIVOR


_own: Member | None = None
_assigned: Assignment | None = None


def own_member() -> Member | None:
    """Return the member that this process is; None if nothing would replace it."""
    return _own


def own_assignment() -> Assignment | None:
    """Return the assignment of this process, whether or not it would be replaced; None without an agent."""
    return _assigned


def become_member(member: Member | None, assignment: Assignment | None = None) -> None:
    """Be a member of the cluster in this process, or a rank that is not replaced, with an assignment."""
    global _own, _assigned
    _own, _assigned = member, assignment


def retire_own() -> None:
    """Have the end of this process be taken as it is, if it is a member."""
    if _own is not None:
        _own.link.retire()


def own_launch() -> Launch:
    """Return the start of the ranks that this process belongs to."""
    return launch_of(os.environ) if _own is None else _own.launch
