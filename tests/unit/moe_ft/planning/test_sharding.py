"""Every element is saved by exactly one rank, and every rank saves as much as the others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.sharding import assign_equal_slices

SIZES = st.lists(st.integers(0, 50), max_size=12)
NUM_RANKS = st.integers(1, 17)


@given(SIZES, NUM_RANKS)
def test_slices_of_every_parameter_are_disjoint_and_cover_it(
    sizes: list[int], num_ranks: int
) -> None:
    slices = assign_equal_slices(sizes, num_ranks)
    for parameter, size in enumerate(sizes):
        saved = [
            element for of_rank in slices for element in range(*of_rank[parameter])
        ]  # ascending, because ranks take successive pieces
        assert saved == list(range(size))


@given(SIZES, NUM_RANKS)
def test_shares_of_all_ranks_differ_by_one_element_at_most(
    sizes: list[int], num_ranks: int
) -> None:
    shares = [sum(end - start for start, end in of_rank) for of_rank in _cut(sizes, num_ranks)]
    assert max(shares) - min(shares) <= 1


@given(SIZES, NUM_RANKS)
def test_every_rank_has_a_range_for_every_parameter(sizes: list[int], num_ranks: int) -> None:
    slices = _cut(sizes, num_ranks)
    assert [len(of_rank) for of_rank in slices] == [len(sizes)] * num_ranks


def test_slices_of_three_parameters_on_two_ranks_are_those_worked_by_hand() -> None:
    # 5 + 3 + 4 = 12 elements end to end; rank 0 saves 0..6, which ends one into the second.
    assert assign_equal_slices([5, 3, 4], 2) == [[(0, 5), (0, 1), (0, 0)], [(0, 0), (1, 3), (0, 4)]]


def test_slices_of_very_large_parameters_are_exact() -> None:
    size = 2**61 + 1
    assert assign_equal_slices([size], 3)[2] == [(2 * size // 3, size)]


def test_no_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="num_ranks must be at least 1, got 0"):
        assign_equal_slices([1], 0)


def _cut(sizes: list[int], num_ranks: int) -> list[list[tuple[int, int]]]:
    return assign_equal_slices(sizes, num_ranks)
