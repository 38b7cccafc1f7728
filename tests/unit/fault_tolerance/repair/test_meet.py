"""A rank joins each round once, and learns in it who was replaced and where the loop is."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron.fault_tolerance.repair import meet
from megatron.fault_tolerance.repair.meet import Membership, Role, met
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Member, Rounds, declare
from tests.unit.fault_tolerance.repair.members import position_at, survivor
from tests.unit.signed import signed


@pytest.fixture
def store() -> SignedStore:
    """Return a store in which rank 1 of three has died in round 0."""
    found = signed()
    declare(found, rank=1, world_size=3, died_s=5.0, hung_s=2.0)
    return found


def survivor_of(store: SignedStore, iteration: int) -> Membership:
    """Return that of rank 0, in an iteration."""
    membership = Membership(Link(), Rounds(store, 0, 3), 0)
    membership.position = position_at(iteration)
    return membership


def test_survivor_tells_where_its_loop_is_and_learns_who_is_replaced(store: SignedStore) -> None:
    Rounds(store, 0, 3).join(1, survivor(2, 4))
    membership = survivor_of(store, 4)
    assert (membership.role, membership.round) == (Role.SURVIVOR, 0)
    found = membership.meet()
    assert (membership.round, found.round, found.dead, found.died_s) == (1, 1, (1,), 5.0)
    assert found.hung_s == {1: 2.0}
    assert found.positions == [position_at(4)] * 2


def test_replacement_begins_at_the_latest_iteration_of_the_survivors() -> None:
    found = met(1, [survivor(0, 4), Member(rank=1, died_s=5.0), survivor(2, 5)])
    assert found.survivors_position == position_at(5)


def test_members_that_do_not_fit_together_do_not_meet(store: SignedStore) -> None:
    with pytest.raises(RepairError, match="all ranks have died: nothing is left to repair"):
        met(1, [Member(rank=1, died_s=5.0)])
    Rounds(store, 0, 3).join(1, survivor(2, 4, is_evaluated=True))
    with pytest.raises(RepairError, match="some ranks were in an evaluation, and others were not"):
        survivor_of(store, 4).meet()


def tell(store: SignedStore, number: int) -> None:
    """Be rank 0, which says who takes part in a round that all have joined."""
    Rounds(store, 0, 3).wait_for_all(number, 0.0)


@contextmanager
def told(store: SignedStore, number: int) -> Iterator[None]:
    """Have rank 0 wait meanwhile for all to join a round."""
    rounds = Rounds(store, 0, 3)
    thread = threading.Thread(target=lambda: rounds.wait_for_all(number, 60.0))
    thread.start()
    yield
    thread.join()


def replacement(store: SignedStore) -> Membership:
    """Return that of rank 1, which has joined round 1 already."""
    link = Link(died_s=5.0, predecessor_hung_s=2.0)
    link.round = 1
    return Membership(link, Rounds(store, 1, 3), 1)


def test_replacement_is_like_any_other_rank_once_it_has_met_them_and_finished_an_iteration(
    store: SignedStore,
) -> None:
    for rank in (0, 2):
        Rounds(store, rank, 3).join(1, survivor(rank, 4))
    tell(store, 1)
    membership = replacement(store)
    assert membership.wait_for_survivors() == position_at(4)
    assert (membership.role, membership.position) == (Role.JOINING, position_at(4))
    assert membership.meet().dead == (1,)
    assert (membership.role, membership.round) == (Role.JOINED, 1), "it has joined before"
    membership.finish()
    assert Rounds(store, 0, 3).is_finished(1)
    assert membership.role is Role.SURVIVOR
    declare(store, rank=2, world_size=3, died_s=9.0)
    Rounds(store, 0, 3).join(2, survivor(0, 5))
    membership.position = position_at(5)
    with told(store, 2):
        assert membership.meet().dead == (2,), "it is no replacement any more"


def test_replacement_follows_the_survivors_into_the_next_round_if_its_own_breaks(
    store: SignedStore,
) -> None:
    for rank in (0, 2):
        Rounds(store, 0, 3).join(1, survivor(rank, 4))
    tell(store, 1)
    Rounds(store, 0, 3).join(2, survivor(0, 4))
    declare(store, rank=2, world_size=3, died_s=6.0)
    membership = replacement(store)
    membership.wait_for_survivors()
    assert membership.meet().round == 1, "all had joined it before it broke"
    with told(store, 2):
        found = membership.meet()
    assert (membership.round, found.dead, found.died_s) == (2, (1, 2), 5.0)
    assert found.positions == [position_at(4)] * 2, "a replacement knows it by now"


def test_replacement_leaves_a_round_that_breaks_before_all_have_joined(store: SignedStore) -> None:
    Rounds(store, 0, 3).join(1, survivor(0, 4))
    assert declare(store, rank=0, world_size=3, died_s=6.0) == 2
    Rounds(store, 0, 3).join(2, survivor(2, 4))
    membership = replacement(store)
    with told(store, 2):
        assert membership.wait_for_survivors() == position_at(4)
    assert (membership.meet().dead, membership.round) == ((0, 1), 2)


def test_replacement_that_nobody_meets_gives_up(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meet, "_MEETING_S", 0.02)
    with pytest.raises(RepairError, match="round 1 has not had all members within 0 s"):
        replacement(store).wait_for_survivors()
