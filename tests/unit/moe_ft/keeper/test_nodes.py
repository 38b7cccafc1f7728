"""Ranks that nodes get as they come, and the end of nodes that are told to end."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ft.keeper import nodes
from moe_ft.keeper.node import PlannedEnd
from moe_ft.keeper.nodes import Coordinator, NodeSeat
from moe_ft.keeper.rounds import Rounds
from tests.unit.signed import signed

SAVING = ("train.py", "--exit-signal-handler", "--exit-signal", "SIGUSR1")


class Job:
    """Two nodes of one rank each, and their coordinator."""

    def __init__(self, status: Path | None = None) -> None:
        self.store = signed()
        self.coordinator = Coordinator(
            self.store,
            num_nodes=2,
            ranks_per_node=1,
            own_number=0,
            lost_after_s=1000,
            can_repair=True,
            waits=False,
            status=status,
        )

    def come(self, name: str, number: int) -> NodeSeat:
        seat = NodeSeat(self.store, name, number)
        self.coordinator.step()
        return seat


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the clock of the coordinator forward."""
    passed, now = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed[0])

    def add(seconds: float) -> None:
        passed[0] += seconds

    return add


def ranks(seat: NodeSeat) -> list[int]:
    return [rank for order in seat.new_orders() for rank in order.ranks]


def test_node_that_took_over_keeps_its_ranks_in_the_next_start(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("1\nhost0\nhost2\n")
    job = Job(status)
    seats = [job.come("host0", 0), job.come("host3", 1), job.come("host2", 2)]
    assert [ranks(seat) for seat in seats] == [[0], [], [1]]
    assert status.read_text().split() == ["-", "host0", "host2"]


def test_spare_gets_the_ranks_of_a_node_that_does_not_come(
    advance: Callable[[float], None],
) -> None:
    job = Job()
    spare, first = job.come("host2", 2), job.come("host0", 0)
    assert (ranks(first), ranks(spare)) == ([0], [])
    advance(nodes._MISSING_S + 1)
    late = job.come("host1", 1)
    assert (ranks(spare), ranks(late)) == ([], [1])
    job = Job()
    spare, first = job.come("host2", 2), job.come("host0", 0)
    advance(nodes._MISSING_S + 1)
    job.coordinator.step()
    late = job.come("host1", 1)
    assert (ranks(spare), ranks(late)) == ([1], [])


@pytest.mark.parametrize(
    ("told", "saves"),
    [([1], False), ([1, 2], True), ([0], True), ([2], False)],
    ids=["node", "node and spare", "node 0", "spare"],
)
def test_nodes_that_are_told_to_end_are_replaced_if_a_spare_stays(
    told: list[int], saves: bool, advance: Callable[[float], None]
) -> None:
    job = Job()
    seats = [job.come(f"host{number}", number) for number in range(3)]
    Rounds(job.store, 0, 2).finish(0)
    for number in told:
        seats[number].leave()
    job.coordinator.step()
    advance(nodes._GATHER_S + 0.5)
    job.coordinator.step()
    assert [seat.is_to_save() for seat in seats] == [saves] * 3
    assert [seat.is_lost() for seat in seats] == [not saves and n in told for n in range(3)]
    assert ranks(seats[2]) == ([1] if told == [1] else [])


def test_ranks_get_the_exit_signal_and_sigterm_in_time_to_leave_breakpoints() -> None:
    now = 0.0
    end = PlannedEnd(SAVING, 100, lambda: now)
    assert end.due_signal(False) is None and not end.is_new()
    end.tell()
    assert end.is_new() and not end.is_new()
    assert end.due_signal(False) is None  # a spare may take over
    assert end.due_signal(True) is signal.SIGUSR1
    assert end.due_signal(True) is None
    now = 60.0
    assert end.due_signal(True) is signal.SIGUSR1, "again: ranks that were starting have ignored it"
    now = 71.0
    assert [end.due_signal(True) for _ in range(2)] == [signal.SIGTERM, None]


@pytest.mark.parametrize(("words", "grace_s"), [(SAVING, 30), (SAVING[:1], 100)])
def test_ranks_that_cannot_save_get_sigterm_at_once(words: tuple[str, ...], grace_s: float) -> None:
    end = PlannedEnd(words, grace_s, lambda: 0.0)
    end.tell()
    assert "not enough" in end.describe()
    assert end.due_signal(True) is signal.SIGTERM
