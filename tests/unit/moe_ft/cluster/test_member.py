"""A rank learns in a round who was replaced and where the loop is.

The simulation of repairs has rounds that break, and what replacements do in them.
"""

import pytest
import torch.distributed as dist

from moe_ft.cluster.member import (
    Done,
    Member,
    Standing,
    become_member,
    own_launch,
    own_member,
    retire_own,
    round_of,
)
from moe_ft.cluster.rounds import Entry
from moe_ft.errors import RepairError
from moe_ft.launches import launch_of
from tests.unit.fault_tolerance.repair.members import position_at, survivor
from tests.unit.signed import LookedAt, member_of


@pytest.fixture
def store() -> dist.Store:
    """Return a store in which rank 1 of three has died in round 0."""
    found = dist.HashStore()
    member_of(1, 3, found, died_s=5.0, hung_s=2.0).take_place()
    return found


def survivor_of(store: dist.Store, iteration: int) -> Member:
    """Return rank 0, in an iteration."""
    member = member_of(0, 3, store)
    member.position = position_at(iteration)
    return member


def test_survivor_tells_where_its_loop_is_and_learns_who_is_replaced(store: dist.Store) -> None:
    member = survivor_of(store, 4)
    member.rounds.join(1, survivor(2, 4))
    assert (member.standing, member.round) == (Standing.SURVIVOR, 0)
    found = member.meet()
    assert (member.round, found.number, found.dead_ranks, found.died_s) == (1, 1, (1,), 5.0)
    assert found.hung_s == {1: 2.0}
    assert found.positions == [position_at(4)], "that of both survivors"


def test_replacement_begins_at_the_latest_iteration_of_the_survivors() -> None:
    found = round_of(1, [survivor(0, 4), Entry(rank=1, died_s=5.0), survivor(2, 5)])
    assert found.survivors_position == position_at(5)


def test_replacement_begins_with_the_least_that_survivors_had_done() -> None:
    def done_of(*done: Done) -> int:
        entries = [survivor(rank, 4, done=each) for rank, each in enumerate(done)]
        return round_of(1, entries).survivors_position.done

    assert done_of(Done.LOG, Done.STEP) == Done.STEP
    assert done_of(Done.STEP, Done.NOTHING) == Done.NOTHING
    assert done_of(Done.EVALUATING, Done.LOG) == Done.LOG


def test_members_that_do_not_fit_together_do_not_meet(store: dist.Store) -> None:
    with pytest.raises(RepairError, match="all ranks have died: nothing is left to repair"):
        round_of(1, [Entry(rank=1, died_s=5.0)])
    member = survivor_of(store, 4)
    member.rounds.join(1, survivor(2, 4, done=Done.EVALUATING))
    with pytest.raises(RepairError, match="some ranks were in an evaluation, and others were not"):
        member.meet()


def test_rank_of_a_lost_node_joins_the_round_of_its_loss_and_one_that_dies_there_a_later_one() -> (
    None
):
    store = dist.HashStore()
    rounds = member_of(0, 2, store).rounds
    assert rounds.declare_lost([1]) == 1
    first = member_of(1, 2, store, round=1, died_s=4.0, node="spare", lost_node="lost", host_rank=0)
    first.take_place()
    first.link.note_hang(3.0)
    second = first.replacement(7.0)
    assert second.assignment.host_rank == 0
    second.connect(LookedAt(store))
    second.take_place()
    assert (first.round, second.round) == (1, 2)
    rounds.join(1, survivor(0, 4))
    rounds.join(2, survivor(0, 4))
    by_round = [round_of(number, rounds.wait_for_all(number, 0.0)) for number in (1, 2)]
    assert [each.taken_over for each in by_round] == [{"lost": "spare"}, {}]
    assert [(each.died_s, each.hung_s) for each in by_round] == [(4.0, {}), (7.0, {1: 3.0})]


def test_process_that_is_to_end_retires_the_member_that_it_is() -> None:
    assert own_member() is None
    retire_own()  # it is none: nothing to do
    member = member_of(start=3, begun_from=2)
    member.link.arm()
    become_member(member)
    try:
        assert own_member() is member
        assert (own_launch().start, own_launch().begun_from) == (3, 2)
        retire_own()
        assert not member.link.is_armed
        member.link.arm()  # its training thread does not know yet
        assert not member.link.is_armed
    finally:
        become_member(None)
    assert own_launch() == launch_of({})
