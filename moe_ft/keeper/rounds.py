"""Rounds of repairs: ranks say in the job's store that one has died, and learn who takes part.

Round 0 is the start. Every rank takes part in every round, in their order: a replacement joins the first one
without its rank, which declares that round if nobody has. Every other rank joins when it has left its
iteration, and a round is complete when all have joined. It is over when an iteration has been finished. If a
rank dies before, its replacement declares the next round, and all others leave the one that is broken.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_ft.errors import RepairError

MOST_UNFINISHED = 3  # rounds in a row that are broken before an iteration is finished
_MIN_POLL_S = 0.01
_MAX_STORE_OPERATIONS_PER_S = 5000  # of all ranks together


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

    def __init__(self, store: Any, world_size: int) -> None:
        self._store, self._world_size = store, world_size
        self.poll_s = max(_MIN_POLL_S, world_size / _MAX_STORE_OPERATIONS_PER_S)

    def last_finished(self) -> int:
        """Return the last round in which an iteration was finished."""
        return int(self._store.get("finished")) if self._store.check(["finished"]) else 0

    def finish(self, number: int) -> None:
        """Note that an iteration was finished in a round; all ranks of it may say so."""
        self._store.set("finished", str(number))

    def is_declared(self, number: int) -> bool:
        """Return whether a round has begun."""
        return bool(self._store.check([_key(number)]))

    def time_out(self, number: int) -> None:
        """Say that a rank has timed out waiting for another, in groups of the round before this one."""
        self._store.set(_timeout_key(number), "1")

    def has_timed_out(self, number: int) -> bool:
        """Return whether some rank has said so."""
        return bool(self._store.check([_timeout_key(number)]))

    def has_joined(self, number: int, rank: int) -> bool:
        """Return whether a rank takes part in a round already."""
        return rank in self._members(number)

    def join(self, number: int, member: Member) -> None:
        """Take part in a round, once. A replacement declares it with that."""
        self._store.append(_key(number), json.dumps(asdict(member)) + "\n")

    def wait_for_all(
        self, number: int, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> Sequence[Member]:
        """Return all members of a round, by rank.

        Raises:
            RepairError: if some have not joined in time, or the round is broken.
        """
        end_s = clock() + deadline_s
        while True:
            members = self._members(number)
            if len(members) == self._world_size:
                return [members[rank] for rank in sorted(members)]
            self._check_unbroken(number)
            if clock() > end_s:
                missing = sorted(set(range(self._world_size)) - set(members))
                raise RepairError(
                    f"ranks {missing} have not come to round {number} within {deadline_s:.0f} s"
                )
            time.sleep(self.poll_s)

    def wait_until_ready(
        self, number: int, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Say that this rank can make connections, and wait until all can.

        Raises:
            RepairError: if some cannot in time, or the round is broken.
        """
        end_s, key = clock() + deadline_s, f"round_{number}/ready"
        num_ready = self._store.add(key, 1)
        while num_ready < self._world_size:
            self._check_unbroken(number)
            if clock() > end_s:
                raise RepairError(
                    f"{self._world_size - num_ready} ranks were not ready for round {number} within "
                    f"{deadline_s:.0f} s"
                )
            time.sleep(self.poll_s)
            num_ready = self._store.add(key, 0)

    def _check_unbroken(self, number: int) -> None:
        if self.is_declared(number + 1):
            raise RepairError(f"round {number} is broken: one of its ranks has died")

    def _members(self, number: int) -> dict[int, Member]:
        if not self.is_declared(number):
            return {}
        lines = self._store.get(_key(number)).decode().splitlines()
        members = [Member(**json.loads(line)) for line in lines]
        return {each.rank: each for each in members}


def _key(number: int) -> str:
    return f"round_{number}/members"


def _timeout_key(number: int) -> str:
    return f"round_{number}/timed_out"


def declare(store: Any, rank: int, world_size: int, died_s: float, hung_s: float = 0.0) -> int:
    """Join the round in which a replacement takes the place of a dead rank, and return its number.

    Args:
        died_s, hung_s: see `Member`.

    Raises:
        RepairError: if too many rounds have been broken.
    """
    rounds = Rounds(store, world_size)
    number = finished = rounds.last_finished()
    while number == finished or rounds.has_joined(number, rank):
        number += 1
    if number > finished + MOST_UNFINISHED:
        raise RepairError(
            f"{MOST_UNFINISHED} rounds of repairs were broken before an iteration was finished"
        )
    rounds.join(number, Member(rank=rank, died_s=died_s, hung_s=hung_s))
    return number
