"""Nodes tell each other the time and take bytes, if both know the token."""

import pytest

from moe_ft.doctor.network import ping, transfer
from tests.unit.moe_ft.peer import TOKEN

MIB = 1 << 20


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
