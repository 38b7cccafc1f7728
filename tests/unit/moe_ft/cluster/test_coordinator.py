"""Driver of the law: silence, values of the store and clocks in; orders, rounds and the file of names out.

What is decided is in tests/cluster.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cluster import law, roster
from moe_ft.cluster.coordinator import policy_of
from moe_ft.cluster.failures import Reported
from moe_ft.cluster.options import KeepOptions
from moe_ft.cluster.roster import ARRIVED, Order, of_node
from moe_ft.cluster.rounds import RoundMark, Rounds
from moe_ft.cluster.target import Target
from moe_ft.verdicts import Failure, FailureKind
from tests.unit.moe_ft.cluster.node_job import Job, ranks

Advance = Callable[[float], None]


def job_that_trains(num_nodes: int = 2, num_spares: int = 0, **policy: Any) -> tuple[Job, Rounds]:
    job = Job(num_nodes=num_nodes, **policy)
    for number in range(num_nodes + num_spares):
        job.come(f"host{number}", number)
    rounds = Rounds(job.store, 0, num_nodes)
    rounds.note(RoundMark.FINISHED, 0)
    job.coordinator.step()
    for seat in job.seats.values():
        seat.new_orders()
    return job, rounds


def beat_but(job: Job, *silent: str, advance: Advance) -> None:
    """Have time pass in which some nodes are silent, until they are lost."""
    for _ in range(1001):
        advance(1.0)
        for name, seat in job.seats.items():
            if name not in silent:
                seat.beat(None)
        job.coordinator.step()


def test_silent_node_is_replaced_in_a_round_of_its_own(advance: Advance) -> None:
    job, rounds = job_that_trains(num_spares=1)
    beat_but(job, "host1", advance=advance)
    assert [job.seats[f"host{number}"].is_lost() for number in range(3)] == [False, True, False]
    (order,) = job.seats["host2"].new_orders()
    assert (order.ranks, order.round, order.lost_node, order.num_nodes) == ((1,), 1, "host1", 2)
    assert order.died_s > 0 and rounds.dead_ranks(1) == (1,)


def test_silence_makes_a_node_lost_sooner_where_ranks_have_lost_connections(
    advance: Advance,
) -> None:
    job, rounds = job_that_trains(num_spares=1)
    rounds.note(RoundMark.SUSPECTED, 1)
    for _ in range(4):
        advance(1.0)
        for name in ("host0", "host2"):
            job.seats[name].beat(None)
        job.coordinator.step()
    assert job.seats["host1"].is_lost()


def test_suspicion_is_counted_in_beats_which_are_rare_in_a_large_job(
    advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "poll_s", lambda world_size, least_s: 3.3)  # of 2,048 nodes
    job, rounds = job_that_trains(num_spares=1)
    rounds.note(RoundMark.SUSPECTED, 1)
    for _ in range(3):
        for _ in range(3):
            advance(1.0)
            job.coordinator.step()
        for seat in job.seats.values():
            seat.beat(None)
        job.coordinator.step()
    assert not any(seat.is_lost() for seat in job.seats.values())


def test_node_is_lost_when_two_miss_it_that_beat_and_it_does_not(advance: Advance) -> None:
    job, _ = job_that_trains(num_spares=1)
    seats = job.seats
    for silent_s in (0.5, 0.5, 0.5):
        for name in ("host0", "host2"):
            seats[name].beat(None, missed=[seats["host1"].id] * (name == "host0"))
        advance(silent_s)
        job.coordinator.step()
    assert not seats["host1"].is_lost(), "one alone misses it"
    seats["host0"].beat(None)  # without news of whom it misses
    seats["host2"].beat(None, missed=[seats["host1"].id])
    job.coordinator.step()
    assert not seats["host1"].is_lost(), "host0 misses it no more"
    seats["host0"].beat(None, missed=[seats["host1"].id])
    job.coordinator.step()
    assert seats["host1"].is_lost() and ranks(seats["host2"]) == [1]


@pytest.mark.parametrize("silent", ["host0", "host2"])
def test_word_of_a_node_that_does_not_beat_counts_for_nothing(
    silent: str, advance: Advance
) -> None:
    job, _ = job_that_trains(num_spares=1)
    seats = job.seats
    for seat in seats.values():
        seat.beat(None, missed=[seats["host1"].id])
    job.coordinator.step()
    for _ in range(6):
        advance(0.5)
        for name in {"host0", "host2"} - {silent}:
            seats[name].beat(None, missed=[seats["host1"].id])
        job.coordinator.step()
    assert not seats["host1"].is_lost()


def test_each_node_is_told_whom_to_watch_as_nodes_come_and_are_lost(advance: Advance) -> None:
    job = Job(num_nodes=5)
    for number in range(5):
        job.come(f"host{number}", number, watch=["10.0.0.1", number])
    order = sorted(job.seats.values(), key=lambda seat: seat.id)

    def ports() -> list[list[int]]:
        return [[port for _, _, port in seat.watched()] for seat in order]

    own = [int(name[-1]) for seat in order for name in job.seats if job.seats[name] is seat]
    assert ports() == [[own[(place + each) % 5] for each in (1, 2, 3)] for place in range(5)]
    rounds = Rounds(job.store, 0, 5)
    rounds.note(RoundMark.FINISHED, 0)
    spare = job.come("host5", 5)  # whose system tells nothing
    assert all(len(seat.watched()) in (2, 3) for seat in order) and len(spare.watched()) == 3
    lost = next(name for name, seat in job.seats.items() if seat is order[0])
    beat_but(job, lost, advance=advance)
    assert order[0].is_lost()
    assert own[0] not in {port for seat in order[1:] for _, _, port in seat.watched()}


def test_own_stop_is_held_against_no_node(advance: Advance) -> None:
    job, _ = job_that_trains(num_spares=1)
    advance(5000.0)
    job.coordinator.step()
    assert not job.seats["host1"].is_lost()


def test_ranks_that_a_host_had_for_a_lost_node_end_before_another_node_gets_them(
    advance: Advance,
) -> None:
    job, rounds = job_that_trains(num_nodes=3, without_spare="crowd")
    beat_but(job, "host2", advance=advance)
    host = job.seats["host0"]
    found = [(order.ranks, order.round, order.host) for order in host.new_orders()]
    assert found == [((2,), 1, 0)]
    del job.seats["host2"]
    spare = job.come("host3", 3)
    assert not host.new_orders() and not spare.new_orders()
    rounds.note(RoundMark.FINISHED, 1)
    job.coordinator.step()
    assert host.new_orders() == [Order(ends=(2,), round=1, num_nodes=3)]
    (order,) = spare.new_orders()
    assert (order.ranks, order.round, order.lost_node, order.host) == ((2,), 2, "host0", None)
    assert rounds.dead_ranks(2) == (2,)


def test_start_has_values_of_its_own_and_forgets_how_ranks_have_ended(advance: Advance) -> None:
    job, _ = job_that_trains(num_nodes=3, max_restarts=1)
    for _ in range(3):
        for seat in job.seats.values():
            seat.beat(1)
        job.coordinator.step()
    assert [[order.start for order in seat.new_orders()] for seat in job.seats.values()] == [
        [1]
    ] * 3
    assert job.coordinator.over is None and job.starts.keys() == {0, 1}
    for _ in range(3):
        for seat in job.seats.values():
            seat.beat(1, start=1)
        job.coordinator.step()
    assert job.coordinator.over == 1


def test_job_begins_again_only_after_all_nodes_were_heard_whose_ranks_run() -> None:
    job, _ = job_that_trains(num_nodes=3, max_restarts=1)
    for number in range(5):
        job.seats["host0"].beat(1)
        if number % 2:
            job.seats["host1"].beat(None)
        job.coordinator.step()
    assert job.coordinator.job.start == 0, "host2 may be lost, and that is why"
    for _ in range(2):
        job.seats["host2"].beat(None)
        job.coordinator.step()
    assert job.coordinator.job.start == 1


def test_nodes_that_are_told_to_end_are_gathered_and_replaced(advance: Advance) -> None:
    job, _ = job_that_trains(num_spares=1)
    job.seats["host1"].leave()
    job.coordinator.step()
    assert not job.seats["host1"].is_lost()
    advance(law.GATHER_S + 0.5)
    job.coordinator.step()
    assert job.seats["host1"].is_lost() and ranks(job.seats["host2"]) == [1]


def test_all_ranks_save_when_the_store_is_told_to_end_and_the_job_is_over_with_them() -> None:
    job, _ = job_that_trains()
    job.coordinator.tell()
    assert not any(seat.is_to_save() for seat in job.seats.values())
    job.coordinator.step()
    for seat in job.seats.values():
        assert seat.is_to_save() and seat.over() is None
        seat.beat(0)
    job.coordinator.step()
    assert [seat.over() for seat in job.seats.values()] == [(0, "")] * 2


def test_ranks_are_told_that_they_wait_for_a_spare(advance: Advance) -> None:
    job, rounds = job_that_trains(without_spare="wait")
    beat_but(job, "host1", advance=advance)
    assert rounds._waits_for_spare(1)
    del job.seats["host1"]
    assert ranks(job.come("host2", 2)) == [1]
    assert not rounds._waits_for_spare(1)


def test_missing_nodes_are_waited_for_and_their_ranks_given_away(
    tmp_path: Path, advance: Advance
) -> None:
    status = tmp_path / "status"
    status.write_text("1\nhost0\nhost2\n")
    job = Job(str(status))
    there = [job.come("host0", 0), job.come("host3", 1)]
    assert [ranks(seat) for seat in there] == [[0], []]
    assert status.read_text().split() == ["-", "host0", "host2"]
    advance(law.MISSING_S + 1)
    job.coordinator.step()
    assert ranks(there[1]) == [1]
    assert status.read_text().split() == ["-", "host0", "host3"]


def test_node_and_order_that_are_said_again_count_once() -> None:
    job = Job()
    first = job.come("a", 0)
    job.store.append(ARRIVED, {"id": first.id, "name": "a", "number": 1})
    job.coordinator.step()
    assert [each.name for each in job.coordinator.job.nodes.values()] == ["a"]
    orders = of_node(first.id, "orders")
    assert ranks(first) == [0]
    job.store.append(orders, *job.store.values(orders))
    assert ranks(first) == []


def test_facts_of_nodes_come_with_their_beats() -> None:
    job, _ = job_that_trains(num_nodes=3)
    spare = job.come("host3", 3, room_bytes=10)
    one, other = job.seats["host1"], job.seats["host2"]
    one.beat(None, used_bytes=50, unreached=[other.id])
    other.beat(None, unreached=[one.id])
    job.coordinator.step()
    assert not one.is_lost(), "the spare is too small"
    spare.beat(None, room_bytes=50)
    job.coordinator.step()
    assert one.is_lost() and ranks(spare) == [1]


@pytest.mark.parametrize(
    ("words", "fewest", "without"),
    [
        ("", "", "crowd"),
        ("--moe-ft-elastic", "2", "shrink"),
        ("--moe-ft-without-spare nonsense", "", "end"),
        ("--moe-ft-spare wait", "2", "wait"),
        ("--moe-ft-without-spare crowd", "2", "crowd"),
        ("--moe-ft-without-spare=share", "", "share"),
    ],
)
def test_policy_is_read_from_the_command_line(
    words: str, fewest: str, without: str, tmp_path: Path
) -> None:
    domains = tmp_path / "domains"
    domains.write_text("host0 rack0\n")
    given = ["--moe-ft-repair", "auto", "--moe-ft-failure-domain", str(domains), *words.split()]
    options = KeepOptions(
        target=Target(words=("train.py", *given)),
        num_nodes=3,
        ranks_per_node=4,
        number=3,
        fewest=int(fewest or 0),
        max_restarts=5,
    )
    policy = policy_of(options)
    assert policy.shape == (3, 4, int(fewest or 0))
    assert (policy.repair, policy.store, policy.max_restarts) == (True, 3, 5)
    assert (policy.without_spare, policy.domains) == (without, {"host0": "rack0"})


def test_reports_of_failures_come_before_exit_codes_in_each_start() -> None:
    job, _ = job_that_trains(max_restarts=9)
    failure = Failure(rank=1, kind=FailureKind.CODE, what="ValueError: X", iteration=3)
    for start in range(2):
        Reported(job.starts[start]).add(failure)
        job.seats["host1"].beat(1, start)
        job.coordinator.step()
        for seat in job.seats.values():
            for _ in range(2):  # all nodes live
                seat.beat(1 if seat is job.seats["host1"] else None, start)
                job.coordinator.step()
    assert job.coordinator.job.start == 1 and job.coordinator.over == 1
