"""Rows of a table go to the ranks where least must be fetched."""

from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.expert_placement import _assign, arrange, arrange_greedily
from moe_ft.planning.slot_tables import Table, count_moves


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Table, Table]:
    """Two tables of the same slots."""
    num_ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 5), min_size=slots, max_size=slots).map(tuple)
    rows = st.lists(row, min_size=num_ranks, max_size=num_ranks).map(tuple)
    return draw(rows), draw(rows)


@given(pairs())
def test_arranged_rows_are_those_of_the_table_with_the_fewest_moves(
    tables: tuple[Table, Table],
) -> None:
    previous, table = tables
    best = min(count_moves(previous, rows) for rows in permutations(table))
    found, greedy = arrange(previous, table), arrange_greedily(previous, table)
    assert Counter(found) == Counter(greedy) == Counter(table)
    assert count_moves(previous, found) == best


def test_greedy_order_of_ranks_can_take_the_row_of_a_later_one() -> None:
    previous, table = ((0, 1), (0, 2)), ((0, 2), (3, 1))
    assert count_moves(previous, arrange_greedily(previous, table)) == 3
    assert count_moves(previous, arrange(previous, table)) == 1


def test_assignment_remembers_the_prices_of_columns() -> None:
    costs = np.array([[7, 4, -6], [3, 4, -7], [-7, -3, -8]])
    assert costs[np.arange(3), _assign(costs)].sum() == -10
