"""Ranks that nodes get as they come, and the end of nodes that are told to end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cluster import nodes, roster
from moe_ft.cluster.roster import ARRIVED, NodeSeat, PlayedSlots, of_node
from moe_ft.cluster.rounds import Rounds
from tests.unit.moe_ft.cluster.node_job import Job, ranks


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


def test_node_and_order_that_are_said_again_count_once() -> None:
    job = Job()
    first = job.come("a", 0)
    job.store.append(ARRIVED, {"id": first.id, "name": "a", "number": 1})
    job.coordinator.step()
    assert [each.name for each in job.coordinator._nodes] == ["a"]
    orders = of_node(first.id, "orders")
    assert ranks(first) == [0]
    job.store.append(orders, *job.store.values(orders))
    assert ranks(first) == []


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
    assert not seat.is_lost(), "others have not come, and nobody waits for these"
    job.store.set("round_2/all_members", True)
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


@pytest.mark.parametrize(
    ("rooms", "taker"), [((10, 100), 3), ((100, 10), 2), ((10, 10), None), ((None, 10), 2)]
)
def test_ranks_go_to_a_spare_that_has_room_and_without_one_the_job_ends_as_without_spares(
    rooms: tuple[int | None, ...], taker: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(waits=False)
    there = [job.come(f"host{number}", number) for number in range(2)]
    Rounds(job.store, 0, 2).finish(0)
    there[0].beat(None, used_bytes=50)
    there[1].beat(None, used_bytes=40)
    job.coordinator.step()
    for number, room in enumerate(rooms, 2):
        facts = {} if room is None else {"room_bytes": room}
        job.seats[f"host{number}"] = NodeSeat(job.store, f"host{number}", number, **facts)
    job.coordinator.step()
    job.lose("host1")
    found = {number: ranks(job.seats[f"host{number}"]) for number in (2, 3)}
    assert found == {number: [1] if number == taker else [] for number in (2, 3)}
    said = capsys.readouterr().err
    assert "node host3 is a spare (has room for " in said
    assert (job.coordinator.over == 1) == (taker is None)
    few = "; node host2 (has room for 10 B of 50 B) is too small; node host3 (has room for 10 B"
    assert (few in said) == (taker is None)


def test_spare_that_gets_room_takes_the_ranks_that_wait_for_it() -> None:
    job = Job(waits=True)
    there = [job.come(f"host{number}", number) for number in range(3)]
    Rounds(job.store, 0, 2).finish(0)
    there[0].beat(None, used_bytes=50)
    there[2].beat(None, room_bytes=49)
    job.coordinator.step()
    job.lose("host1")
    assert ranks(there[2]) == []
    there[2].beat(None, room_bytes=50)
    job.coordinator.step()
    job.coordinator.step()
    assert ranks(there[2]) == [1]


@pytest.mark.parametrize(
    ("dead", "num_nodes", "lost"),
    [("01", 4, 1), ("10", 4, 1), ("12 23", 5, 2), ("1>2", 4, None), ("01", 3, None)],
    ids=["of the store", "in the other order", "most", "one end alone", "no spare"],
)
def test_one_end_of_a_link_that_both_ends_miss_is_replaced_if_a_spare_can(
    dead: str, num_nodes: int, lost: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(num_nodes=3 if num_nodes < 5 else 4)
    there = [job.come(f"host{number}", number) for number in range(num_nodes)]
    Rounds(job.store, 0, 4).finish(0)
    unreached: dict[int, list[str]] = {number: [] for number in range(num_nodes)}
    for pair in dead.split():
        one, other = int(pair[0]), int(pair[-1])
        unreached[one].append(there[other].id)
        if ">" not in pair:
            unreached[other].append(there[one].id)
    for _ in range(2):
        for number, seat in enumerate(there):
            if not seat.is_lost():
                seat.beat(None, unreached=unreached[number])
        job.coordinator.step()
    assert [seat.is_lost() for seat in there] == [number == lost for number in range(num_nodes)]
    assert job.coordinator.over is None
    said = capsys.readouterr().err
    assert said.count("it does not reach node") == (dead != "1>2")
    if lost is None and dead != "1>2":
        assert "node host1 stays: it does not reach node host0, and both reach the job's" in said
        assert "no spare is left (--moe-ft-spare restart)" in said
