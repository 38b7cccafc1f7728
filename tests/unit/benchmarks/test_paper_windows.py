"""The printed algorithm is reproduced with its quirks, and windows.py is never worse."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.windows import OperatorProfile, find_window_size
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


def test_window_of_figure_6_has_three_snapshots_of_two_active_operators() -> None:
    assert find_window_size(profile_of(6, 32)) == (3, 2)


@given(st.integers(1, 80), st.integers(1, 1000))
def test_window_cut_by_bytes_is_no_larger_than_the_printed_one_of_the_same_length(
    num_operators: int, budget: int
) -> None:
    profile = profile_of(num_operators, budget)
    length, num_active = find_window_size(profile)
    first = profile.checkpoint_bytes(num_active, num_operators - num_active)
    sizes = PositionSizes(
        full=np.full((1, num_operators), 12), compute=np.full((1, num_operators), 2)
    )
    assert snapshot_bytes(sizes, cut_window(sizes, length).ends).max() <= first
