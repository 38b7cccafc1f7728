"""Ranks fetch what they lack, from those that have it, and rows go where least must be fetched."""

from collections import Counter
from itertools import permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.slot_moves import (
    _assign,
    arrange,
    arrange_greedily,
    count_moves,
    plan_moves,
)
from moe_ft.planning.slot_tables import Table


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Table, Table]:
    """Two tables of the same slots."""
    num_ranks, slots = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 5), min_size=slots, max_size=slots).map(tuple)
    rows = st.lists(row, min_size=num_ranks, max_size=num_ranks).map(tuple)
    return draw(rows), draw(rows)


@given(pairs())
def test_moves_make_the_new_table_of_the_old_one(tables: tuple[Table, Table]) -> None:
    previous, table = tables
    moves = plan_moves(previous, table)
    for rank, row in enumerate(table):
        fetched = Counter(move.expert for move in moves if move.destination == rank)
        assert not Counter(row) - (Counter(previous[rank]) + fetched)
        assert fetched == Counter(row) - Counter(previous[rank])
    held = {expert for row in previous for expert in row}
    for move in moves:
        if move.source is None:
            assert move.expert not in held
        else:
            assert move.expert in previous[move.source]


def test_owners_of_an_expert_take_turns_as_sources() -> None:
    moves = plan_moves(((0,), (0,), (1,), (1,)), ((0,), (0,), (0,), (0,)))
    assert sorted(str(move.source) for move in moves) == ["0", "1"]


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


def test_moves_between_different_numbers_of_ranks_are_what_ranks_lack() -> None:
    assert count_moves(((0, 1), (2, 3)), ((0, 2), (1, 3))) == 2
    assert count_moves(((0, 1), (2, 3)), ((0, 1, 2, 3),)) == 2
    assert count_moves(((0, 1),), ((1, 0), (0, 0))) == 2


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_assignment_of_any_costs_is_the_cheapest(size: int, seed: int) -> None:
    costs = np.random.default_rng(seed).integers(-9, 9, (size, size))
    columns = np.array(list(permutations(range(size))))
    best = costs[np.arange(size), columns].sum(axis=1).min()
    found = _assign(costs)
    assert sorted(found) == list(range(size))
    assert costs[np.arange(size), found].sum() == best


def test_assignment_remembers_the_prices_of_columns() -> None:
    costs = np.array([[7, 4, -6], [3, 4, -7], [-7, -3, -8]])
    assert costs[np.arange(3), _assign(costs)].sum() == -10
