"""Report to the job's store that an iteration was finished, where dead ranks are not replaced in place.

The agent counts restarts in a row without one (cluster/law.py). Where ranks are replaced, they report it when
that becomes possible: `Member.become_replaceable`.
"""

import os
from contextlib import closing, suppress
from typing import override

from moe_ft.cluster import job_store
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import own_assignment, own_member
from moe_ft.cluster.rounds import Mark, Rounds
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.errors import JobStoreError, RepairError
from moe_ft.loop.listeners import EndedIteration, LoopListener, LoopState

_REACH_S = 5.0


class ReportsTraining(LoopListener):
    """Reports once, on rank 0. Owned by the training thread."""

    def __init__(self, loop: LoopState, rank: int) -> None:
        self._loop = loop
        self._is_due = rank == 0

    @override
    def after_iteration(self, ended: EndedIteration) -> None:
        is_due, self._is_due = self._is_due, False
        assignment = own_assignment()
        if is_due and assignment is not None and (own_member() is None or self._loop.no_repair):
            with suppress(
                RepairError, JobStoreError, OSError
            ):  # without the store the job ends soon
                report_training(assignment)


def report_training(assignment: Assignment) -> None:
    """Report that the start trains, and that none of its ranks is replaced in place.

    Raises:
        RepairError, JobStoreError, OSError: if the job's store cannot be reached.
    """
    run, token = os.environ.get("TORCHELASTIC_RUN_ID", ""), assignment.token
    store = job_store.reach(assignment.meet, run, token, assignment.start, _REACH_S)
    with closing(SignedStore(store, lambda: token)) as signed:
        rounds = Rounds(signed, assignment.rank, assignment.world_size)
        rounds.note(Mark.NOT_IN_PLACE)
        rounds.begin_training()
