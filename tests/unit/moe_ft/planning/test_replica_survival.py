"""Tables survive as many sets of dead ranks as any table can: compared with all tables of small layers."""

from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.replica_survival import (
    compact,
    lost_sets,
    overlapping,
    recovery_probability,
    sample_recovery,
    spread,
    surviving,
)
from moe_ft.planning.slot_tables import Table


def all_tables(counts: Sequence[int], num_ranks: int, slots: int) -> Iterator[Table]:
    """Yield all tables, but for the order of their rows and slots."""
    kinds = sorted(set(combinations_with_replacement(range(len(counts)), slots)))

    def go_on(left: list[int], first: int, rows: tuple[tuple[int, ...], ...]) -> Iterator[Table]:
        if len(rows) == num_ranks:
            yield rows
            return
        for kind in range(first, len(kinds)):
            after = list(left)
            for expert in kinds[kind]:
                after[expert] -= 1
            if min(after) >= 0:
                yield from go_on(after, kind, (*rows, kinds[kind]))

    return go_on(list(counts), 0, ())


def all_counts(num_experts: int, num_slots: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_slots), num_experts - 1):
        counts = tuple(b - a for a, b in zip((0, *cuts), (*cuts, num_slots), strict=True))
        if list(counts) == sorted(counts):
            yield counts


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


SHAPES = [(3, 2, 3), (4, 2, 3), (4, 3, 4), (5, 2, 3), (5, 2, 5), (4, 2, 4), (3, 3, 2), (4, 1, 3)]


@pytest.mark.parametrize(("num_ranks", "slots", "num_experts"), SHAPES)
def test_surviving_tables_lose_no_more_sets_than_any_table(
    num_ranks: int, slots: int, num_experts: int
) -> None:
    for counts in all_counts(num_experts, num_ranks * slots):
        best = min(lost_sets([table]) for table in all_tables(counts, num_ranks, slots))
        assert lost_sets([surviving(counts, num_ranks)]) == best, counts


def test_overlap_is_not_the_best_where_its_last_group_has_too_few_ranks() -> None:
    # Theorem 1 says that it is. With one dead rank, all experts survive in {0 1} {0 2} {1 2}.
    assert lost_sets([overlapping((2, 2, 2), 3)])[1] == 1
    assert lost_sets([surviving((2, 2, 2), 3)])[1] == 0


def test_gpt_s_of_the_paper_with_a_uniform_load_survives_three_dead_nodes_after_the_mend() -> None:
    counts = (7, 7, 7, 7, 8, 8, 8, 8)
    assert lost_sets([overlapping(counts, 10)])[3] > 0
    mended = [surviving(counts, 10)]
    assert lost_sets(mended)[3] == 0
    assert lost_sets(mended) <= lost_sets([spread(counts, 10)])


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
def test_every_table_has_the_replicas_in_equal_rows(layer: tuple[tuple[int, ...], int]) -> None:
    counts, num_ranks = layer
    for table in (place(counts, num_ranks) for place in (spread, compact, overlapping, surviving)):
        assert len(table) == num_ranks
        assert {len(row) for row in table} == {sum(counts) // num_ranks}
        experts = [expert for row in table for expert in row]
        assert tuple(experts.count(expert) for expert in range(len(counts))) == counts


@given(layers(), layers())
def test_lost_sets_are_those_of_the_definition(
    one: tuple[tuple[int, ...], int], two: tuple[tuple[int, ...], int]
) -> None:
    num_ranks = one[1]
    tables = [spread(one[0], num_ranks)]
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
    tables = [spread((2, 3, 4, 9), 6)]
    exact = recovery_probability(tables, 2)
    assert 0.5 < exact < 1
    found = sample_recovery(tables, 2, np.random.default_rng(0), 20_000)
    assert abs(found - exact) < 0.02
    assert sample_recovery(tables, 0, np.random.default_rng(0), 10) == 1


def test_compact_keeps_an_expert_on_as_few_ranks_as_can_be() -> None:
    assert compact((2, 4, 2), 4) == ((0, 0), (1, 1), (1, 1), (2, 2))
    assert spread((2, 4, 2), 4) == ((0, 1), (0, 1), (1, 2), (1, 2))


def test_replicas_that_do_not_fill_the_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="2 ranks"):
        overlapping((1, 2), 2)
    with pytest.raises(PlanError, match="30 ranks"):
        lost_sets([spread((30,), 30)])
