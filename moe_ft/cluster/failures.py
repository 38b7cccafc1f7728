"""Failures of ranks in the job's store, in two lists: they outlive processes and nodes.

In one, ranks of a start report for the law, which decides what follows. A rank reports before its process
ends, over a connection of its own: the groups are broken then, and its training thread may be in a call of
the store.

In the other are failures for which ranks were replaced in this start. If the process in the place of one
fails in the same way, a third one would, too: all ranks end, or leave that iteration out. Its replacement
tells the others in its entry of a round, so that all of them know the same iterations.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from enum import Enum, auto
from typing import Any

from moe_ft.cluster import job_store
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.files.progress import call_within
from moe_ft.saying import warn
from moe_ft.verdicts import LIKELY_AGAIN, Failure

_KEY = "failures"
_REACH_S = 2.5  # for the job's store: the process is about to end


class Reported:
    """One connection's view of the failures of a start. Used by one thread."""

    def __init__(self, store: SignedStore) -> None:
        self._store = store
        self._num_read = 0

    def add(self, failure: Failure) -> None:
        """Report a failure of this rank, or of another one that it has found out."""
        self._store.append(_KEY, asdict(failure))

    def new(self) -> tuple[Failure, ...]:
        """Return failures that were not returned before, in the order in which they were reported."""
        if self._store.length(_KEY) <= self._num_read:
            return ()
        found = self._store.values(_KEY)
        new, self._num_read = found[self._num_read :], len(found)
        return tuple(map(Failure.of, new))


def report_failure(assignment: Assignment, failure: Failure) -> None:
    """Report a failure, or warn if the store does not answer in time: its node may have failed. Any thread.

    Args:
        assignment: of this process, whether or not it would be replaced.
    """
    if failure.rank == assignment.rank:
        failure = replace(failure, node=failure.node or assignment.node)
    failure = replace(failure, time_s=failure.time_s or time.time())

    def report() -> None:
        with closing(job_store.reach_own(assignment, _REACH_S)) as store:
            Reported(store).add(failure)

    try:
        call_within(report, 2 * _REACH_S, "the job's store")
    except (RuntimeError, RepairError, OSError) as error:
        warn(f"rank {assignment.rank} has not reported how it has failed: {error}")


class Consequence(Enum):
    """Consequence of a failure of a rank that can be replaced."""

    REPLACE = auto()  # the rank is replaced, and its iteration runs again
    LEAVE_OUT = auto()  # it is replaced, and all ranks leave that iteration out
    END = auto()  # all ranks end


class FailureNotes:
    """One connection's view of the notes. Used by one thread."""

    def __init__(self, store: SignedStore) -> None:
        self._store = store

    def answer(self, failure: Failure, may_leave_out: Callable[[], bool]) -> Consequence:
        """Note a failure unless all end, and return what follows it.

        Args:
            may_leave_out: returns whether the iteration may be left out, if it is not yet.
        """
        notes = [Failure.of(each) for each in self._store.values("replaced_for")]
        num_before = sum(map(failure.is_same, notes))
        if num_before and not (num_before == 1 and self._is_of_batch(failure, may_leave_out)):
            return Consequence.END
        self._store.add("replaced_for", asdict(failure))
        if not num_before:
            return Consequence.REPLACE
        self._store.add("left_out", asdict(failure))
        return Consequence.LEAVE_OUT

    def _is_of_batch(self, failure: Failure, may_leave_out: Callable[[], bool]) -> bool:
        is_known = failure.iteration in left_out_by(self.left_out())
        return failure.kind in LIKELY_AGAIN and (is_known or may_leave_out())

    def left_out(self) -> list[dict[str, Any]]:
        """Return the failures whose iterations are left out, as JSON values."""
        return self._store.values("left_out")


def left_out_by(failures: Iterable[Mapping[str, Any]]) -> dict[int, Failure]:
    """Return the iterations that are left out, each with a failure that its batch has led to."""
    return {each.iteration: each for each in map(Failure.of, failures)}
