"""Nodes that cannot be reached are named with the reason; clocks that differ are named too."""

import pytest

from moe_ft.doctor.network import (
    Peer,
    Trip,
    check_clocks,
    check_group,
    check_rates,
    check_reach,
    ping,
    reach_all,
    transfer,
)
from moe_ft.doctor.rows import Result
from tests.ports import free_port
from tests.unit.moe_ft.peer import HOST, TOKEN

MIB = 1 << 20


@pytest.fixture
def closed() -> tuple[str, int]:
    """Return an address at which nobody listens."""
    return HOST, free_port()


def test_nodes_that_answer_pass(address: tuple[str, int]) -> None:
    found = reach_all([Peer(node=f"n{number}", address=address) for number in range(1, 40)], TOKEN)
    (row,) = check_reach("n0", found)
    assert row.result is Result.PASS
    assert row.found.startswith("39 other nodes")


def test_lone_node_must_reach_itself(address: tuple[str, int]) -> None:
    (row,) = check_reach("n0", reach_all([Peer(node="n0", address=address)], TOKEN))
    assert (row.result, row.found) == (Result.PASS, "the only node; its own listener answers")


def test_nodes_that_do_not_answer_are_named(
    address: tuple[str, int], closed: tuple[str, int]
) -> None:
    peers = [
        Peer(node="n1", address=address),
        Peer(node="n2", address=closed),
        Peer(node="n3", address=None, problem="no such interface"),
    ]
    found = reach_all(peers, TOKEN)
    (row,) = check_reach("n0", found)
    assert row.result is Result.FAIL
    assert row.found.startswith(f"not n2, n3: {HOST}:{closed[1]}: ConnectionRefusedError")
    assert found["n3"] == "it cannot listen: no such interface"


@pytest.mark.parametrize(
    ("ahead_s", "trip_s", "result"),
    [
        (0.1, 0.01, Result.PASS),
        (-3.0, 0.01, Result.WARN),
        (3.0, 5.0, Result.PASS),
        (1000.0, 0.01, Result.FAIL),
        (-1000.0, 0.01, Result.FAIL),
    ],
)
def test_clock_counts_as_off_by_what_the_trip_does_not_explain(
    ahead_s: float, trip_s: float, result: Result
) -> None:
    near, far = Trip(round_trip_s=0.001, ahead_s=0.0), Trip(round_trip_s=trip_s, ahead_s=ahead_s)
    (row,) = check_clocks("n0", {"n1": near, "n2": far, "n3": "lost"})
    assert row.result is result
    assert f"n2 is {abs(ahead_s):.4f} s {'ahead of' if ahead_s > 0 else 'behind'} n0" in row.found


def test_rates_are_those_of_real_transfers(
    address: tuple[str, int], closed: tuple[str, int]
) -> None:
    peers = [Peer(node="n1", address=address), Peer(node="n2", address=closed)]
    good, bad = check_rates("n0", peers, TOKEN, 16 * MIB, 100 * MIB, 1e9)
    assert good.found.startswith("to n1: ")
    assert "replicas of a full snapshot take" in good.found
    assert bad.result is Result.FAIL
    assert bad.found.startswith("to n2: ConnectionRefusedError")


@pytest.mark.parametrize(
    ("own", "host", "environment", "result"),
    [
        ("10.0.0.1", "localhost", {}, Result.FAIL),
        ("10.0.0.1", "no-such-host.invalid", {}, Result.FAIL),
        ("10.0.0.1", "10.0.0.1", {}, Result.PASS),
        ("127.0.0.1", "localhost", {}, Result.PASS),
        ("localhost", "localhost", {}, Result.PASS),
        ("10.0.0.1", "localhost", {"GLOO_SOCKET_IFNAME": "lo"}, Result.PASS),
        ("10.0.0.1", "10.0.0.1", {"GLOO_SOCKET_IFNAME": "nosuch0"}, Result.FAIL),
    ],
)
def test_groups_need_an_interface_that_other_nodes_reach(
    own: str, host: str, environment: dict[str, str], result: Result
) -> None:
    (row,) = check_group("n0", own, environment, host)
    assert row.result is result


def test_clock_of_the_same_machine_is_not_off_by_more_than_the_trip(
    address: tuple[str, int],
) -> None:
    trip = ping(address, TOKEN)
    assert abs(trip.ahead_s) <= trip.round_trip_s / 2 + 0.001  # the wall clock may be adjusted


@pytest.mark.parametrize("num_bytes", [1, 20 * MIB])
def test_all_bytes_arrive(address: tuple[str, int], num_bytes: int) -> None:
    assert transfer(address, TOKEN, num_bytes, 1e9)[0] == num_bytes


def test_transfer_that_has_no_time_ends(address: tuple[str, int]) -> None:
    assert transfer(address, TOKEN, 1 << 40, 0.0)[0] == 0


def test_node_of_another_examination_is_refused(address: tuple[str, int]) -> None:
    with pytest.raises(ConnectionError, match="the token is wrong"):
        ping(address, "another")
