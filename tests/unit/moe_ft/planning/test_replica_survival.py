"""Sets of dead ranks that a table loses are those of the definition, and tables overlap as Lazarus says."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.slot_tables import (
    Table,
    lost_sets,
    overlapping,
    recovery_probability,
    sample_recovery,
)


def count_lost(tables: Sequence[Table], num_dead: int) -> int:
    """Count sets of dead ranks by the definition."""
    lost = 0
    for dead in combinations(range(len(tables[0])), num_dead):
        for table in tables:
            alive = {e for rank, row in enumerate(table) if rank not in dead for e in row}
            if alive != {e for row in table for e in row}:
                lost += 1
                break
    return lost


@st.composite
def layers(draw: st.DrawFn) -> tuple[tuple[int, ...], int]:
    """Replicas that fill the slots of some ranks."""
    num_ranks, slots = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    size = draw(st.integers(1, num_ranks * slots))
    counts = [1] * size
    for expert in draw(
        st.lists(
            st.integers(0, size - 1),
            min_size=num_ranks * slots - size,
            max_size=num_ranks * slots - size,
        )
    ):
        counts[expert] += 1
    return tuple(counts), num_ranks


@given(layers())
def test_an_overlapping_table_has_the_replicas_in_equal_rows(
    layer: tuple[tuple[int, ...], int],
) -> None:
    counts, num_ranks = layer
    table = overlapping(counts, num_ranks)
    assert len(table) == num_ranks
    assert {len(row) for row in table} == {sum(counts) // num_ranks}
    experts = [expert for row in table for expert in row]
    assert tuple(experts.count(expert) for expert in range(len(counts))) == counts


def test_overlap_is_not_the_best_where_its_last_group_has_too_few_ranks() -> None:
    # Theorem 1 says that it is.
    assert lost_sets([overlapping((2, 2, 2), 3)])[1] == 1
    assert lost_sets([((0, 1), (0, 2), (1, 2))])[1] == 0


@given(layers(), layers())
def test_lost_sets_are_those_of_the_definition(
    one: tuple[tuple[int, ...], int], two: tuple[tuple[int, ...], int]
) -> None:
    num_ranks = one[1]
    tables = [overlapping(*one)]
    if two[1] == num_ranks:
        tables.append(overlapping(*two))
    found = lost_sets(tables)
    assert found == tuple(count_lost(tables, dead) for dead in range(num_ranks + 1))


def test_layers_are_recovered_together() -> None:
    # Each layer alone survives three of four ranks, as sets of one; together two.
    tables: list[Table] = [((0,), (1,), (1,), (1,)), ((1,), (0,), (1,), (1,))]
    assert [recovery_probability([each], 1) for each in tables] == [0.75, 0.75]
    assert recovery_probability(tables, 1) == 0.5


def test_samples_agree_with_the_exact_probability() -> None:
    tables = [overlapping((2, 3, 4, 9), 6)]
    exact = recovery_probability(tables, 2)
    assert 0.5 < exact < 1
    found = sample_recovery(tables, 2, np.random.default_rng(0), 20_000)
    assert abs(found - exact) < 0.02
    assert sample_recovery(tables, 0, np.random.default_rng(0), 10) == 1


def test_replicas_that_do_not_fill_the_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="2 ranks"):
        overlapping((1, 2), 2)
    with pytest.raises(PlanError, match="30 ranks"):
        lost_sets([((0,),) * 30])
