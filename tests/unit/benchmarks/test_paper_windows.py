"""The printed algorithm is reproduced with its quirks, and windows.py is never worse."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paper_windows import (
    OperatorProfile,
    ScheduledSnapshot,
    find_window_size,
    generate_schedule,
)
from moe_ft.strategies.sparse.windows import PositionSizes, cut_window, snapshot_bytes


def profile_of(num_operators: int, budget_bytes: float) -> OperatorProfile:
    """Return operators of one parameter, 12 bytes at FULL and 2 at COMPUTE, and what PCIe can copy."""
    return OperatorProfile(
        num_operators=num_operators,
        iteration_s=1.0,
        compute_bytes=2,
        master_bytes=4,
        optimizer_bytes=8,
        pcie_bytes_per_s=budget_bytes,
    )


def sizes_of(profile: OperatorProfile, schedule: list[ScheduledSnapshot[int]]) -> list[int]:
    return [profile.checkpoint_bytes(len(each.active), len(each.frozen)) for each in schedule]


FIGURE_6 = profile_of(6, 32)
OPERATORS_OF_FIGURE_6 = ("E1", "E2", "E3", "E4", "NE", "G")


def test_window_of_figure_6_has_three_snapshots_of_two_active_operators() -> None:
    assert find_window_size(FIGURE_6) == (3, 2)


def test_schedule_of_figure_6_is_the_one_that_it_shows() -> None:
    schedule = generate_schedule(OPERATORS_OF_FIGURE_6, *find_window_size(FIGURE_6))
    assert schedule == [
        ScheduledSnapshot(active=("E1", "E2"), frozen=("E3", "E4", "NE", "G")),
        ScheduledSnapshot(active=("E3", "E4"), frozen=("NE", "G")),
        ScheduledSnapshot(active=("NE", "G"), frozen=()),
    ]


def test_snapshots_of_figure_6_save_the_paper_s_55_percent_and_more_of_a_dense_one() -> None:
    sizes = sizes_of(FIGURE_6, generate_schedule(range(6), *find_window_size(FIGURE_6)))
    assert sizes == [32, 28, 24]
    savings = [100 * (1 - size / FIGURE_6.checkpoint_bytes(6, 0)) for size in sizes]
    assert savings == pytest.approx([55.6, 61.1, 66.7], abs=0.05)


@given(st.integers(1, 80), st.integers(1, 1000))
def test_every_operator_is_active_once_and_frozen_in_the_snapshots_before(
    num_operators: int, budget: int
) -> None:
    profile = profile_of(num_operators, budget)
    schedule = generate_schedule(range(num_operators), *find_window_size(profile))
    active = [operator for each in schedule for operator in each.active]
    assert active == list(range(num_operators))
    for index, each in enumerate(schedule):
        later = [operator for other in schedule[index + 1 :] for operator in other.active]
        assert list(each.frozen) == later


@given(st.integers(1, 80), st.integers(1, 1000))
def test_window_cut_by_bytes_is_no_larger_than_the_printed_one_of_the_same_length(
    num_operators: int, budget: int
) -> None:
    profile = profile_of(num_operators, budget)
    printed = sizes_of(profile, generate_schedule(range(num_operators), *find_window_size(profile)))
    sizes = PositionSizes(
        full=np.full((1, num_operators), 12), compute=np.full((1, num_operators), 2)
    )
    cuts = cut_window(sizes, len(printed))
    assert snapshot_bytes(sizes, cuts.ends).max() <= max(printed)
