"""Time for which training stands still."""

import pytest

from moe_ft.engine.snapshots.profile import Stall
from tests.unit.moe_ft.engine.clocks import ManualClock


def test_time_of_blocks_and_of_functions_is_added_up_until_it_is_taken() -> None:
    clock = ManualClock()
    stall = Stall(clock)
    with stall.counting():
        clock.sleep(2.0)
    clock.sleep(100.0)
    assert stall.count(lambda: clock.sleep(0.5)) is None
    assert stall.seconds == 2.5
    assert stall.take() == 2.5
    assert stall.take() == 0.0


def test_function_returns_its_answer() -> None:
    assert Stall(ManualClock()).count(lambda: 7) == 7


def test_time_until_an_exception_counts() -> None:
    clock = ManualClock()
    stall = Stall(clock)
    with pytest.raises(ValueError), stall.counting():
        clock.sleep(2.0)
        raise ValueError
    assert stall.take() == 2.0
