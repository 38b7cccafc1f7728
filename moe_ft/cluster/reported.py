"""Failures that ranks of a start report in the job's store, for the law and for each other.

A rank reports before its process ends, over a connection of its own: the groups are broken then, and its
training thread may be in a call of the store. What follows from a report is decided in law.py.
"""

import os
import time
from contextlib import closing
from dataclasses import asdict, replace

from moe_ft.cluster import job_store
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.files.progress import call_within
from moe_ft.saying import warn
from moe_ft.verdicts import Failure

_KEY = "failures"
_REACH_S = 2.5  # for the job's store: the process is about to end


class Reported:
    """One connection's view of the failures of a start. Used by one thread."""

    def __init__(self, store: SignedStore) -> None:
        self._store, self._num_read = store, 0

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
        run, token = os.environ.get("TORCHELASTIC_RUN_ID", ""), assignment.token
        store = job_store.reach(assignment.meet, run, token, assignment.start, _REACH_S)
        with closing(SignedStore(store, lambda: token)) as signed:
            Reported(signed).add(failure)

    try:
        call_within(report, 2 * _REACH_S, "the job's store")
    except (RuntimeError, RepairError, OSError) as error:
        warn(f"rank {assignment.rank} has not reported how it has failed: {error}")
