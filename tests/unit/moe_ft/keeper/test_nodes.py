"""Ranks that nodes get as they come, and the end of nodes that are told to end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.keeper import nodes, roster
from moe_ft.keeper.roster import PlayedSlots
from moe_ft.keeper.rounds import MOST_UNFINISHED, Rounds
from tests.unit.moe_ft.keeper.node_job import Job, ranks


def test_node_that_took_over_keeps_its_ranks_in_the_next_start(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("1\nhost0\nhost2\n")
    job = Job(status)
    there = [job.come("host0", 0), job.come("host3", 1), job.come("host2", 2)]
    assert [ranks(seat) for seat in there] == [[0], [], [1]]
    assert status.read_text().split() == ["-", "host0", "host2"]


@pytest.mark.parametrize(
    ("before", "names", "soon", "later"),
    [
        ("hhh", "hhh", [[0], [1], [2]], [[], [], []]),
        ("ab", "ba", [[0], [1]], [[], []]),
        ("abc", "xzy", [[0], [1], [2]], [[], [], []]),
        ("abc", "azy", [[0], [], []], [[], [1], [2]]),
        ("abc", "acb", [[0], [2], [1]], [[], [], []]),
        ("abcd", "axdy", [[0], [], [3], []], [[], [1], [], [2]]),
    ],
    ids=["one host", "swapped", "all others", "others", "moved", "some others"],
)
def test_ranks_are_kept_for_nodes_of_the_last_start_that_may_come(
    before: str,
    names: str,
    soon: list[list[int]],
    later: list[list[int]],
    tmp_path: Path,
    advance: Callable[[float], None],
) -> None:
    status = tmp_path / "status"
    status.write_text("\n".join(["1", *before]))
    job = Job(status, len(before))
    there = [job.come(name, number) for number, name in enumerate(names)]
    found = [ranks(seat) for seat in there]
    advance(roster.GATHER_S + 1)
    job.coordinator.step()
    assert [at + ranks(seat) for at, seat in zip(found, there, strict=True)] == soon
    advance(nodes._MISSING_S + 1)
    job.coordinator.step()
    assert [ranks(seat) for seat in there] == later


def test_spare_gets_the_ranks_of_its_number_first(
    advance: Callable[[float], None], tmp_path: Path
) -> None:
    status = tmp_path / "status"
    status.write_text("1\na\nb\nc\n")
    job = Job(status, 3)
    there = {number: job.come("xyza"[number], number) for number in (3, 2, 0, 1)}
    advance(nodes._MISSING_S + 1)
    job.coordinator.step()
    assert {number: ranks(seat) for number, seat in there.items()} == {
        0: [0],
        1: [1],
        2: [2],
        3: [],
    }


def test_spare_gets_the_ranks_of_a_node_a_node_that_does_not_come(
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
    told: list[int],
    saves: bool,
    advance: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = Job()
    there = [job.come(f"host{number}", number) for number in range(3)]
    Rounds(job.store, 0, 2).finish(0)
    for number in told:
        there[number].leave()
    job.coordinator.step()
    advance(roster.GATHER_S + 0.5)
    job.coordinator.step()
    assert [seat.is_to_save() for seat in there] == [saves] * 3
    assert [seat.is_lost() for seat in there] == [not saves and n in told for n in range(3)]
    assert ranks(there[2]) == ([1] if told == [1] else [])
    said = {
        "1": "node host1 is lost: told to end",
        "12": "nodes host1, host2 are told to end, without a replacement: there are too few spares",
        "0": "node host0 is told to end, without a replacement: node host0 keeps the job's store",
        "2": "node host2 is lost: told to end",
    }
    assert said["".join(map(str, told))] in capsys.readouterr().err
    if saves:
        more = [job.come(f"host{number}", number) for number in (3, 4)]
        there[1].leave()
        more[1].leave()
        job.coordinator.step()
        advance(roster.GATHER_S + 0.5)
        job.coordinator.step()
        assert not any(seat.is_lost() for seat in there), "ranks that save are left alone"


# Two pipelines of two stages, and two of one whose groups have two ranks.
STAGES, GROUPS = [[[0], [1]], [[2], [3]]], [[[0, 1], [2, 3]]]


def playing_job(stages: Any = STAGES, num_spares: int = 0) -> tuple[Job, Rounds]:
    """Return a job whose four nodes have trained, and whose peers may play roles."""
    job = Job(num_nodes=4, can_play=True)
    for number in range(4 + num_spares):
        job.come(str(number), number)
    rounds = Rounds(job.store, 0, 4)
    rounds.finish(0, stages)
    return job, rounds


@pytest.mark.parametrize(
    ("stages", "num_spares", "lost", "absent"),
    [
        (STAGES, 0, [["3"]], [[3]]),
        (STAGES, 1, [["3"]], [[]]),
        (STAGES, 0, [["3"], ["1"]], [[3], [1, 3]]),
        (STAGES, 1, [["3", "2"]], [[2]]),
        (STAGES, 1, [["3"], ["2"]], [[], [2]]),
        (STAGES, 0, [["3"], ["2"]], [[3], None]),
        (STAGES, 0, [["2", "3"]], [None]),
        (STAGES, 0, [["0"]], [None]),
        (GROUPS, 0, [["2"], ["3"]], [[2], [2, 3]]),
        (GROUPS, 0, [["2"], ["1"]], [[2], None]),
        ([], 0, [["3"]], [None]),
    ],
)
def test_ranks_that_no_spare_takes_are_absent_while_each_stage_has_a_live_group(
    stages: list[list[list[int]]],
    num_spares: int,
    lost: list[list[str]],
    absent: list[list[int] | None],
) -> None:
    job, rounds = playing_job(stages, num_spares)
    found: list[list[int] | None] = []
    for number, names in enumerate(lost, 1):
        job.lose(*names)
        is_over = job.coordinator.over is not None
        found.append(None if is_over else sorted(rounds.absent(number)))
        if not is_over:
            assert sorted(rounds.replaced(number)) == sorted(map(int, names))
            rounds.finish(number)
            job.coordinator.step()
    assert found == absent


def test_node_that_comes_takes_the_ranks_whose_roles_are_played_once_an_iteration_is_finished() -> (
    None
):
    job, rounds = playing_job()
    job.lose("1")
    job.lose("3")
    seat = job.come("3", 3)
    assert ranks(seat) == []
    rounds.finish(2)
    job.coordinator.step()
    (order,) = seat.new_orders()
    assert (order.ranks, order.round, order.lost_node) == ((1,), 3, "1")
    assert rounds.replaced(3) == (1,) and rounds.absent(3) == {3}


def test_job_is_over_when_all_nodes_have_ended_that_are_not_absent() -> None:
    job, rounds = playing_job()
    there = list(job.seats.values())
    job.lose("3")
    for seat in there[:3]:
        assert job.coordinator.over is None
        seat.beat(0)
        job.coordinator.step()
    assert job.coordinator.over == 0


def test_all_ranks_save_when_the_store_is_told_to_end() -> None:
    job = Job()
    there = [job.come(f"host{number}", number) for number in range(3)]
    job.coordinator.tell()
    assert not any(seat.is_to_save() for seat in there)
    job.coordinator.step()
    assert all(seat.is_to_save() for seat in there)


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


def job_of_ranks_that_come_back() -> tuple[Job, Rounds, Any]:
    """Return a job whose last node takes its ranks back from peers, in round 2."""
    job, rounds = playing_job()
    job.lose("3")
    rounds.finish(1)
    return job, rounds, job.come("3", 3)


def test_node_whose_ranks_come_back_in_vain_leaves_the_others_training(
    advance: Callable[[float], None],
) -> None:
    job, rounds, seat = job_of_ranks_that_come_back()
    assert [order.round for order in seat.new_orders()] == [2]
    seat.beat(1)
    job.coordinator.step()
    assert (job.coordinator.over, seat.is_lost(), [*rounds.absent(3)]) == (None, True, [3])
    rounds.finish(3)
    again = job.come("3", 3)
    assert not again.new_orders(), "peers that train are left alone for a while"
    advance(100)
    job.coordinator.step()
    assert [order.round for order in again.new_orders()] == [4]


def test_node_whose_ranks_come_back_and_are_not_built_leaves_the_others_training(
    advance: Callable[[float], None],
) -> None:
    job, rounds, seat = job_of_ranks_that_come_back()
    advance(roster.BUILT_S - 1)
    job.coordinator.step()
    assert not seat.is_lost()
    advance(2)
    job.coordinator.step()
    assert (job.coordinator.over, seat.is_lost(), [*rounds.absent(3)]) == (None, True, [3])
    rounds.finish(3)
    again = job.come("3", 3)
    advance(100)
    job.coordinator.step()
    assert not again.new_orders(), "as much time again would be lost"
    advance(600)
    job.coordinator.step()
    assert [order.round for order in again.new_orders()] == [4]
    job.store.append("round_4/ready", {"rank": 3})
    advance(roster.BUILT_S + 1)
    job.coordinator.step()
    assert not again.is_lost(), "they are built, and restore their state"


def test_peers_play_the_roles_of_a_node_that_is_told_to_end(
    advance: Callable[[float], None],
) -> None:
    job, rounds = playing_job()
    job.seats["3"].leave()
    job.coordinator.step()
    advance(roster.GATHER_S + 0.5)
    job.coordinator.step()
    assert job.seats["3"].is_lost() and not job.seats["0"].is_to_save()
    assert rounds.absent(1) == {3}


def test_spares_go_first_where_a_stage_has_no_other_group() -> None:
    size, half = 32, 16
    stages = [[[stage], [stage + half]] for stage in range(half)]
    played = PlayedSlots(lambda *slots: tuple(sorted(slots)), is_allowed=True)
    lost = list(range(size))
    assert played.choose(lost, half, stages) == {*range(half)}
    assert played.choose(lost, half - 1, stages) == set()
    assert played.choose([0, 1, half], 1, stages) == {0, 1}
