"""Training that leaves nothing to the background from one iteration to the next.

Tests that say exactly which state is restored, sent or stored use the fixture `settled`. Without it an older
state is as right where the machine is busy: a snapshot may not be complete yet, or was skipped.
"""

import os
from typing import Any

from moe_ft.engine.engine import CheckpointEngine
from moe_ft.engine.persist.requests import result_path
from moe_ft.engine.snapshots.job import SnapshotState
from tests.waiting import wait_for

SETTLED = "TEST_SETTLED"  # in the environment of a rank


def apply_settling() -> None:
    """Have this rank wait at the end of each iteration, if the environment says so, until it is settled."""
    if SETTLED not in os.environ:
        return
    end = CheckpointEngine.end_iteration

    def end_iteration(engine: CheckpointEngine, *args: Any, **kwargs: Any) -> float:
        stall_s = end(engine, *args, **kwargs)
        wait_for(lambda: is_settled(engine), "the background work of an iteration")
        return stall_s

    CheckpointEngine.end_iteration = end_iteration  # type: ignore[assignment,method-assign]


def is_settled(engine: CheckpointEngine) -> bool:
    """Return whether the last snapshot of this rank is committed and sent, and nothing is being stored."""
    job, client = engine._windows.last_job, engine._storage._client
    is_stored = client.iteration is None or result_path(client._directory, client._rank).exists()
    return is_stored and (job is None or job.state is not SnapshotState.RUNNING)
