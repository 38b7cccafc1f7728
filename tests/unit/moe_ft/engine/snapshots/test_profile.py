"""Sizes of snapshots that cost no time, and the time for which training stands still."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.snapshots.profile import NUM_QUIET_ITERATIONS, SnapshotProfile, Stall
from tests.unit.moe_ft.engine.stand_ins import ManualClock


def profile_of(
    snapshots: Sequence[tuple[int, float, float, float]],
    forward_backward_s: Sequence[float] = (0.6,) * 3,
    iteration_s: Sequence[float] = (1.0,) * 3,
) -> SnapshotProfile:
    """Return a profile that has measured snapshots (bytes, copy, commit and replicate seconds)."""
    profile = SnapshotProfile()
    for seconds in forward_backward_s:
        profile.note_forward_backward(seconds)
    for seconds in iteration_s:
        profile.note_iteration(seconds)
    for num_bytes, copy_s, commit_s, replicate_s in snapshots:
        profile.note(num_bytes, copy_s, commit_s, replicate_s)
    return profile


ONE = [(1000, 0.1, 0.2, 0.4)]


@pytest.mark.parametrize("count", range(NUM_QUIET_ITERATIONS))
def test_bytes_are_unknown_until_enough_iterations_were_measured(count: int) -> None:
    profile = profile_of(ONE, (0.6,) * count, (1.0,) * count)
    assert (profile.copied_bytes, profile.flow_bytes) == (None, None)


def test_copied_bytes_are_what_fits_into_forward_and_backward() -> None:
    assert profile_of(ONE).copied_bytes == pytest.approx(1000 / 0.1 * 0.6)


@pytest.mark.parametrize(
    ("snapshot", "slowest_s"),
    [((1000, 0.1, 0.2, 0.4), 0.4), ((1000, 0.1, 0.3, 0.0), 0.3), ((1000, 0.5, 0.3, 0.4), 0.5)],
)
def test_flow_is_limited_by_copy_commit_or_replication_whichever_takes_longest(
    snapshot: tuple[int, float, float, float], slowest_s: float
) -> None:
    assert profile_of([snapshot]).flow_bytes == pytest.approx(1000 / slowest_s)


def test_rates_of_commit_and_of_sending_are_measured_apart() -> None:
    profile = profile_of([(1000, 0.1, 0.2, 0.4)], iteration_s=(2.0,) * 3)
    profile.note_sent(300, 0.6)
    measured = profile.measured
    assert measured.committed_bytes == pytest.approx(1000 / 0.2 * 2)
    assert measured.sent_bytes == pytest.approx(300 / 0.6 * 2)
    assert (measured.copied_bytes, measured.flow_bytes) == (
        profile.copied_bytes,
        profile.flow_bytes,
    )


def test_one_slow_snapshot_and_one_slow_iteration_do_not_count() -> None:
    profile = profile_of(
        [*ONE, (1000, 9.0, 9.0, 9.0), *ONE], (0.6, 9.0, 0.6), iteration_s=(1.0, 9.0, 1.0)
    )
    assert profile.copied_bytes == pytest.approx(6000)
    assert profile.flow_bytes == pytest.approx(2500)


def test_snapshot_that_took_no_time_is_passed_over() -> None:
    profile = profile_of([(0, 0.0, 0.0, 0.0)])
    assert (profile.copied_bytes, profile.flow_bytes) == (None, None)


@settings(max_examples=50)
@given(st.integers(0, 10**9))
def test_snapshot_is_expected_to_hold_up_training_by_what_does_not_fit(num_bytes: int) -> None:
    profile = profile_of(ONE)
    expected = max(0.0, num_bytes / 10_000 - 0.6)
    assert profile.expected_stall_s(num_bytes) == pytest.approx(expected)


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


def test_time_until_an_exception_counts() -> None:
    clock = ManualClock()
    stall = Stall(clock)
    with pytest.raises(ValueError), stall.counting():
        clock.sleep(2.0)
        raise ValueError
    assert stall.take() == 2.0
