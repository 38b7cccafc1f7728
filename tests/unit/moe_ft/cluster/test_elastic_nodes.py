"""Elastic jobs: all ranks begin again on the nodes that are left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cluster import nodes, roster
from moe_ft.cluster.rounds import MOST_UNFINISHED, Rounds
from tests.unit.moe_ft.cluster.node_job import Job


def elastic_job(**changes: Any) -> Job:
    """Return an elastic job of two to four nodes, of which all are there and train."""
    job = Job(num_nodes=4, fewest=2, **changes)
    for number in range(4):
        job.come(f"host{number}", number)
    Rounds(job.store, 0, 4).finish(0)
    job.orders()
    return job


def test_elastic_job_begins_again_on_the_nodes_that_are_left_and_when_one_comes(
    advance: Callable[[float], None], tmp_path: Path
) -> None:
    job = elastic_job(status=tmp_path / "status")
    job.lose("host1")
    assert job.orders() == {"host0": [(1, 3, [0])], "host2": [(1, 3, [1])], "host3": [(1, 3, [2])]}
    job.come("host5", 5)
    assert not any(job.orders().values()), "more may come"
    advance(roster.GATHER_S + 1)
    rounds = Rounds(job.starts[1], 0, 3)
    number = rounds.declare_lost(())
    job.coordinator.step()
    assert not any(job.orders().values()), "a repair is not finished"
    rounds.finish(number)
    job.coordinator.step()
    expected = {name: [(2, 4, [rank])] for rank, name in enumerate(job.seats)}
    assert job.orders() == expected
    assert (tmp_path / "status").read_text().split() == ["-", "host0", "host2", "host3", "host5"]
    for seat in job.seats.values():
        seat.beat(0, start=2)
    job.coordinator.step()
    assert job.coordinator.over == 0


def test_job_that_has_ended_does_not_begin_again(advance: Callable[[float], None]) -> None:
    job = elastic_job()
    job.lose("host1")
    Rounds(job.starts[1], 0, 3).finish(0)
    Rounds(job.starts[1], 0, 3).note_end()
    job.come("host5", 5)
    job.orders()
    advance(roster.GATHER_S + 1)
    job.coordinator.step()
    assert not any(job.orders().values())
    job.lose("host2")
    assert job.coordinator.over == 1
    assert not any(job.orders().values())


def test_spare_takes_over_in_place_before_an_elastic_job_gets_smaller() -> None:
    job = elastic_job()
    job.come("spare", 4)
    job.lose("host3")
    assert job.orders()["spare"] == [(0, 4, [3])] and job.coordinator.over is None
    job = elastic_job()
    job.come("spare", 4)
    Rounds(job.store, 3, 4).note_waiting()
    job.lose("host3")
    assert not any(job.orders().values()), "nobody needs ranks that wait"
    for seat in job.seats.values():
        seat.beat(0)
    job.coordinator.step()
    assert job.coordinator.over == 0


@pytest.mark.parametrize(
    ("lost", "waits", "over"),
    [(["host0"], False, 1), (["host1", "host2", "host3"], False, 1), (["host1"], True, None)],
    ids=["node of the store", "too few left", "waits only if too few are left"],
)
def test_elastic_job_ends_if_too_few_nodes_are_left_or_that_of_the_store_is_not(
    lost: list[str], waits: bool, over: int | None
) -> None:
    job = elastic_job(waits=waits)
    job.lose(*lost)
    assert job.coordinator.over == over
    assert any(job.orders().values()) == (over is None)


def test_elastic_job_that_waits_for_a_node_begins_again_when_enough_are_there() -> None:
    job = elastic_job(waits=True)
    job.lose("host1", "host2", "host3")
    assert not any(job.orders().values())
    job.come("host4", 4)
    # In the place of one of the three, its ranks would wait for two other nodes.
    assert job.orders() == {"host0": [(1, 2, [0])], "host4": [(1, 2, [1])]}


def test_elastic_job_without_an_iteration_in_several_starts_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job(num_nodes=9, fewest=1)
    for number in range(9):
        job.come(f"host{number}", number)
    for number in range(1, 6):
        job.lose(f"host{number}")
    assert job.coordinator.over == 1
    assert capsys.readouterr().err.count("all ranks begin again") == MOST_UNFINISHED


def test_node_that_is_told_to_end_leaves_an_elastic_job_smaller(
    advance: Callable[[float], None],
) -> None:
    job = elastic_job()
    job.seats["host2"].leave()
    job.coordinator.step()
    advance(roster.GATHER_S + 0.5)
    job.coordinator.step()
    assert job.seats["host2"].is_lost() and not job.seats["host0"].is_to_save()
    del job.seats["host2"]
    assert job.orders()["host3"] == [(1, 3, [2])]


def test_elastic_job_starts_without_nodes_that_do_not_come(
    advance: Callable[[float], None],
) -> None:
    job = Job(num_nodes=3, fewest=2)
    job.come("host0", 0)
    job.come("host2", 2)
    assert job.orders() == {"host0": [(0, 3, [0])], "host2": [(0, 3, [2])]}
    advance(nodes._MISSING_S + 1)
    job.coordinator.step()
    assert job.orders() == {"host0": [(1, 2, [0])], "host2": [(1, 2, [1])]}


def test_failed_rank_ends_an_elastic_job_only_if_no_node_was_lost() -> None:
    job = elastic_job()
    for _ in range(2):
        for name, seat in job.seats.items():
            if name != "host3":
                seat.beat(1)
        job.coordinator.step()
        assert job.coordinator.over is None, "host3 may be lost"
    job.lose("host3")
    assert job.orders()["host0"] == [(1, 3, [0])]
    for seat in job.seats.values():
        seat.beat(1)  # of the ranks before
    job.coordinator.step()
    assert job.coordinator.over is None
    for _ in range(3):
        for seat in job.seats.values():
            seat.beat(1, start=1)
        job.coordinator.step()
    assert job.coordinator.over == 1


def test_node_that_falls_silent_after_its_rank_has_failed_holds_up_no_end() -> None:
    job = elastic_job()
    job.seats.pop("host2").beat(1)
    for _ in range(3):
        job.coordinator.step()
        for seat in job.seats.values():
            seat.beat(None)
    job.coordinator.step()
    assert job.coordinator.over == 1


def test_node_that_is_lost_while_all_ranks_save_begins_no_start_and_no_round() -> None:
    job = elastic_job()
    job.coordinator.tell()
    job.coordinator.step()
    job.lose("host3")
    assert not any(job.orders().values()) and not Rounds(job.store, 0, 4).is_declared(1)
    for seat in job.seats.values():
        seat.beat(0)
    job.coordinator.step()
    assert job.coordinator.over == 1, "what the lost node had is not saved"


def test_losses_of_nodes_that_come_are_counted_in_a_row_alone(
    advance: Callable[[float], None],
) -> None:
    job = elastic_job()
    job.lose("host3")
    for number in range(2 * MOST_UNFINISHED):
        start = 2 * number + 1
        Rounds(job.starts[start], 0, 3).finish(0)
        job.come("host3", 3)
        advance(roster.GATHER_S + 1)
        job.coordinator.step()
        job.lose("host3")
    assert job.coordinator.over is None
