"""Time that sparse windows cost: stalls, lags and recoveries by hand, and their bounds."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.strategies.sparse.cost import Machine, ettr, expect_recovery, work_to_redo
from moe_ft.strategies.sparse.size import WindowSize, measure_window
from moe_ft.strategies.sparse.windows import PositionSizes, WindowCuts

SIX_EQUAL = PositionSizes(full=np.full((1, 6), 12), compute=np.full((1, 6), 2))
MACHINES = st.builds(
    lambda iteration_s, update_share, **rest: Machine(
        iteration_s=iteration_s, hidden_s=iteration_s * (1 - update_share), **rest
    ),
    iteration_s=st.floats(0.1, 10),
    update_share=st.floats(0, 0.9),
    bandwidth=st.floats(1, 1000),
    network_bandwidth=st.floats(1, 1000),
    replication_factor=st.integers(0, 3),
)
SNAPSHOTS = st.lists(st.integers(0, 2000), min_size=1, max_size=6)


def test_budget_is_what_the_slower_of_copy_and_replication_can_move() -> None:
    machine = Machine(iteration_s=2.0, hidden_s=1.5, bandwidth=100, network_bandwidth=120)
    assert machine.budget_bytes == 150
    assert replace(machine, replication_factor=1).budget_bytes == 150
    assert replace(machine, replication_factor=2).budget_bytes == 120


def test_stall_is_what_the_copy_takes_beyond_forward_and_backward() -> None:
    machine = Machine(iteration_s=2.0, hidden_s=1.5, bandwidth=100)
    assert machine.stalls_s([100, 150, 200, 350]) == pytest.approx([0, 0, 0.5, 2.0])
    assert machine.overhead([100, 150, 200, 350]) == pytest.approx(2.5 / 8)


@pytest.mark.parametrize(
    ("snapshots", "factor", "lag"),
    [
        ([50, 50], 1, 0),  # copied at 1.5, sent at 2, when the optimizer steps
        ([80, 80], 1, 1),  # copied at 1.8, sent at 2.6
        ([80, 10], 1, 0),  # copied at 1.1, when the first has 0.5 to go: sent at 1.7
        ([80, 80], 3, 4),  # the first is sent at 3.2, the second at 5.6
        ([80, 80], 0, 0),
        ([150], 0, 0),  # the optimizer waits for the copy
        ([150], 1, 2),  # 1.5 for the copy, for which the optimizer waits, and as long for the peer
    ],
)
def test_lag_is_the_iterations_until_peers_have_the_last_snapshot(
    snapshots: list[int], factor: int, lag: int
) -> None:
    machine = Machine(
        iteration_s=1.0,
        hidden_s=1.0,
        bandwidth=100,
        network_bandwidth=100,
        replication_factor=factor,
    )
    assert machine.lag_iterations(snapshots) == lag


@given(MACHINES, SNAPSHOTS)
def test_snapshots_within_the_budget_cost_no_time(machine: Machine, snapshots: list[int]) -> None:
    fitting = [min(size, math.floor(machine.budget_bytes)) for size in snapshots]
    assert max(machine.stalls_s(fitting)) == 0
    assert machine.overhead(fitting) == 0
    assert machine.lag_iterations(fitting) <= 1


def test_work_to_redo_is_one_and_a_half_windows_on_average() -> None:
    assert work_to_redo(3, 0) == (3, 4.5, 6)
    assert work_to_redo(3, 1) == (4, 6.0, 8)


@given(st.integers(1, 10), st.integers(0, 4))
def test_work_to_redo_is_what_failures_at_all_times_need(window: int, lag: int) -> None:
    period = window + lag  # a window begins when the one before it is complete
    needed = []
    for iterations in range(5 * period, 8 * period):
        newest = max(
            begin for begin in range(0, iterations, period) if begin + period <= iterations
        )
        needed.append(iterations - newest + 0.5)  # half of the one under way
    least, mean, most = work_to_redo(window, lag)
    assert mean == pytest.approx(sum(needed) / len(needed))
    assert least < min(needed)
    assert max(needed) < most


def test_recovery_of_a_small_window_is_that_worked_out_by_hand() -> None:
    cuts = WindowCuts(ends=(1, 2, 3), largest_bytes=0)
    window = WindowSize(cuts=(cuts,), snapshots=(40, 50, 60), window_bytes=150, dense_bytes=120)
    machine = Machine(
        iteration_s=3.0, hidden_s=3.0, bandwidth=50, network_bandwidth=30, replication_factor=1
    )
    recovery = expect_recovery(window, machine, [np.array([1.0, 3.0, 4.0])], 20.0)
    # Sent at 2.13, 5.67 and 9.2, the optimizer steps at 9: a lag of 1, and 6 iterations.
    assert machine.lag_iterations(window.snapshots) == 1
    assert recovery.restart_s == 20
    assert recovery.restore_s == 5  # from a peer
    assert recovery.conversion_s == 6
    assert recovery.redo_s == 12
    assert recovery.expected_s == 43
    # The replays have 7/8 and 4/8 of the work frozen, of which a third is saved.
    assert recovery.frozen_s == pytest.approx(3 * (7 + 4) / 8 / 3)


def test_window_is_read_from_own_memory_without_replicas() -> None:
    window = measure_window([SIX_EQUAL], 3)
    machine = Machine(iteration_s=1.0, hidden_s=1.0, bandwidth=42, network_bandwidth=1)
    recovery = expect_recovery(window, machine, [np.ones(6)], 0.0)
    assert recovery.restore_s == 2


def test_dense_window_needs_no_conversion() -> None:
    window = measure_window([SIX_EQUAL], 1)
    machine = Machine(iteration_s=2.0, hidden_s=2.0, bandwidth=72)
    recovery = expect_recovery(window, machine, [np.ones(6)], 0.0)
    assert (recovery.conversion_s, recovery.frozen_s, recovery.redo_s) == (0, 0, 3)


def test_slowest_stage_decides_what_frozen_units_save() -> None:
    window = measure_window([SIX_EQUAL, SIX_EQUAL], 2)
    machine = Machine(iteration_s=1.0, hidden_s=1.0, bandwidth=72)
    late, early = np.array([0.0] * 5 + [1.0]), np.array([1.0] + [0.0] * 5)
    both = expect_recovery(window, machine, [late, early], 0.0)
    assert both.frozen_s == 0
    assert expect_recovery(window, machine, [late, late], 0.0).frozen_s == pytest.approx(1 / 3)


@given(st.lists(st.floats(0, 100), min_size=6, max_size=6), st.integers(1, 6))
def test_frozen_units_save_at_most_a_third_of_the_conversion(
    work: list[float], length: int
) -> None:
    window = measure_window([SIX_EQUAL], length)
    machine = Machine(iteration_s=1.0, hidden_s=1.0, bandwidth=1.0)
    recovery = expect_recovery(window, machine, [np.array(work)], 0.0)
    assert 0 <= recovery.frozen_s <= recovery.conversion_s / 3 + 1e-12


def test_ettr_is_the_product_of_overhead_and_recovery() -> None:
    assert ettr(0.0, 0.0, 600) == 1
    assert ettr(0.25, 200, 600) == pytest.approx(0.8 * 0.75)
