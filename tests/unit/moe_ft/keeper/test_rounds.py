"""Rounds of repairs: declared by a replacement, complete with all ranks, over with a finished iteration."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import pytest
import torch.distributed as dist

from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import RepairError
from moe_ft.keeper.rounds import MOST_UNFINISHED, Member, Rounds, declare
from tests.unit.signed import signed


@pytest.fixture
def store() -> SignedStore:
    return signed()


def seconds() -> Callable[[], float]:
    """Return a clock that advances by a second each time it is read."""
    ticks = count()
    return lambda: float(next(ticks))


def join(store: SignedStore, number: int, *ranks: int) -> None:
    """Have survivors join a round."""
    for rank in ranks:
        Rounds(store, rank, 3).join(number, Member(rank=rank, facts={"iteration": 7}))


def test_replacement_declares_the_round_after_the_last_finished_one(store: SignedStore) -> None:
    rounds = Rounds(store, 0, 2)
    assert rounds.is_finished(0) and not rounds.is_finished(1)
    assert not rounds.is_declared(1)
    assert declare(store, rank=1, world_size=2, died_s=5.5) == 1
    assert rounds.is_declared(1) and not rounds.is_declared(2)
    rounds.finish(1)
    rounds.finish(1)  # by another rank
    assert declare(store, rank=0, world_size=2, died_s=9.5) == 2


def test_death_in_a_round_breaks_it_and_declares_the_next_one(store: SignedStore) -> None:
    rounds = Rounds(store, 0, 3)
    declare(store, rank=0, world_size=3, died_s=5.5)
    join(store, 1, 1)
    assert declare(store, rank=2, world_size=3, died_s=6.5) == 1, "its rank had not joined"
    assert rounds.has_joined(1, 2) and not rounds.has_joined(2, 2)
    assert declare(store, rank=1, world_size=3, died_s=7.5) == 2, "its rank had joined"
    for wait in (Rounds(store, 1, 4).wait_for_all, Rounds(store, 1, 3).wait_until_ready):
        with pytest.raises(RepairError, match="round 1 is broken: one of its ranks has died"):
            wait(1, 1000.0, seconds())
    assert declare(store, rank=0, world_size=3, died_s=8.5) == 2
    rounds.join(2, Member(rank=2, died_s=6.5))
    assert [each.died_s for each in rounds.wait_for_all(2, 2.0, seconds())] == [8.5, 7.5, 6.5]


def test_rounds_that_are_broken_again_and_again_end_the_job(store: SignedStore) -> None:
    Rounds(store, 0, 2).finish(1)
    finished = 1
    for _ in range(2):  # the second time after a round was finished
        for number in range(finished + 1, finished + 1 + MOST_UNFINISHED):
            assert declare(store, rank=1, world_size=2, died_s=5.5) == number
        with pytest.raises(
            RepairError, match="3 rounds of repairs were broken before an iteration"
        ):
            declare(store, rank=1, world_size=2, died_s=5.5)
        finished += MOST_UNFINISHED
        Rounds(store, 0, 2).finish(finished)


def test_survivors_alone_declare_no_round(store: SignedStore) -> None:
    join(store, 1, 0, 1)
    assert not Rounds(store, 0, 3).is_declared(1)


def test_round_is_complete_when_all_ranks_have_joined(store: SignedStore) -> None:
    first, last = Rounds(store, 0, 3), Rounds(store, 2, 3)
    join(store, 1, 2)
    declare(store, rank=0, world_size=3, died_s=5.5)
    problem = "round 1 has not had all members within 2 s"
    with pytest.raises(RepairError, match=rf"{problem}: \[1\] are missing"):
        first.wait_for_all(1, 2.0, seconds())
    join(store, 1, 1)
    with pytest.raises(RepairError, match=f"{problem}: rank 0 says which are missing"):
        last.wait_for_all(1, 2.0, seconds())
    for rounds in (first, last):
        assert list(rounds.wait_for_all(1, 2.0, seconds())) == [
            Member(rank=0, died_s=5.5),
            Member(rank=1, facts={"iteration": 7}),
            Member(rank=2, facts={"iteration": 7}),
        ]


def test_rank_that_is_never_ready_ends_the_wait(store: SignedStore) -> None:
    with pytest.raises(RepairError, match=r"round 3 has not had all ready within 2 s: \[1\]"):
        Rounds(store, 0, 2).wait_until_ready(3, 2.0, seconds())
    store.append("round_3/ready", {"rank": 1})
    Rounds(store, 0, 2).wait_until_ready(3, 2.0, seconds())
    Rounds(store, 1, 2).wait_until_ready(3, 2.0, seconds())


def test_many_ranks_ask_the_store_less_often(store: SignedStore) -> None:
    assert Rounds(store, 0, 10_000).poll_s > Rounds(store, 0, 8).poll_s


class _Counting:
    """A store that counts the bytes that are read."""

    def __init__(self) -> None:
        self._store, self.num_bytes = dist.HashStore(), 0

    def compare_set(self, *words: str) -> bytes:
        found = self._store.compare_set(*words)
        self.num_bytes += len(found)
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def test_what_a_rank_reads_while_it_waits_and_meets_hardly_grows_with_their_number() -> None:
    read = []
    for world_size in (10, 1000):
        store = _Counting()
        for rank in range(world_size):
            rounds = Rounds(signed(store), rank, world_size)
            rounds.join(1, Member(rank=rank, facts={"iteration": 7, "samples": 123456789}))
        store.num_bytes = 0
        with pytest.raises(RepairError):
            rounds.wait_for_all(1, 2.0, seconds())
        assert store.num_bytes < 100, "it waits for rank 0"
        Rounds(signed(store), 0, world_size).wait_for_all(1, 2.0)
        store.num_bytes = 0
        assert len(rounds.wait_for_all(1, 2.0)) == world_size
        read.append(store.num_bytes)
    assert read[1] < read[0] + 5 * 1000, "the numbers of the ranks"


@pytest.fixture
def open_store() -> Iterator[dist.Store]:
    """Yield a store that lets strangers in."""
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


PLANTED: Sequence[tuple[str, str]] = (
    ("set", "round_1/timed_out"),
    ("set", "round_1/declared"),
    ("set", "round_2/declared"),
    ("append", "round_1/members"),
    ("set", "round_1/all_members"),
    ("append", "round_1/ready"),
    ("set", "round_1/all_ready"),
    ("set", "round_1/finished"),
)


@pytest.mark.parametrize("text", ["1", '{"rank": 1}\n', "\0"])
def test_stranger_who_writes_to_all_keys_beforehand_changes_no_round(
    open_store: dist.Store, text: str
) -> None:
    for operation, key in PLANTED:
        getattr(open_store, operation)(key, text)
        open_store.add(f"{key}/count", 100)
    store = signed(open_store)
    first, other = Rounds(store, 0, 2), Rounds(store, 1, 2)
    assert not first.has_timed_out(1) and not first.is_declared(1) and not first.is_finished(1)
    assert declare(store, rank=1, world_size=2, died_s=5.5) == 1
    assert first.is_declared(1) and not first.is_declared(2)
    with pytest.raises(RepairError, match=r"round 1 has not had all members .* \[0\] are missing"):
        first.wait_for_all(1, 2.0, seconds())
    first.join(1, Member(rank=0))
    for rounds in (first, other):
        assert [each.died_s for each in rounds.wait_for_all(1, 2.0, seconds())] == [None, 5.5]
    with pytest.raises(RepairError, match="rank 0 says"):
        other.wait_until_ready(1, 2.0, seconds())
    first.wait_until_ready(1, 2.0, seconds())
    first.finish(1)
    assert other.is_finished(1)
