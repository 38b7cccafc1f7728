"""Popularity is measured as defined, its changes are noticed, and experts are ordered by it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.strategies.sparse.windows import (
    Popularity,
    fractions_of_layers,
    has_moved,
    order_experts,
)

SEEDS = st.integers(0, 2**32 - 1)
FIRST = np.array([[4, 0, 12], [1, 1, 2]])
SECOND = np.array([[0, 8, 8], [3, 0, 1]])


def popularity_of(measure: str, counts: list[np.ndarray], decay: float = 0.75) -> Popularity:
    popularity = Popularity(measure, decay)
    for each in counts:
        popularity.add(each)
    return popularity


def random_scores(seed: int, num_layers: int, num_experts: int) -> np.ndarray:
    """Return scores with many that are equal and many that are 0."""
    return np.random.default_rng(seed).integers(0, 4, (num_layers, num_experts)).astype(float)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("count", [[4, 8, 20], [4, 1, 3]]),
        ("soft-count", [[4, 8, 20], [4, 1, 3]]),
        ("decayed", [[0.75, 2, 4.25], [0.9375, 0.1875, 0.625]]),  # 3/16 of first + 4/16 of second
    ],
)
def test_scores_after_two_iterations_are_those_worked_by_hand(
    measure: str, expected: list[list[float]]
) -> None:
    assert popularity_of(measure, [FIRST, SECOND]).scores().tolist() == expected


@pytest.mark.parametrize("measure", ["count", "soft-count"])
def test_scores_after_a_restart_are_those_of_what_came_after(measure: str) -> None:
    popularity = popularity_of(measure, [FIRST])
    popularity.restart()
    popularity.add(SECOND)
    assert np.array_equal(popularity.scores(), popularity_of(measure, [SECOND]).scores())


@pytest.mark.parametrize(("measure", "expected"), [("count", False), ("decayed", True)])
def test_counts_are_gone_after_a_restart_unless_they_decay(measure: str, expected: bool) -> None:
    popularity = popularity_of(measure, [FIRST])
    assert popularity.has_counts
    popularity.restart()
    assert popularity.has_counts == expected


def test_iteration_in_which_no_expert_got_a_token_is_no_count() -> None:
    assert not popularity_of("count", [np.zeros((2, 3), np.int64)]).has_counts


def test_frequencies_are_the_fractions_of_the_layers_worked_by_hand() -> None:
    assert popularity_of("count", [FIRST]).frequencies().tolist() == [
        [0.25, 0, 0.75],
        [0.25, 0.25, 0.5],
    ]


def test_fractions_of_a_layer_without_tokens_are_equal() -> None:
    assert fractions_of_layers(np.array([[0.0] * 4, [0, 0, 0, 8]])).tolist() == [
        [0.25] * 4,
        [0, 0, 0, 1],
    ]


@pytest.mark.parametrize(
    ("now", "expected"), [(0.375, False), (0.3751, True), (0.125, False), (0.1249, True)]
)
def test_expert_has_changed_only_by_more_than_the_limit_up_or_down(
    now: float, expected: bool
) -> None:
    before = np.full((1, 4), 0.25)
    changed = np.array([[now, 0.25, 0.25, 0.25]])
    assert has_moved(before, changed, change=0.5) == expected


@pytest.mark.parametrize(("now", "expected"), [(0.0, False), (1e-9, True)])
def test_expert_that_was_never_used_has_changed_when_it_is(now: float, expected: bool) -> None:
    before, after = np.array([[0.0, 1, 1, 1]]), np.array([[now, 1, 1, 1]])
    assert has_moved(before, after) == expected


@pytest.mark.parametrize(("num_changed", "expected"), [(2, False), (3, True)])
def test_fraction_of_experts_that_is_met_exactly_moves_the_order(
    num_changed: int, expected: bool
) -> None:
    before = np.ones((1, 30))
    now = before.copy()
    now[0, :num_changed] = 2
    assert has_moved(before, now, fraction=0.1) == expected


@pytest.mark.filterwarnings("error")
def test_stage_without_experts_never_moves() -> None:
    assert not has_moved(np.zeros((0, 8)), np.zeros((0, 8)), fraction=0)


def test_experts_of_one_rank_are_compared_by_fractions_of_the_whole_layer() -> None:
    # Of the whole layers 1/8 and 1/4; of what this rank holds it would be 1 and 1/2.
    scores = np.array([[1.0, 7, 0, 0], [2, 2, 2, 2]])
    assert order_experts(scores, [(1, 0), (1, 1), (0, 0)]) == [(0, 0), (1, 0), (1, 1)]


@given(SEEDS, st.integers(1, 4), st.integers(1, 6), st.randoms(use_true_random=False))
def test_order_is_of_all_experts_ascending_and_ties_by_layer_and_expert(
    seed: int, num_layers: int, num_experts: int, random: object
) -> None:
    scores = random_scores(seed, num_layers, num_experts)
    experts = [(layer, expert) for layer in range(num_layers) for expert in range(num_experts)]
    random.shuffle(experts)  # type: ignore[attr-defined]
    fractions = fractions_of_layers(scores)
    keys = [
        (fractions[layer, expert], layer, expert)
        for layer, expert in order_experts(scores, experts)
    ]
    assert keys == sorted(keys)
    assert {key[1:] for key in keys} == set(experts)
