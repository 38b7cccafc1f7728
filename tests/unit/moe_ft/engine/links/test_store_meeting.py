"""Ranks that say something in the job's store learn what the others have said, or stop waiting."""

import threading
from typing import Any

import pytest

from moe_ft.engine.links.signed_store import SignedStore, StoreMeeting, poll_s, within
from tests.unit.moe_ft.together import run_together
from tests.unit.signed import signed


def meeting(store: SignedStore, rank: int, world_size: int) -> StoreMeeting:
    return StoreMeeting(store, rank, world_size, least_poll_s=0.001)


def never(seconds: float) -> bool:
    return threading.Event().wait(seconds)


def test_all_learn_what_all_have_said() -> None:
    store = signed()

    def say(rank: int, gather: object) -> Any:
        return meeting(store, rank, 3).exchange("list", 10 * rank, 120.0, never)

    assert run_together(3, say) == [{0: 0, 1: 10, 2: 20}] * 3


def test_rank_that_nobody_joins_learns_what_there_is_in_time_and_nothing_if_it_gives_up() -> None:
    store = signed()
    assert meeting(store, 1, 3).exchange("list", "a", 0.0, never) == {1: "a"}
    assert meeting(store, 2, 3).exchange("list", "b", 120.0, lambda seconds: True) is None
    assert meeting(store, 0, 3).said("list") == {1: "a", 2: "b"}


def test_counter_that_a_stranger_has_raised_ends_no_wait() -> None:
    store = signed()
    store._store.add("list/count", 100)
    looks: list[float] = []

    def look_twice(seconds: float) -> bool:
        looks.append(seconds)
        return len(looks) == 2

    assert meeting(store, 0, 2).exchange("list", 1, 120.0, look_twice) is None
    assert looks == [0.001] * 2


def test_many_ranks_ask_the_store_less_often() -> None:
    assert (poll_s(8, 0.01), poll_s(10_000, 0.01)) == (0.01, 2.0)


def test_store_that_does_not_answer_is_given_up_in_time() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError, match="has not answered within 0.01 s"):
        within(0.01, lambda: end.wait(120.0))
    end.set()
    assert within(120.0, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(120.0, lambda: 1 // 0)
