"""Rounds of repairs: ranks say in the job's store that one has died, and learn who takes part.

Round 0 is the start. Every rank takes part in every round, in their order: a replacement joins the first one
without its rank, which declares that round if nobody has. Every other rank joins when it has left its
iteration, and a round is complete when all have joined. It is over when an iteration has been finished. If a
rank dies before, its replacement declares the next round, and all others leave the one that is broken.

The loss of a node is a verdict (law.py), and may be false. So it declares a round that nobody else has,
with the ranks that it replaces. Earlier processes of these ranks may take part in rounds before it, and in
none from there on: all that is said and connected belongs to one round.

Each rank signs what it says. The first rank of a round reads what all have said, and tells the others: 10,000
ranks that read it each would need minutes of the one process that keeps the store. They ask once, and are
answered then.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from moe_ft.cluster.membership import MOST_UNFINISHED
from moe_ft.cluster.signed_store import SignedStore, poll_s
from moe_ft.errors import RepairError, ReplacedError
from moe_ft.files.progress import awaiting_others, note_progress

_MIN_POLL_S = 0.01
_MIN_LOOK_S = 0.5  # for which the store lets a rank wait for news


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Entry of one rank in a round.

    Attributes:
        died_s: time since 1970 when the rank died that this one replaces; None for a survivor. A replacement
            is one until a round is over.
        hung_s: seconds for which that rank had hung when it was killed for it; 0 if it was not.
        facts: for replacements, from ranks that know where the loop is.
        node: on which a rank of a lost node runs now; empty for others.
        lost_node: on which it ran before.
        left_out: of replacements, failures whose iterations are left out (failures.py).
    """

    rank: int
    died_s: float | None = None
    hung_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    node: str = ""
    lost_node: str = ""
    left_out: list[dict[str, Any]] = field(default_factory=list)


class RoundMark(StrEnum):
    """Facts that are noted of a round once and for all: round 0 is the start."""

    FINISHED = "finished"  # an iteration was finished in it
    ALL_MEMBERS = "all_members"  # all of its ranks know its members
    SUSPECTED = "suspected"  # a connection of the round before has ended: a node may be lost
    TIMED_OUT = (
        "timed_out"  # a rank has timed out waiting for another, in groups of the round before
    )
    WAITS = "waits"  # no node is there to replace the one that it has lost
    WAITS_NO_MORE = "waits_no_more"  # one is there now
    FULL = "full"  # no node of the job can run the ranks of a lost one, too
    NOT_IN_PLACE = "not_in_place"  # no rank of the job is repaired in place
    ENDED = "ended"  # a rank ends as planned, as all others do then: no rank is replaced or begins again


class Rounds:
    """One connection's view of the rounds. Used by one thread."""

    def __init__(self, store: SignedStore, rank: int, world_size: int) -> None:
        self._store = store
        self.rank = rank
        self._world_size = world_size
        # Of rounds that have begun: they do not change.
        self._verdicts: dict[int, dict[str, Any]] = {}
        self.poll_s = poll_s(world_size, _MIN_POLL_S)
        self._look_s = max(self.poll_s, _MIN_LOOK_S)

    def note(self, mark: RoundMark, number: int = 0) -> None:
        """Note a fact of a round; all ranks of it may do so."""
        self._store.set(_key(number, mark), True)

    def has(self, mark: RoundMark, number: int = 0) -> bool:
        """Return whether a fact of a round was noted."""
        return self._store.get(_key(number, mark)) is not None

    def is_finished(self, number: int) -> bool:
        """Return whether an iteration was finished in a round, of which the start counts as one."""
        return number == 0 or self.has(RoundMark.FINISHED, number)

    def is_declared(self, number: int) -> bool:
        """Return whether a round has begun."""
        return self._verdict(number) is not None

    def _verdict(self, number: int) -> dict[str, Any] | None:
        """Return the verdict with which a round has begun; None if it has not."""
        if number not in self._verdicts:
            self._learn(number, self._store.get(_key(number, "declared")))
        return self._verdicts.get(number)

    def _learn(self, number: int, verdict: dict[str, Any] | None) -> None:
        if verdict is not None:
            self._verdicts[number] = verdict

    def wait_until_declared(self, number: int, *others: str) -> bool:
        """Return whether a round has begun, or another key of it is there; wait for that, not for long."""
        keys = [_key(number, each) for each in ("declared", *others)]
        verdict, *found = _look(self._store, keys, self._look_s)
        self._learn(number, verdict)
        return verdict is not None or any(found)

    def wait_until_broken(self, number: int) -> bool:
        """Return whether a round has begun, or a rank has timed out before; wait for that, not for long."""
        return self.wait_until_declared(number, RoundMark.TIMED_OUT)

    def newest(self, since: int = 0) -> int:
        """Return the number of the last round that has begun, at or after one that has."""
        while self.is_declared(since + 1):
            since += 1
        return since

    def dead_ranks(self, number: int) -> tuple[int, ...]:
        """Return the ranks whose processes are not part of a round or of a later one: their node is lost."""
        return tuple((self._verdict(number) or {}).get("ranks", ()))

    def is_own_lost(self, number: int) -> bool:
        """Return whether the rank's process so far is not part of a round: its node is lost."""
        return self.rank in self.dead_ranks(number)

    def declare_lost(self, ranks: Sequence[int], since: int = 0) -> int:
        """Begin a round of its own from which on processes of lost nodes are left out; return its number."""
        verdict = {"ranks": list(ranks)}
        number = self.newest(since) + 1
        while not self._declare(number, verdict):
            number += 1
        return number

    def survivors(self, number: int) -> set[int]:
        """Return the ranks that know where training is, up to a round; those who met in a round know it."""
        left = set(range(self._world_size))
        while not self.is_finished(number) and not self.has(RoundMark.ALL_MEMBERS, number):
            said = self._store.values(_key(number, "members"))
            left -= {
                *self.dead_ranks(number),
                *(each["rank"] for each in said if not each["facts"]),
            }
            number -= 1
        return left

    def has_broken_too_many(self, number: int) -> bool:
        """Return whether as many rounds before this one as may be were broken."""
        before = range(number - MOST_UNFINISHED, number)
        return before[0] > 0 and not any(map(self.is_finished, before))

    def is_next_suspected(self, since: int) -> bool:
        """Return whether the round that is next is suspected, at or after one that has begun."""
        return self.has(RoundMark.SUSPECTED, self.newest(since) + 1)

    def note_waiting(self) -> None:
        """Say that this rank takes no part in the start (--moe-ft-elastic): nobody can replace it."""
        self._store.append("waiting", self.rank)

    def waiting(self, known: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return the ranks that have said so, of which some are known."""
        if self._store.length("waiting") == len(known):
            return known
        return frozenset(self._store.values("waiting"))

    def _waits_for_spare(self, number: int) -> bool:
        return self.has(RoundMark.WAITS, number) and not self.has(RoundMark.WAITS_NO_MORE, number)

    def _declare(self, number: int, what: dict[str, Any]) -> bool:
        """Begin a round, unless it has begun; return whether it is that of the caller."""
        return bool(self._store.set_first(_key(number, "declared"), what) == what)

    def has_joined(self, number: int, rank: int) -> bool:
        """Return whether a rank takes part in a round already."""
        return any(said["rank"] == rank for said in self._store.values(_key(number, "members")))

    def join(self, number: int, entry: Entry) -> None:
        """Take part in a round, once. A replacement declares it with that."""
        if entry.died_s is not None:
            self._declare(number, {})
        self._store.add(_key(number, "members"), asdict(entry))

    def join_for_dead(self, entry: Entry, since: int = 0) -> int:
        """Join the round in which a replacement takes the place of a dead rank, and return its number.

        Args:
            since: the round in which the rank came to this node.

        Raises:
            ReplacedError: if another node has the rank now.
            RepairError: if too many rounds have been broken.
        """
        number = max(since, 1)  # what came before that is not this process's
        while True:
            is_past = self.is_finished(number) or self.has_joined(number, self.rank)
            if not is_past and self.has_broken_too_many(number):
                raise RepairError(
                    f"{MOST_UNFINISHED} rounds of repairs were broken before an iteration was finished"
                )
            if is_past or self.is_declared(number) or self._declare(number, {}):
                # It is declared, so this does not change any more.
                if number > since and self.is_own_lost(number):
                    raise ReplacedError(f"another node has rank {self.rank} since round {number}")
                if not is_past:
                    break
                number += 1
        self.join(number, entry)
        return number

    def wait_for_all(self, number: int, deadline_s: float) -> Sequence[Entry]:
        """Return the entries of a round when all ranks have joined, in their order. Called by all of them.

        Of survivors with the same facts there is the first one: each rank of many would make them all.

        Raises:
            RepairError: if some have not joined in time, or the round is broken.
        """
        told = self._wait_for(number, "members", deadline_s)
        entries = [Entry(**{**facts, "rank": rank}) for facts, ranks in told for rank in ranks]
        return sorted(entries, key=lambda each: each.rank)

    def wait_until_ready(self, number: int, deadline_s: float) -> None:
        """Say that this rank can make connections, and wait until all can.

        Raises:
            RepairError: if some cannot in time, or the round is broken.
        """
        self._store.add(_key(number, "ready"), {"rank": self.rank})
        self._wait_for(number, "ready", deadline_s)

    @awaiting_others()
    def _wait_for(self, number: int, what: str, deadline_s: float) -> Any:
        """Return what all ranks have said in a list, as `_by_value` does. The first one reads what is new."""
        end_s, told_key = time.monotonic() + deadline_s, _key(number, f"all_{what}")
        awaited = set(range(self._world_size))
        next_key = _key(number + 1, "declared")
        said, num_bytes = dict[int, dict[str, Any]](), 0
        while True:
            if self.rank == 0:
                more, num_bytes = self._store.more_values(_key(number, what), num_bytes)
                said |= {each["rank"]: each for each in more}
                if said.keys() == awaited:
                    self._store.set(told_key, told := _by_value(said))
                    return told
                missing = f"{sorted(awaited - said.keys())} are missing"
            else:
                wait_s = min(self._look_s, max(0.0, end_s - time.monotonic()))
                told, verdict = _look(self._store, [told_key, next_key], wait_s)
                self._learn(number + 1, verdict)
                if told is not None:
                    return told
                missing = "rank 0 says which are missing"
            if self.is_declared(number + 1):
                raise RepairError(f"round {number} is broken: one of its ranks has died")
            if time.monotonic() > end_s and self._waits_for_spare(number):
                end_s = time.monotonic() + deadline_s
                note_progress()
            if time.monotonic() > end_s:
                raise RepairError(
                    f"round {number} has not had all {what} within {deadline_s:.0f} s: {missing}"
                )
            if self.rank == 0:
                time.sleep(_MIN_POLL_S)


def _look(store: SignedStore, keys: Sequence[str], wait_s: float) -> list[Any]:
    """Return some values; the store lets this wait for the first one."""
    found = store.look(keys, wait_s)
    if not any(each is not None for each in found):
        time.sleep(_MIN_POLL_S)  # also if a stranger's value is there
    return found


def _key(number: int, what: str) -> str:
    return f"round_{number}/{what}"


def _by_value(said: Mapping[int, dict[str, Any]]) -> list[Any]:
    """Return pairs of what was said, without the rank, and ranks: all replacements, else the first."""
    found: dict[str, list[int]] = {}
    for rank, value in sorted(said.items()):
        rest = {name: each for name, each in value.items() if name != "rank"}
        ranks = found.setdefault(json.dumps(rest), [])
        if not ranks or value.get("died_s") is not None:
            ranks.append(rank)
    return [[json.loads(text), ranks] for text, ranks in found.items()]
