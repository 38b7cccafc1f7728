"""Sends committed snapshots to peers while the next one is copied."""

from concurrent.futures import Future
from functools import partial
from typing import Protocol

from moe_ft.engine.background import BackgroundPart, Reports, describe
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import Replica
from moe_ft.engine.snapshots.job import ReplicationResult
from moe_ft.engine.worker import Worker

_RETRY_S = 10.0  # for what was recovered


class Replicator(Protocol):
    """Sends committed snapshots to peers."""

    def replicate(self, replica: Replica) -> bool:
        """Send a snapshot; return whether all peers have it. Failures are reported, not raised."""

    def close(self) -> None:
        """Close all connections."""


class ReplicaSender:
    """Sends one replica after the other on a worker. Any thread may submit."""

    def __init__(
        self, replicator: Replicator, reports: Reports, worker: Worker, clock: Clock
    ) -> None:
        self._replicator, self._reports = replicator, reports
        self._worker, self._clock = worker, clock

    def start(self) -> None:
        """Start the worker."""
        self._worker.start()

    def submit(self, replica: Replica) -> Future[ReplicationResult]:
        """Send a snapshot after everything submitted before."""
        return self._worker.submit(partial(self._send, replica))

    def submit_recovered(self, replica: Replica) -> None:
        """Send what was recovered; try again until peers have it, or there is something newer to send."""
        self._worker.submit(partial(self._send_recovered, replica))

    def close(self, timeout_s: float) -> None:
        """End the worker after what is under way, or leave it after some seconds; then close connections."""
        self._worker.close(timeout_s)
        self._replicator.close()

    def _send(self, replica: Replica) -> ReplicationResult:
        start = self._clock.perf_counter()
        is_protected = False
        iteration = replica.index.iteration
        try:
            is_protected = self._replicator.replicate(replica)
        except Exception as error:  # a peer's failure is reported there: this is one of ours
            self._reports.degraded(BackgroundPart.REPLICATE, iteration, describe(error), error)
        return ReplicationResult(
            is_protected=is_protected, seconds=self._clock.perf_counter() - start
        )

    def _send_recovered(self, replica: Replica) -> None:
        if not self._send(replica).is_protected:
            self._worker.when_idle(_RETRY_S, partial(self._send_recovered, replica))
