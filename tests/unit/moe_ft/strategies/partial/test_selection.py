"""Every expert's turn comes, ranks are evenly loaded, and load-aware selection takes what is at risk."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.strategies.partial.selection import (
    advance,
    fill_up,
    most_on_a_rank,
    rank_counts,
    select_load_aware,
    select_sequential,
    select_to_persist,
)
from tests.unit.moe_ft.strategies.partial.experts import shapes

FIGURE_4 = ExpertLayout(num_layers=4, num_experts=3, ep_size=3)
FOUR_ON_TWO = ExpertLayout(num_layers=1, num_experts=4, ep_size=2)


def counts_of(experts: ExpertLayout, seed: int, most: int = 5) -> Counts:
    shape = (experts.num_layers, experts.num_experts)
    return np.random.default_rng(seed).integers(0, most, shape)


def cursors_of(experts: ExpertLayout, seed: int) -> tuple[int, ...]:
    drawn = np.random.default_rng(seed).integers(0, experts.num_experts, experts.num_layers)
    return tuple(drawn.tolist())


def test_first_two_snapshots_of_figure_4_hold_the_experts_that_it_shows() -> None:
    cursors = FIGURE_4.first_cursors(1)
    assert select_sequential(FIGURE_4, cursors, 1) == ((0,), (1,), (2,), (0,))
    cursors = advance(FIGURE_4, cursors, 1)
    assert select_sequential(FIGURE_4, cursors, 1) == ((1,), (2,), (0,), (1,))


@given(shapes())
def test_sequential_selection_loads_ranks_evenly_in_every_snapshot(
    drawn: tuple[ExpertLayout, int],
) -> None:
    experts, k = drawn
    cursors = experts.first_cursors(k)
    for _ in range(experts.num_experts):
        counts = rank_counts(experts, select_sequential(experts, cursors, k))
        assert sum(counts) == k * experts.num_layers
        assert max(counts) - min(counts) <= 1
        cursors = advance(experts, cursors, k)


@given(shapes(), st.integers(0, 2**32 - 1))
def test_load_aware_selection_leaves_no_expert_with_more_unsaved_tokens_behind(
    drawn: tuple[ExpertLayout, int], seed: int
) -> None:
    experts, k = drawn
    unsaved = counts_of(experts, seed)
    selection = select_load_aware(experts, cursors_of(experts, seed), unsaved, k)
    for layer, chosen in enumerate(selection):
        left = set(range(experts.num_experts)) - set(chosen)
        assert len(chosen) == k
        assert not left or min(unsaved[layer, list(chosen)]) >= max(unsaved[layer, list(left)])


@given(shapes(), st.integers(0, 2**32 - 1))
def test_load_aware_selection_among_equals_is_the_sequential_one(
    drawn: tuple[ExpertLayout, int], seed: int
) -> None:
    experts, k = drawn
    cursors, unsaved = cursors_of(experts, seed), counts_of(experts, seed, most=1)
    expected = select_sequential(experts, cursors, k)
    assert select_load_aware(experts, cursors, unsaved, k) == expected


def test_most_on_a_rank_is_reached_when_one_rank_has_all_the_load() -> None:
    unsaved = np.array([[9, 9, 0, 0]])
    selection = select_load_aware(FOUR_ON_TWO, (0,), unsaved, 3)
    assert max(rank_counts(FOUR_ON_TWO, selection)) == most_on_a_rank(FOUR_ON_TWO, 3) == 2


@given(shapes(), st.integers(0, 2**32 - 1))
def test_filling_up_gives_every_rank_as_many_experts_as_the_bottleneck_had(
    drawn: tuple[ExpertLayout, int], seed: int
) -> None:
    experts, k = drawn
    cursors, unsaved = cursors_of(experts, seed), counts_of(experts, seed)
    selection = select_load_aware(experts, cursors, unsaved, k)
    filled = fill_up(experts, cursors, selection)
    most = max(rank_counts(experts, selection))
    assert rank_counts(experts, filled) == [most] * experts.ep_size
    assert all(set(a) <= set(b) for a, b in zip(selection, filled, strict=True))


@given(shapes(), st.integers(0, 2**32 - 1), st.booleans())
def test_versions_that_storage_has_already_are_not_persisted(
    drawn: tuple[ExpertLayout, int], seed: int, is_load_aware: bool
) -> None:
    experts, k = drawn
    saved_at, persisted_at = counts_of(experts, seed), counts_of(experts, seed + 1)
    tokens = counts_of(experts, seed + 2) if is_load_aware else None
    cursors = cursors_of(experts, seed)
    chosen = select_to_persist(experts, cursors, saved_at, persisted_at, tokens, k)
    for layer, selected in enumerate(chosen):
        newer = saved_at[layer] > persisted_at[layer]
        assert all(newer[list(selected)])
        assert len(selected) == min(k, int(newer.sum()))


def test_oldest_on_storage_is_persisted_first_and_among_equals_the_newest_in_memory() -> None:
    saved_at = np.array([[9, 8, 7, 6]])
    persisted_at = np.array([[3, 1, 1, 6]])
    assert select_to_persist(FOUR_ON_TWO, (0,), saved_at, persisted_at, None, 1) == ((1,),)
    assert select_to_persist(FOUR_ON_TWO, (0,), saved_at, persisted_at, None, 2) == ((1, 2),)
    assert select_to_persist(FOUR_ON_TWO, (0,), saved_at, persisted_at, None, 4) == ((0, 1, 2),)


def test_load_aware_persist_takes_the_version_with_most_tokens_beyond_storage() -> None:
    saved_at, persisted_at = np.array([[9, 8, 7, 6]]), np.array([[3, 1, 1, 6]])
    tokens = np.array([[20, 10, 15, 99]])
    assert select_to_persist(FOUR_ON_TWO, (0,), saved_at, persisted_at, tokens, 1) == ((0,),)
