"""Rounds of repairs: declared by a replacement, complete with all ranks, over with a finished iteration."""

from collections.abc import Callable
from itertools import count

import pytest
import torch.distributed as dist

from moe_ft.errors import RepairError
from moe_ft.keeper.rounds import MOST_UNFINISHED, Member, Rounds, declare


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def seconds() -> Callable[[], float]:
    """Return a clock that advances by a second each time it is read."""
    ticks = count()
    return lambda: float(next(ticks))


def test_replacement_declares_the_round_after_the_last_finished_one(store: dist.HashStore) -> None:
    rounds = Rounds(store, 2)
    assert rounds.last_finished() == 0
    assert not rounds.is_declared(1)
    assert declare(store, rank=1, world_size=2, died_s=5.5) == 1
    assert rounds.is_declared(1) and not rounds.is_declared(2)
    rounds.finish(1)
    rounds.finish(1)  # by another rank
    assert declare(store, rank=0, world_size=2, died_s=9.5) == 2


def test_death_in_a_round_breaks_it_and_declares_the_next_one(store: dist.HashStore) -> None:
    rounds = Rounds(store, 3)
    declare(store, rank=0, world_size=3, died_s=5.5)
    rounds.join(1, Member(rank=1))
    assert declare(store, rank=2, world_size=3, died_s=6.5) == 1, "its rank had not joined"
    assert rounds.has_joined(1, 2) and not rounds.has_joined(2, 2)
    assert declare(store, rank=1, world_size=3, died_s=7.5) == 2, "its rank had joined"
    for wait in (Rounds(store, 4).wait_for_all, rounds.wait_until_ready):
        with pytest.raises(RepairError, match="round 1 is broken: one of its ranks has died"):
            wait(1, 1000.0, seconds())
    assert declare(store, rank=0, world_size=3, died_s=8.5) == 2
    rounds.join(2, Member(rank=2, died_s=6.5))
    assert [each.died_s for each in rounds.wait_for_all(2, 2.0, seconds())] == [8.5, 7.5, 6.5]


def test_rounds_that_are_broken_again_and_again_end_the_job(store: dist.HashStore) -> None:
    Rounds(store, 2).finish(4)
    for _ in range(2):  # the second time after a round was finished
        finished = Rounds(store, 2).last_finished()
        for number in range(finished + 1, finished + 1 + MOST_UNFINISHED):
            assert declare(store, rank=1, world_size=2, died_s=5.5) == number
        with pytest.raises(
            RepairError, match="3 rounds of repairs were broken before an iteration"
        ):
            declare(store, rank=1, world_size=2, died_s=5.5)
        Rounds(store, 2).finish(finished + MOST_UNFINISHED)


def test_round_is_complete_when_all_ranks_have_joined(store: dist.HashStore) -> None:
    rounds = Rounds(store, 3)
    rounds.join(1, Member(rank=2, facts={"iteration": 7}))
    declare(store, rank=0, world_size=3, died_s=5.5)
    with pytest.raises(RepairError, match=r"ranks \[1\] have not come to round 1 within 2 s"):
        rounds.wait_for_all(1, 2.0, seconds())
    rounds.join(1, Member(rank=1, facts={"iteration": 7}))
    assert list(rounds.wait_for_all(1, 2.0, seconds())) == [
        Member(rank=0, died_s=5.5),
        Member(rank=1, facts={"iteration": 7}),
        Member(rank=2, facts={"iteration": 7}),
    ]


def test_rank_that_is_never_ready_ends_the_wait(store: dist.HashStore) -> None:
    with pytest.raises(RepairError, match="1 ranks were not ready for round 3 within 2 s"):
        Rounds(store, 2).wait_until_ready(3, 2.0, seconds())
    Rounds(store, 2).wait_until_ready(3, 2.0, seconds())  # the second rank


def test_many_ranks_ask_the_store_less_often(store: dist.HashStore) -> None:
    assert Rounds(store, 10_000).poll_s > Rounds(store, 8).poll_s
