"""A rank joins each round once, and learns in it who was replaced and where the loop is."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from megatron.fault_tolerance.repair import membership as memberships
from megatron.fault_tolerance.repair.joining import Joining
from megatron.fault_tolerance.repair.membership import Membership
from megatron.fault_tolerance.repair.recipes import Recipes
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Rounds, declare
from tests.unit.fault_tolerance.repair.members import position_at, survivor
from tests.unit.signed import signed


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> SignedStore:
    """Return a store in which rank 1 has died in round 0; this process is rank 0."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    found = signed()
    declare(found, rank=1, world_size=3, died_s=5.0, hung_s=2.0)
    return found


def test_survivor_tells_where_its_loop_is_and_learns_who_is_replaced(store: SignedStore) -> None:
    Rounds(store, 0, 3).join(1, survivor(2, 4))
    membership = Membership(Link(), Rounds(store, 0, 3), None)
    assert membership.is_survivor
    membership.position = position_at(4)
    membership.meet()
    assert (membership.round, membership.dead, membership.died_s) == (1, (1,), 5.0)
    assert membership.hung_s == {1: 2.0}
    assert membership.positions == [position_at(4)] * 2
    assert membership.survivors_position == position_at(4)


def test_members_that_do_not_fit_together_do_not_meet(store: SignedStore) -> None:
    Rounds(store, 0, 3).join(1, survivor(2, 4, is_evaluated=True))
    membership = Membership(Link(), Rounds(store, 0, 3), None)
    membership.position = position_at(4)
    with pytest.raises(RepairError, match="some ranks were in an evaluation"):
        membership.meet()


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


def replacement(store: SignedStore, monkeypatch: pytest.MonkeyPatch) -> Membership:
    """Return that of rank 1, which has joined round 1 already."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    link = Link(died_s=5.0, predecessor_hung_s=2.0)
    link.round = 1
    return Membership(link, Rounds(store, 1, 3), Joining(Recipes()))


def test_replacement_takes_its_place_once_it_meets_the_others(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 2):
        Rounds(store, rank, 3).join(1, survivor(rank, 4))
    tell(store, 1)
    membership = replacement(store, monkeypatch)
    assert membership.wait_for_survivors() == membership.position == position_at(4)
    assert not membership.is_survivor
    membership.meet()
    assert membership.is_survivor
    assert membership.round == 1, "it has joined before"


def test_replacement_follows_the_survivors_into_the_next_round_if_its_own_breaks(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rounds(store, 0, 3).join(1, survivor(0, 4))
    Rounds(store, 0, 3).join(1, survivor(2, 4))
    tell(store, 1)
    Rounds(store, 0, 3).join(2, survivor(0, 4))
    declare(store, rank=2, world_size=3, died_s=6.0)
    membership = replacement(store, monkeypatch)
    membership.wait_for_survivors()
    membership.meet()
    assert membership.round == 1, "all had joined it before it broke"
    with told(store, 2):
        membership.meet()
    assert (membership.round, membership.dead, membership.died_s) == (2, (1, 2), 5.0)
    assert membership.positions == [position_at(4)] * 2, "a replacement knows it by now"


def test_replacement_leaves_a_round_that_breaks_before_all_have_joined(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rounds(store, 0, 3).join(1, survivor(0, 4))
    assert declare(store, rank=0, world_size=3, died_s=6.0) == 2
    Rounds(store, 0, 3).join(2, survivor(2, 4))
    membership = replacement(store, monkeypatch)
    with told(store, 2):
        assert membership.wait_for_survivors() == position_at(4)
    assert (membership.round, membership.dead) == (2, (0, 1))


def test_replacement_that_nobody_meets_gives_up(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memberships, "_MEETING_S", 0.02)
    with pytest.raises(RepairError, match="round 1 has not had all members within 0 s"):
        replacement(store, monkeypatch).wait_for_survivors()


def test_replacement_is_like_any_other_rank_once_an_iteration_is_finished(
    store: SignedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 2):
        Rounds(store, rank, 3).join(1, survivor(rank, 4))
    tell(store, 1)
    membership = replacement(store, monkeypatch)
    membership.wait_for_survivors()
    membership.meet()
    membership.finish()
    assert Rounds(store, 0, 3).is_finished(1)
    declare(store, rank=2, world_size=3, died_s=9.0)
    Rounds(store, 0, 3).join(2, survivor(0, 5))
    membership.position = position_at(5)
    with told(store, 2):
        membership.meet()
    assert membership.dead == (2,), "it is no replacement any more"
