"""A rank learns in a round who was replaced and where the loop is.

The simulation of repairs has rounds that break, and what replacements do in them.
"""

import pytest

from megatron.fault_tolerance.repair.meet import Done, Membership, Role, met
from moe_ft.cluster.link import Link
from moe_ft.cluster.rounds import Member, Rounds, declare
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.errors import RepairError
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


def test_replacement_begins_with_the_least_that_survivors_had_done() -> None:
    def done_of(*done: Done) -> int:
        members = [survivor(rank, 4, done=each) for rank, each in enumerate(done)]
        return met(1, members).survivors_position.done

    assert done_of(Done.LOG, Done.STEP) == Done.STEP
    assert done_of(Done.STEP, Done.NOTHING) == Done.NOTHING
    assert done_of(Done.EVALUATING, Done.LOG) == Done.LOG


def test_members_that_do_not_fit_together_do_not_meet(store: SignedStore) -> None:
    with pytest.raises(RepairError, match="all ranks have died: nothing is left to repair"):
        met(1, [Member(rank=1, died_s=5.0)])
    Rounds(store, 0, 3).join(1, survivor(2, 4, done=Done.EVALUATING))
    with pytest.raises(RepairError, match="some ranks were in an evaluation, and others were not"):
        survivor_of(store, 4).meet()
