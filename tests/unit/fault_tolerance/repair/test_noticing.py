"""An exception begins a repair if a rank has died, as soon as the store says so."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from megatron.fault_tolerance.repair import noticing as noticings
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.membership import Membership
from megatron.fault_tolerance.repair.noticing import Noticing
from megatron.fault_tolerance.repair.watcher import Watcher
from moe_ft.errors import SnapshotError
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Rounds, declare
from tests.unit.signed import signed

CLOSED = RuntimeError("Connection closed by peer\nand where that was")


class Rank:
    """Rank 0 of two, in round 0, that can be replaced."""

    def __init__(self) -> None:
        self.store, self.links, self.link = signed(), Links(), Link()
        self.link.arm()
        self.rounds = Rounds(self.store, 0, 2)
        membership = Membership(self.link, self.rounds, None)
        watcher = Watcher(Rounds(self.store, 0, 2), self.links, self.link)
        self.noticing = Noticing(self.link, self.rounds, membership, watcher, self.links)

    def lose_the_other(self) -> None:
        """Have the replacement of rank 1 declare the next round."""
        declare(self.store, rank=1, world_size=2, died_s=5.0)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    yield Rank()


def during(rank: Rank, act: Callable[[], Any]) -> threading.Thread:
    """Act once the rank has looked into the store in vain."""
    has_looked = threading.Event()
    is_declared = rank.rounds.is_declared

    def look(number: int) -> bool:
        found = is_declared(number)
        has_looked.set()
        return found

    rank.rounds.is_declared = look  # type: ignore[method-assign]

    def run() -> None:
        assert has_looked.wait(60)
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_death_that_is_known_begins_a_repair_and_ends_the_connections(
    rank: Rank, capfd: pytest.CaptureFixture[str]
) -> None:
    rank.lose_the_other()
    before_s = time.time()
    phases = rank.noticing.notice(CLOSED)
    assert phases is not None
    phases.begin_with(before_s - 100)
    assert phases.seconds["notice"] >= 100
    assert not rank.links.is_open
    assert capfd.readouterr().err == (
        "moe_ft: rank 0 has left its iteration: a rank has died (Connection closed by peer)\n"
    )


@pytest.mark.parametrize("error", [CLOSED, SnapshotError("a copy failed")])
def test_news_of_a_death_may_come_after_the_exception(rank: Rank, error: Exception) -> None:
    thread = during(rank, rank.lose_the_other)
    assert rank.noticing.notice(error) is not None
    thread.join()


def test_no_news_are_awaited_after_an_exception_that_no_death_explains(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticings, "_NOTICE_S", 3600.0)
    assert rank.noticing.notice(ValueError("a mistake")) is None
    rank.lose_the_other()
    assert rank.noticing.notice(ValueError("a mistake")) is not None, "it is known"


def test_timeout_is_told_to_the_others_who_may_hang(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticings, "_NOTICE_S", 0.02)
    monkeypatch.setattr(noticings, "STUCK_S", 0.02)
    assert rank.noticing.notice(CLOSED) is None
    assert not rank.rounds.has_timed_out(1)
    assert rank.noticing.notice(RuntimeError("Timed out waiting 1000ms for recv")) is None
    assert rank.rounds.has_timed_out(1)
    assert rank.links.is_open


@pytest.mark.parametrize("error", [CLOSED, KeyboardInterrupt()])
def test_exception_without_a_death_is_raised_and_the_rank_is_not_replaced(
    rank: Rank, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticings, "_NOTICE_S", 0.02)
    with pytest.raises(type(error)):
        rank.noticing.notice_or_raise(error)
    assert not rank.link.is_armed


def test_exit_of_the_process_is_no_repair_even_if_a_rank_has_died(rank: Rank) -> None:
    rank.lose_the_other()
    with pytest.raises(SystemExit):
        rank.noticing.notice_or_raise(SystemExit(3))
    assert not rank.link.is_armed


def test_rank_that_has_died_begins_a_repair_and_this_one_can_still_be_replaced(rank: Rank) -> None:
    rank.lose_the_other()
    rank.noticing.notice_or_raise(CLOSED)
    assert rank.link.is_armed
