"""Every element is saved by exactly one rank, and every rank saves as much as the others."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.sharding import (
    Slice,
    adaptive_shares,
    assign_baseline_slices,
    assign_equal_slices,
    assign_weighted_slices,
)

SIZES = st.lists(st.integers(0, 50), max_size=12)
NUM_RANKS = st.integers(1, 17)
LOADS = st.lists(st.integers(0, 40), min_size=1, max_size=9)
SHARES = st.lists(st.integers(0, 10**12), min_size=1, max_size=9).filter(sum)


@given(SIZES, NUM_RANKS)
def test_slices_of_every_parameter_are_disjoint_and_cover_it(
    sizes: list[int], num_ranks: int
) -> None:
    assert _is_disjoint_cover(assign_equal_slices(sizes, num_ranks), sizes)


@given(SIZES, NUM_RANKS)
def test_shares_of_all_ranks_differ_by_one_element_at_most(
    sizes: list[int], num_ranks: int
) -> None:
    shares = [sum(end - start for start, end in of_rank) for of_rank in _cut(sizes, num_ranks)]
    assert max(shares) - min(shares) <= 1


def test_slices_of_very_large_parameters_are_exact() -> None:
    size = 2**61 + 1
    assert assign_equal_slices([size], 3)[2] == [(2 * size // 3, size)]


@given(SIZES, NUM_RANKS)
def test_baseline_has_the_first_rank_save_everything(sizes: list[int], num_ranks: int) -> None:
    slices = assign_baseline_slices(sizes, num_ranks)
    assert _is_disjoint_cover(slices, sizes)
    assert [_saved(of_rank) for of_rank in slices] == [sum(sizes), *[0] * (num_ranks - 1)]


@given(SIZES, SHARES)
def test_weighted_slices_are_within_one_element_of_their_shares(
    sizes: list[int], shares: list[int]
) -> None:
    for share, of_rank in zip(shares, assign_weighted_slices(sizes, shares), strict=True):
        exact = sum(map(Fraction, sizes)) * Fraction(share) / sum(map(Fraction, shares))
        assert abs(_saved(of_rank) - exact) < 1


@given(SIZES, NUM_RANKS)
def test_weighted_slices_with_equal_shares_are_the_equal_slices(
    sizes: list[int], num_ranks: int
) -> None:
    assert assign_weighted_slices(sizes, [3] * num_ranks) == assign_equal_slices(sizes, num_ranks)


@given(SIZES, LOADS)
def test_weighted_slices_by_adaptive_shares_of_all_elements_are_exactly_those(
    sizes: list[int], loads: list[int]
) -> None:
    shares = adaptive_shares(sum(sizes), loads)
    slices = assign_weighted_slices(sizes, shares)
    assert [_saved(of_rank) for of_rank in slices] == shares


def test_weighted_slices_of_two_parameters_on_three_ranks_are_those_worked_by_hand() -> None:
    # 5 + 3 = 8 elements end to end in parts 1 : 0 : 3, that is 2, 0 and 6.
    expected = [[(0, 2), (0, 0)], [(0, 0), (0, 0)], [(2, 5), (0, 3)]]
    assert assign_weighted_slices([5, 3], [1, 0, 3]) == expected


@given(st.integers(0, 200), LOADS)
def test_adaptive_shares_have_the_lightest_heaviest_rank_that_is_possible(
    total: int, loads: list[int]
) -> None:
    heaviest = max(a + b for a, b in zip(adaptive_shares(total, loads), loads, strict=True))
    room_below = sum(max(0, heaviest - 1 - load) for load in loads)
    assert heaviest == max(loads) or room_below < total


@given(st.integers(0, 200), LOADS)
def test_adaptive_shares_leave_ranks_that_take_some_within_one_byte(
    total: int, loads: list[int]
) -> None:
    shares = adaptive_shares(total, loads)
    filled = [load + share for load, share in zip(loads, shares, strict=True) if share]
    assert not filled or max(filled) - min(filled) <= 1


def test_adaptive_shares_of_three_ranks_are_those_worked_by_hand() -> None:
    # Up to 5 takes 4 + 2; the remaining 3 go to the two light ranks, the lower one first.
    assert adaptive_shares(9, [1, 3, 20]) == [6, 3, 0]
    assert adaptive_shares(0, [1, 3, 20]) == [0, 0, 0]


def test_adaptive_shares_of_very_many_bytes_are_exact() -> None:
    assert adaptive_shares(2**61 + 1, [0, 2**60]) == [2**60 + 2**59 + 1, 2**59]


def _saved(of_rank: list[Slice]) -> int:
    return sum(end - start for start, end in of_rank)


def _is_disjoint_cover(slices: list[list[Slice]], sizes: list[int]) -> bool:
    """Return whether ranks take successive pieces of every parameter that make it up."""
    return all(
        [element for of_rank in slices for element in range(*of_rank[parameter])]
        == list(range(size))
        for parameter, size in enumerate(sizes)
    )


def _cut(sizes: list[int], num_ranks: int) -> list[list[tuple[int, int]]]:
    return assign_equal_slices(sizes, num_ranks)
