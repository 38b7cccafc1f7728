"""Work that a failure makes run again, and what frozen units save of it: by hand, and their bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.strategies.sparse.plan import WindowSize, frozen_s, measure_window, work_to_redo
from moe_ft.strategies.sparse.windows import PositionSizes, WindowCuts

SIX_EQUAL = PositionSizes(full=np.full((1, 6), 12), compute=np.full((1, 6), 2))


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


def test_saving_of_a_small_window_is_that_worked_out_by_hand() -> None:
    cuts = WindowCuts(ends=(1, 2, 3), largest_bytes=0)
    window = WindowSize(cuts=(cuts,), snapshots=(40, 50, 60), window_bytes=150, dense_bytes=120)
    # The replays have 7/8 and 4/8 of the work frozen, of which a third is saved.
    saved_s = frozen_s(window, 3.0, [np.array([1.0, 3.0, 4.0])])
    assert saved_s == pytest.approx(3 * (7 + 4) / 8 / 3)


def test_window_of_one_snapshot_has_nothing_frozen() -> None:
    assert frozen_s(measure_window([SIX_EQUAL], 1), 2.0, [np.ones(6)]) == 0


def test_slowest_stage_decides_what_frozen_units_save() -> None:
    window = measure_window([SIX_EQUAL, SIX_EQUAL], 2)
    late, early = np.array([0.0] * 5 + [1.0]), np.array([1.0] + [0.0] * 5)
    assert frozen_s(window, 1.0, [late, early]) == 0
    assert frozen_s(window, 1.0, [late, late]) == pytest.approx(1 / 3)


@given(st.lists(st.floats(0, 100), min_size=6, max_size=6), st.integers(1, 6))
def test_frozen_units_save_at_most_a_third_of_the_conversion(
    work: list[float], length: int
) -> None:
    saved_s = frozen_s(measure_window([SIX_EQUAL], length), 1.0, [np.array(work)])
    assert 0 <= saved_s <= (length - 1) / 3 + 1e-12
