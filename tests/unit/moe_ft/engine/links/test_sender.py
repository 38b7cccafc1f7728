"""Windows go to one half of the peers after the other, and never over the only copy that peers have."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moe_ft.engine.background import EventQueue, ThreadWorker
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.peers import OutgoingReplica
from moe_ft.engine.links.sender import ReplicaSender
from tests.unit.moe_ft.builders import make_window

DEADLINE_S = 60.0


class Peers:
    """Peers that note what they get, in place of a replicator.

    Attributes:
        sent: iteration and peers of each replica.
        away: peers that get nothing.
        lacking: peers that the last replica for them did not reach.
    """

    most_bytes, can_follow = 0, True

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.sent = ranks, list[tuple[int, set[int]]]()
        self.away, self.lacking = set[int](), set[int]()

    def replicate(self, replica: OutgoingReplica) -> bool:
        """Take a replica."""
        assert replica.keep_iteration is None or replica.peers is None
        peers = set(self.ranks if replica.peers is None else replica.peers)
        self.sent.append((replica.index.iteration, peers))
        self.lacking = (self.lacking | peers) - (peers - self.away)
        return not peers & self.away

    def close(self) -> None:
        """Do nothing."""


class Rank:
    """A rank with peers that have one region of it."""

    def __init__(self, num_peers: int) -> None:
        ranks = list(range(1, 1 + num_peers))
        self.peers = Peers(ranks)
        self.worker = ThreadWorker("replicate")
        replicator: Any = self.peers
        self.sender = ReplicaSender(replicator, EventQueue(), self.worker, Clock(), ranks)
        self.sender.start()

    def replica(self, iteration: int) -> OutgoingReplica:
        """Return a window of one snapshot."""
        index = make_window(first_iteration=iteration, length=1).index
        return OutgoingReplica(
            region=None,  # type: ignore[arg-type]
            pool=None,
            index=index,
            start_byte=0,
            end_byte=1,
            keep_iteration=iteration - 1,
        )

    def take(self, iteration: int, *, is_complete: bool = True) -> bool:
        """Send a window, to the rest as well if all ranks vote for it; return whether the first have it."""
        replica = self.replica(iteration)
        result = self.sender.submit(replica).result(DEADLINE_S)
        rest = self.sender.rest_of(replica)
        assert rest is not None
        if is_complete:
            rest()
            self.end()
        return result.is_protected

    def end(self) -> list[tuple[int, set[int]]]:
        """Return what was sent, once all of it is."""
        self.worker.submit(lambda: None).result(DEADLINE_S)
        return self.peers.sent


@pytest.fixture
def two() -> Iterator[Rank]:
    rank = Rank(2)
    yield rank
    rank.sender.close(DEADLINE_S)


def test_second_peer_gets_a_window_when_all_ranks_have_it_and_before_the_first_gets_the_next(
    two: Rank,
) -> None:
    two.take(1)
    two.take(2)
    assert two.end() == [(1, {1}), (1, {2}), (2, {1}), (2, {2})]


def test_window_that_some_rank_lacks_leaves_the_one_before_at_the_second_peer(two: Rank) -> None:
    two.take(1)
    two.take(2, is_complete=False)
    two.take(3)
    assert two.end() == [(1, {1}), (1, {2}), (2, {1}), (3, {1}), (3, {2})]


def test_peer_that_was_not_reached_gets_the_next_window_first(two: Rank) -> None:
    two.take(1)
    two.peers.away = {2}
    two.take(2)
    two.peers.away = set[int]()
    two.take(3, is_complete=False)
    two.take(4)
    # The first peer alone has 2 until 4 is at the second one, of all ranks.
    assert two.end()[2:] == [(2, {1}), (2, {2}), (3, {2}), (4, {2}), (4, {1})]


def test_first_peers_that_are_not_reached_are_said(two: Rank) -> None:
    two.peers.away = {1}
    assert not two.take(1)


@pytest.mark.parametrize(
    ("num_peers", "halves"), [(3, [{1, 2}, {3}]), (4, [{1, 2}, {3, 4}]), (5, [{1, 2, 3}, {4, 5}])]
)
def test_more_peers_are_two_halves(num_peers: int, halves: list[set[int]]) -> None:
    rank = Rank(num_peers)
    rank.take(1)
    assert [peers for _, peers in rank.end()] == halves
    rank.sender.close(DEADLINE_S)


def test_state_that_no_peer_has_after_a_recovery_leaves_the_one_before_at_the_second(
    two: Rank,
) -> None:
    two.sender.submit_recovered(
        replace(two.replica(1), keep_iteration=None, peers=frozenset({1, 2}))
    )
    two.take(2)
    assert two.end() == [(1, {1}), (2, {2}), (2, {1})]


def test_state_that_a_peer_has_after_a_recovery_is_not_sent_and_the_other_gets_the_next_first(
    two: Rank,
) -> None:
    two.sender.submit_recovered(replace(two.replica(1), keep_iteration=None, peers=frozenset({2})))
    two.take(2)
    assert two.end() == [(1, set()), (2, {2}), (2, {1})]
