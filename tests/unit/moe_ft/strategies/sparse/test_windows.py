"""Windows are cut so that the largest snapshot is the smallest possible, and are no longer than needed."""

import math
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    WindowCuts,
    count_splits,
    cut_window,
    most_window_bytes,
    shortest_window,
    snapshot_bytes,
)

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.integers(1, 6)


def sizes_of(full: list[list[int]], compute: list[list[int]]) -> PositionSizes:
    return PositionSizes(full=np.array(full, np.int64), compute=np.array(compute, np.int64))


@st.composite
def small_sizes(draw: st.DrawFn) -> PositionSizes:
    """Draw sizes of a few ranks, some equal and some 0, for which every division can be tried."""
    num_ranks, num_positions = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    largest = draw(st.sampled_from([1, 3, 20, 1000]))
    full = st.lists(st.integers(0, largest), min_size=num_positions, max_size=num_positions)
    rows = [draw(full) for _ in range(num_ranks)]
    compute = [[draw(st.integers(0, size)) for size in row] for row in rows]
    return PositionSizes(
        full=np.array(rows, np.int64).reshape(num_ranks, num_positions),
        compute=np.array(compute, np.int64).reshape(num_ranks, num_positions),
    )


def random_sizes(seed: int, num_ranks: int, num_positions: int, largest: int) -> PositionSizes:
    generator = np.random.default_rng(seed)
    full = generator.integers(0, largest, (num_ranks, num_positions))
    return PositionSizes(full=full, compute=generator.integers(0, full + 1))


def all_ends(num_positions: int, length: int) -> list[tuple[int, ...]]:
    """Return every division into groups, with empty ones anywhere."""
    inner = combinations_with_replacement(range(num_positions + 1), length - 1)
    return [(*ends, num_positions) for ends in inner]


def largest_of(sizes: PositionSizes, ends: tuple[int, ...]) -> int:
    """Return the largest snapshot of any rank, by adding up unit by unit."""
    largest: int = max(
        sum(full[start:end]) + sum(compute[end:])
        for full, compute in zip(sizes.full.tolist(), sizes.compute.tolist(), strict=True)
        for start, end in zip((0, *ends), ends, strict=False)
    )
    return largest


def least_length(sizes: PositionSizes, budget: int) -> float:
    """Return how many snapshots fit everything into a budget, taking unit by unit; infinite if none do."""
    ranks = list(zip(sizes.full.tolist(), sizes.compute.tolist(), strict=True))
    num_positions, start, length = sizes.num_positions, 0, 0
    while start < num_positions:
        end = start
        used = [sum(compute[start:]) for _, compute in ranks]
        while end < num_positions:
            more = [full[end] - compute[end] for full, compute in ranks]
            if max(a + b for a, b in zip(used, more, strict=True)) > budget:
                break
            used = [a + b for a, b in zip(used, more, strict=True)]
            end += 1
        if end == start:
            return math.inf
        start, length = end, length + 1
    return length


@given(small_sizes(), LENGTHS)
def test_bytes_of_any_division_are_those_of_its_units(sizes: PositionSizes, length: int) -> None:
    for ends in all_ends(sizes.num_positions, length):
        found = snapshot_bytes(sizes, ends)
        assert found.shape == (len(sizes.full), length)
        assert found.max() == largest_of(sizes, ends)


@given(small_sizes(), LENGTHS)
def test_largest_snapshot_of_a_cut_window_is_the_least_of_all_divisions(
    sizes: PositionSizes, length: int
) -> None:
    least = min(largest_of(sizes, ends) for ends in all_ends(sizes.num_positions, length))
    assert cut_window(sizes, length).largest_bytes == least


@given(SEEDS, st.integers(1, 5), st.integers(1, 60), LENGTHS)
def test_largest_snapshot_of_terabytes_is_the_least_to_the_byte(
    seed: int, num_ranks: int, num_positions: int, length: int
) -> None:
    sizes = random_sizes(seed, num_ranks, num_positions, 10**12)
    largest = cut_window(sizes, length).largest_bytes
    assert least_length(sizes, largest) <= length < least_length(sizes, largest - 1)


@given(small_sizes(), st.integers(1, 10))
def test_cut_window_has_as_many_groups_as_asked_for_and_empty_ones_only_last(
    sizes: PositionSizes, length: int
) -> None:
    cuts = cut_window(sizes, length)
    assert cuts.length == len(cuts.ends) == length
    num_units = np.diff(cuts.ends, prepend=0)
    num_groups = min(length, sizes.num_positions)
    assert np.all(num_units[:num_groups] > 0)
    assert np.all(num_units[num_groups:] == 0)
    assert num_units.sum() == sizes.num_positions


@given(small_sizes(), LENGTHS)
def test_no_equally_good_cuts_without_empty_groups_end_a_group_later(
    sizes: PositionSizes, length: int
) -> None:
    num_groups = max(1, min(length, sizes.num_positions))
    cuts = cut_window(sizes, num_groups)
    for ends in all_ends(sizes.num_positions, num_groups):
        if len({0, *ends}) > num_groups and largest_of(sizes, ends) == cuts.largest_bytes:
            assert np.all(np.array(ends) <= cuts.ends)


def test_sizes_that_are_views_of_another_array_are_cut_like_copies() -> None:
    pairs = np.array([[[12, 2], [5, 1], [8, 0]], [[1, 1], [9, 3], [4, 4]]], np.int64)
    views = PositionSizes(full=pairs[:, :, 0], compute=pairs[:, :, 1])
    copies = sizes_of([[12, 5, 8], [1, 9, 4]], [[2, 1, 0], [1, 3, 4]])
    assert cut_window(views, 2) == cut_window(copies, 2)


def test_groups_of_a_window_with_empty_snapshots_name_only_the_others() -> None:
    assert WindowCuts(ends=(1, 2, 2, 2), largest_bytes=0).groups().tolist() == [0, 1]


# Modules that freeze only as a whole


def with_modules(sizes: PositionSizes, module_size: int) -> PositionSizes:
    """Return sizes of which so many neighbours at a time are a module."""
    modules = [place // module_size for place in range(sizes.num_positions)]
    return replace(sizes, splits=count_splits([modules], sizes.num_positions))


def test_splits_of_a_border_are_the_modules_with_units_on_both_sides() -> None:
    columns: list[list[str | None]] = [["a", "a", "b", "b"], ["a", "c", "a", None]]
    # The second column's a is another module than the first's.
    assert count_splits(columns, 5).tolist() == [0, 2, 1, 1, 0, 0]


def test_group_ends_earlier_where_that_keeps_a_module_whole() -> None:
    # The last unit is alone in its snapshot and decides; where the others are divided is free.
    sizes = sizes_of([[12, 12, 12, 12, 60]], [[2, 2, 2, 2, 10]])
    assert cut_window(sizes, 3) == WindowCuts(ends=(3, 4, 5), largest_bytes=60)
    assert cut_window(with_modules(sizes, 2), 3) == WindowCuts(ends=(2, 4, 5), largest_bytes=60)


@given(small_sizes(), st.integers(2, 5), st.integers(1, 3))
def test_as_few_modules_as_possible_are_divided_and_the_largest_snapshot_is_the_same(
    sizes: PositionSizes, length: int, module_size: int
) -> None:
    plain, grouped = cut_window(sizes, length), with_modules(sizes, module_size)
    found = cut_window(grouped, length)
    assert grouped.splits is not None
    assert found.largest_bytes == plain.largest_bytes == largest_of(sizes, found.ends)
    assert all(end <= latest for end, latest in zip(found.ends, plain.ends, strict=True))
    if length >= sizes.num_positions:
        return
    possible = [
        ends
        for ends in all_ends(sizes.num_positions, length)
        if largest_of(sizes, ends) == plain.largest_bytes and np.diff(ends, prepend=0).all()
    ]
    assert found.ends in possible
    counts = [int(grouped.splits[list(ends)].sum()) for ends in possible]
    assert int(grouped.splits[list(found.ends)].sum()) == min(counts)


@given(small_sizes(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_no_window_takes_more_than_the_most_of_its_lengths(
    sizes: PositionSizes, shortest: int, more: int, module_size: int
) -> None:
    for each in (sizes, with_modules(sizes, module_size)):
        most = most_window_bytes(each, shortest, shortest + more)
        for length in range(shortest, shortest + more + 1):
            ends = cut_window(each, length).ends
            assert np.all(snapshot_bytes(each, ends).sum(axis=1) <= most)


@given(small_sizes(), st.integers(-1, 60), st.integers(1, 9))
def test_shortest_window_is_the_first_that_fits_or_the_first_of_the_best(
    sizes: PositionSizes, budget: int, longest: int
) -> None:
    windows = [cut_window(sizes, length) for length in range(1, longest + 1)]
    fitting = [cuts for cuts in windows if cuts.largest_bytes <= budget]
    expected = fitting[0] if fitting else min(windows, key=lambda cuts: cuts.largest_bytes)
    fit = shortest_window(sizes, budget, longest)
    assert fit == expected
    assert (fit.largest_bytes <= budget) == bool(fitting)


@pytest.mark.parametrize("compute", [-1, 13])
def test_compute_bytes_out_of_range_are_refused_by_rank_and_position(compute: int) -> None:
    with pytest.raises(PlanError, match=f"rank 1 has {compute} bytes at COMPUTE and 12 at FULL"):
        sizes_of([[12, 12], [12, 12]], [[2, 2], [2, compute]])
