"""The way of a snapshot to peers: which of them get it when. What one pair of ranks says is peers.py.

All peers get it at once, each into the region that does not hold the window before. Or a peer has one region
of a rank, and a window goes to one half of the peers after the other, here with two:

    own memory     k-1, k arrives   k-1 and k           k, k+1 arrives   k, k+1 arrives
    first peer     k arrives        k                   k                k+1 arrives
    second peer    k-1              k-1                 k arrives        k
                                    ^ all ranks vote that k is complete

Until that vote k-1 is whole for all ranks, in own memory and at second peers; from then on k is, in own
memory and at first peers. A rank sends one thing after the other, so its first peer loses k only when its
second one has it, which no other rank need know. So memory covers the loss of one node at any moment (with
four peers of two), and of as many nodes as there are peers while nothing is being sent.

A rank decides alone which peers are the first half: those that the newest window did not reach, so that the
one that has it is not overwritten first.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from moe_ft.engine.background import BackgroundPart, EventQueue, ThreadWorker, describe
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import OutgoingReplica, PeerReplicator
from moe_ft.engine.snapshots.job import ReplicationResult

_RECOVERED_RETRY_S = 10.0


class ReplicaSender:
    """Sends one replica after the other on a worker. Any thread may submit."""

    def __init__(
        self,
        replicator: PeerReplicator,
        reports: EventQueue,
        worker: ThreadWorker,
        clock: Clock,
        halved: Sequence[int] = (),
    ) -> None:
        """Take the peers that get a window in halves, none if all get it at once."""
        self._replicator = replicator
        self._reports = reports
        self._worker = worker
        self._clock = clock
        self._order = [*halved]  # the first half comes first; owned by the worker
        self._num_first = (len(halved) + 1) // 2
        self._recovered: Future[None] | None = None

    def start(self) -> None:
        """Start the worker."""
        self._worker.start()

    def submit(self, replica: OutgoingReplica) -> Future[ReplicationResult]:
        """Send a snapshot after everything submitted before: to all peers, or to the first half of them."""
        return self._worker.submit(partial(self._send_first, replica))

    def rest_of(self, replica: OutgoingReplica) -> Callable[[], Future[ReplicationResult]] | None:
        """Return what sends the window of a last snapshot to the second half; None if there is none.

        To be called when all ranks have the window in their memory and at the first half of their peers.
        """
        if not self._order:
            return None
        return partial(self._worker.submit, partial(self._send_rest, replica))

    def submit_recovered(self, replica: OutgoingReplica) -> None:
        """Send what was recovered; try again until peers have it, or there is something newer to send."""
        self._recovered = self._worker.submit(partial(self._send_recovered, replica))

    @property
    def may_go_on(self) -> bool:
        """False while parity lacks what was recovered: the window before it must stay in all regions."""
        recovered = self._recovered
        return recovered is None or recovered.done() or not self._replicator.adds_to_parity

    def close(self, timeout_s: float) -> None:
        """End the worker after what is under way, or leave it after some seconds; then close connections."""
        self._worker.close(timeout_s)
        self._replicator.close()

    def _send_first(self, replica: OutgoingReplica) -> ReplicationResult:
        if not self._order:
            return self._send(replica)
        if replica.index.num_snapshots == 1:  # of a window, all of which goes to the same peers
            self._order.sort(key=lambda rank: rank not in self._replicator.lacking)  # stable
        sent = self._send_to(self._order[: self._num_first], replica)
        # The rest takes its time of the next snapshot.
        return replace(sent, seconds=sent.seconds * len(self._order) / self._num_first)

    def _send_rest(self, replica: OutgoingReplica) -> ReplicationResult:
        # All of the window: of a rank that saves nothing the versions of units do not tell what is lacking.
        whole = replace(replica, start_byte=0)
        return self._send_to(self._order[self._num_first :], whole)

    def _send_to(self, peers: Sequence[int], replica: OutgoingReplica) -> ReplicationResult:
        """Send to peers that overwrite what they have of this rank, which others keep."""
        return self._send(replace(replica, peers=frozenset(peers), keep_iteration=None))

    def _send(self, replica: OutgoingReplica) -> ReplicationResult:
        start = self._clock.perf_counter()
        is_protected = False
        iteration = replica.index.iteration
        try:
            is_protected = self._replicator.replicate(replica)
        except Exception as error:  # a peer's failure is reported there: this is one of ours
            self._reports.degraded(BackgroundPart.REPLICATE, iteration, describe(error), error)
        finally:
            if replica.lent is not None:
                replica.lent.release()
        return ReplicationResult(
            is_protected=is_protected,
            seconds=self._clock.perf_counter() - start,
            num_bytes=self._replicator.most_bytes,
            can_follow=self._replicator.can_follow,
        )

    def _send_recovered(self, replica: OutgoingReplica) -> None:
        if self._order and replica.peers is not None:
            # Peers that lack it may have the one before, which a rank may need until its own peers have this
            # one: half of them are to have it, and the next window begins with the others.
            lacking = [rank for rank in self._order if rank in replica.peers]
            num_sent = max(0, self._num_first - len(self._order) + len(lacking))
            self._replicator.lacking.update(lacking[num_sent:])
            replica = replace(replica, peers=frozenset(lacking[:num_sent]))
        if not self._send(replica).is_protected:
            self._worker.when_idle(_RECOVERED_RETRY_S, partial(self._send_recovered, replica))
