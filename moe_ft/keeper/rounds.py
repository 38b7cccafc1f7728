"""Rounds of repairs: ranks say in the job's store that one has died, and learn who takes part.

Round 0 is the start. Every rank takes part in every round, in their order: a replacement joins the first one
without its rank, which declares that round if nobody has. Every other rank joins when it has left its
iteration, and a round is complete when all have joined. It is over when an iteration has been finished. If a
rank dies before, its replacement declares the next round, and all others leave the one that is broken.

Each rank signs what it says. Rank 0 reads what all have said, and tells the others: 10,000 ranks that read it
each would need minutes of the one process that keeps the store.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_ft.engine.links.signed_store import SignedStore, poll_s
from moe_ft.errors import RepairError

MOST_UNFINISHED = 3  # rounds in a row that are broken before an iteration is finished
_MIN_POLL_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One rank in a round.

    Attributes:
        died_s: time since 1970 when the rank died that this one replaces; None for a survivor. A replacement
            is one until a round is over.
        hung_s: seconds for which that rank had hung when it was killed for it; 0 if it was not.
        facts: for replacements, from ranks that know where the loop is.
    """

    rank: int
    died_s: float | None = None
    hung_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


class Rounds:
    """One connection's view of the rounds. Used by one thread."""

    def __init__(self, store: SignedStore, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.poll_s = poll_s(world_size, _MIN_POLL_S)

    def is_finished(self, number: int) -> bool:
        """Return whether an iteration was finished in a round."""
        return number == 0 or self._has(number, "finished")

    def finish(self, number: int) -> None:
        """Note that an iteration was finished in a round; all ranks of it may say so."""
        self._store.set(_key(number, "finished"), True)

    def is_declared(self, number: int) -> bool:
        """Return whether a round has begun."""
        return self._has(number, "declared")

    def time_out(self, number: int) -> None:
        """Say that a rank has timed out waiting for another, in groups of the round before this one."""
        self._store.set(_key(number, "timed_out"), True)

    def has_timed_out(self, number: int) -> bool:
        """Return whether some rank has said so."""
        return self._has(number, "timed_out")

    def has_joined(self, number: int, rank: int) -> bool:
        """Return whether a rank takes part in a round already."""
        return any(said["rank"] == rank for said in self._store.values(_key(number, "members")))

    def join(self, number: int, member: Member) -> None:
        """Take part in a round, once. A replacement declares it with that."""
        if member.died_s is not None:
            self._store.set(_key(number, "declared"), True)
        self._store.append(_key(number, "members"), asdict(member))

    def wait_for_all(self, number: int, deadline_s: float) -> Sequence[Member]:
        """Return all members of a round, by rank. Called by all of them.

        Raises:
            RepairError: if some have not joined in time, or the round is broken.
        """
        told = self._wait_for(number, "members", deadline_s)
        members = [Member(**{**facts, "rank": rank}) for facts, ranks in told for rank in ranks]
        return sorted(members, key=lambda each: each.rank)

    def wait_until_ready(self, number: int, deadline_s: float) -> None:
        """Say that this rank can make connections, and wait until all can.

        Raises:
            RepairError: if some cannot in time, or the round is broken.
        """
        self._store.append(_key(number, "ready"), {"rank": self._rank})
        self._wait_for(number, "ready", deadline_s)

    def _wait_for(self, number: int, what: str, deadline_s: float) -> Any:
        """Return what all ranks have said in a list, as pairs of a value and the ranks that have said it."""
        end_s, told_key = time.monotonic() + deadline_s, _key(number, f"all_{what}")
        while True:
            if self._rank == 0:
                said = {each["rank"]: each for each in self._store.values(_key(number, what))}
                if len(said) == self._world_size:
                    self._store.set(told_key, told := _by_value(said))
                    return told
                missing = f"{sorted(set(range(self._world_size)) - set(said))} are missing"
            else:
                if (told := self._store.get(told_key)) is not None:
                    return told
                missing = "rank 0 says which are missing"
            if self.is_declared(number + 1):
                raise RepairError(f"round {number} is broken: one of its ranks has died")
            if time.monotonic() > end_s:
                raise RepairError(
                    f"round {number} has not had all {what} within {deadline_s:.0f} s: {missing}"
                )
            time.sleep(self.poll_s)

    def _has(self, number: int, what: str) -> bool:
        return self._store.get(_key(number, what)) is not None


def _key(number: int, what: str) -> str:
    return f"round_{number}/{what}"


def _by_value(said: Mapping[int, dict[str, Any]]) -> list[Any]:
    """Return pairs of what was said, without the rank, and the ranks: most say the same."""
    found: dict[str, list[int]] = {}
    for rank, value in sorted(said.items()):
        rest = {name: each for name, each in value.items() if name != "rank"}
        found.setdefault(json.dumps(rest), []).append(rank)
    return [[json.loads(text), ranks] for text, ranks in found.items()]


def declare(
    store: SignedStore, rank: int, world_size: int, died_s: float, hung_s: float = 0.0
) -> int:
    """Join the round in which a replacement takes the place of a dead rank, and return its number.

    Raises:
        RepairError: if too many rounds have been broken.
    """
    rounds = Rounds(store, rank, world_size)
    number = 1
    while rounds.is_finished(number) or rounds.has_joined(number, rank):
        number += 1
    before = range(number - MOST_UNFINISHED, number)
    if before[0] > 0 and not any(map(rounds.is_finished, before)):
        raise RepairError(
            f"{MOST_UNFINISHED} rounds of repairs were broken before an iteration was finished"
        )
    rounds.join(number, Member(rank=rank, died_s=died_s, hung_s=hung_s))
    return number
