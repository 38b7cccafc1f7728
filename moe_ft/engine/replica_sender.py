"""The thread that sends committed snapshots to peers, while the next one is copied."""

import queue
import threading
import time
from typing import Protocol

from moe_ft.engine.background import Reports, describe
from moe_ft.engine.peers import Replica
from moe_ft.engine.snapshot_job import SnapshotJob, SnapshotState

_RETRY_S = 10.0  # for what was recovered


class Replicator(Protocol):
    """Sends committed snapshots to peers."""

    def replicate(self, replica: Replica) -> bool:
        """Send a snapshot; return whether all peers have it. Failures are reported, not raised."""
        ...


class ReplicaSender:
    """Sends one replica after the other. Owned by the copy thread."""

    def __init__(self, replicator: Replicator, reports: Reports) -> None:
        self._replicator, self._reports = replicator, reports
        self._jobs: queue.SimpleQueue[tuple[Replica, SnapshotJob | None] | None]
        self._jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="moe_ft-replicate", daemon=True)
        self._thread.start()

    def submit(self, replica: Replica, job: SnapshotJob | None = None) -> None:
        """Send a replica after those that were submitted before; its job, if it has one, is complete then."""
        self._jobs.put((replica, job))

    def close(self, timeout_s: float) -> None:
        """End the thread after what is under way, or leave it after some seconds."""
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        again: Replica | None = None
        while True:
            try:
                next_ = self._jobs.get(timeout=_RETRY_S if again else None)
            except queue.Empty:
                next_ = (again, None) if again else None
            if next_ is None:
                return
            replica, job = next_
            start = time.perf_counter()
            try:
                is_protected = self._replicator.replicate(replica)
            except Exception as error:  # a peer's failure is reported there: this is one of ours
                iteration = replica.index.iteration
                self._reports.degraded("replicate", iteration, describe(error), error)
                is_protected = False
            # What was recovered is tried again until there is something newer to send.
            again = replica if job is None and not is_protected else None
            if job is not None:
                job.is_protected = is_protected
                job.replicate_s = time.perf_counter() - start
                job.complete_s += job.replicate_s
                job.state = SnapshotState.COMPLETE
