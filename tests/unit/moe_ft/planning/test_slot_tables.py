"""Tables have the replicas that were asked for, and level the load."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.slot_tables import (
    Table,
    allocate,
    balanced,
    contiguous,
    count_moves,
    popular,
    replicas_of,
    stock,
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Loads, ranks, slots of a rank, and a minimum of replicas."""
    num_ranks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    size = draw(st.integers(1, num_ranks * slots))
    load = draw(st.lists(st.integers(0, 500), min_size=size, max_size=size))
    return load, num_ranks, slots, draw(st.integers(1, 3))


def counts_of(table: Table, num_experts: int) -> tuple[int, ...]:
    found = Counter(expert for row in table for expert in row)
    return tuple(found[expert] for expert in range(num_experts))


def busiest(table: Table, load: list[int]) -> float:
    counts = counts_of(table, len(load))
    return max(sum(load[expert] / counts[expert] for expert in row) for row in table)


def test_stock_table_is_megatrons() -> None:
    assert stock(6, 3) == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(PlanError, match="3 ranks"):
        stock(4, 3)


@given(layers())
def test_tables_have_the_replicas_that_were_allocated_in_equal_rows(
    layer: tuple[list[int], int, int, int],
) -> None:
    load, num_ranks, slots, minimum = layer
    num_slots = num_ranks * slots
    even, ordered = balanced(load, num_ranks, slots, minimum), contiguous(load, num_ranks, slots)
    assert counts_of(even, len(load)) == allocate(load, num_slots, minimum)
    assert counts_of(ordered, len(load)) == popular(load, num_slots)
    assert {len(row) for row in (*even, *ordered)} == {slots}
    assert len(even) == len(ordered) == num_ranks
    assert (replicas_of(even, len(load)).sum(axis=1) == counts_of(even, len(load))).all()


@given(layers())
def test_replicas_are_on_as_many_ranks_as_can_be_if_there_are_few(
    layer: tuple[list[int], int, int, int],
) -> None:
    load, num_ranks, slots, _ = layer
    table = balanced(load, num_ranks, slots, 1)
    if 2 * len(load) <= num_ranks and slots == 1:
        spread = (replicas_of(table, len(load)) > 0).sum(axis=1)
        assert (spread == allocate(load, num_ranks, 1)).all()


@pytest.mark.parametrize("seed", range(20))
def test_busiest_rank_is_at_most_a_third_busier_than_in_the_best_table(seed: int) -> None:
    generator = np.random.default_rng(seed)
    load = generator.integers(1, 100, 5).tolist()
    counts = allocate(load, 8, 1)
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    rows = [slice(start, start + 2) for start in range(0, 8, 2)]
    best = min(
        busiest(tuple(order[row] for row in rows), load) for order in set(permutations(experts))
    )
    assert busiest(balanced(load, 4, 2, 1), load) <= best * 4 / 3


def test_replicas_with_the_most_tokens_are_placed_first() -> None:
    assert balanced([3, 3, 2, 2, 2, 0], 2, 3, 1) == ((0, 2, 4), (1, 3, 5))


def test_replicas_of_an_expert_are_on_different_ranks_if_work_does_not_decide() -> None:
    assert balanced([0, 0], 2, 2, 1) == ((0, 1), (0, 1))


def test_moves_are_the_replicas_that_ranks_lack() -> None:
    assert count_moves(((0, 1), (2, 3)), ((0, 2), (1, 3))) == 2
    assert count_moves(((0, 1), (2, 3)), ((0, 1, 2, 3),)) == 2
    assert count_moves(((0, 1),), ((1, 0), (0, 0))) == 2
