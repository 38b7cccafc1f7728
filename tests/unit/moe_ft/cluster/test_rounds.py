"""Strangers who write to the store change no round, and many ranks cost it little.

How rounds begin, break and end is simulated (tests/simulation/repairs).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from moe_ft.cluster.rounds import Entry, RoundMark, Rounds
from moe_ft.errors import RepairError
from tests.unit.signed import signed


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


def test_each_replacement_is_told_and_each_position_of_survivors_once() -> None:
    store, size = signed(), 40
    for rank in range(size):
        died_s = 5.0 if rank in (16, 17, 18) else None
        entry = Entry(rank=rank, facts={"reads": rank % 8 == 0}, died_s=died_s)
        Rounds(store, rank, size).join(1, entry)
    for rank in (0, 1):
        entries = Rounds(store, rank, size).wait_for_all(1, 0.0)
        found = [(each.rank, each.facts["reads"], each.died_s) for each in entries]
        assert found[:2] == [(0, True, None), (1, False, None)]
        assert found[2:] == [(16, True, 5.0), (17, False, 5.0), (18, False, 5.0)]


def test_what_a_rank_reads_while_it_waits_and_meets_hardly_grows_with_their_number() -> None:
    read = []
    for world_size in (10, 1000):
        store: Any = _Counting()
        for rank in range(world_size):
            rounds = Rounds(signed(store), rank, world_size)
            rounds.join(1, Entry(rank=rank, facts={"iteration": 7, "samples": 123456789}))
        store.num_bytes = 0
        with pytest.raises(RepairError):
            rounds.wait_for_all(1, 0.0)
        assert store.num_bytes < 100, "it waits for rank 0"
        Rounds(signed(store), 0, world_size).wait_for_all(1, 0.0)
        store.num_bytes = 0
        assert [each.rank for each in rounds.wait_for_all(1, 0.0)] == [0]
        read.append(store.num_bytes)
    assert read[1] < read[0] + 50, "not the numbers of the ranks"


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
    assert (
        not first.has(RoundMark.TIMED_OUT, 1)
        and not first.is_declared(1)
        and not first.is_finished(1)
    )
    assert Rounds(store, 1, 2).join_for_dead(Entry(rank=1, died_s=5.5)) == 1
    assert first.is_declared(1) and not first.is_declared(2)
    with pytest.raises(RepairError, match=r"round 1 has not had all members .* \[0\] are missing"):
        first.wait_for_all(1, 0.0)
    first.join(1, Entry(rank=0))
    for rounds in (first, other):
        assert [each.died_s for each in rounds.wait_for_all(1, 0.0)] == [None, 5.5]
    with pytest.raises(RepairError, match="rank 0 says"):
        other.wait_until_ready(1, 0.0)
    first.wait_until_ready(1, 0.0)
    first.note(RoundMark.FINISHED, 1)
    assert other.is_finished(1)


def test_replacement_that_has_met_the_others_knows_where_training_is_and_no_other_does() -> None:
    store = signed()
    rounds, facts = Rounds(store, 0, 3), {"iteration": 7}
    assert rounds.declare_lost([1]) == 1
    rounds.join(1, Entry(rank=0, facts=facts))
    rounds.join(1, Entry(rank=1, died_s=4.0))
    assert Rounds(store, 2, 3).join_for_dead(Entry(rank=2, died_s=5.0)) == 1
    assert rounds.survivors(1) == {0}
    rounds.wait_for_all(1, 0.0)
    assert rounds.declare_lost([0]) == 2
    rounds.join(2, Entry(rank=1, died_s=4.0, facts=facts))
    assert rounds.survivors(2) == {1, 2}
    assert rounds.declare_lost([1], 2) == 3
    assert rounds.survivors(3) == {2}
    rounds.note(RoundMark.FINISHED, 3)
    assert rounds.survivors(3) == {0, 1, 2}
