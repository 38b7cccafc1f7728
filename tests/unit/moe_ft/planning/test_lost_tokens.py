"""Loss of a recovery, as a count and as a proportion, and the rule that raises k."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.format.records import Gaps
from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.lost_tokens import (
    BOOST_ITERATIONS,
    MAX_GAPS,
    Debts,
    expected_plt,
    gaps_after,
    job_plt,
    limit_of_k,
    next_k,
    num_lost,
    num_new,
    plt,
)
from moe_ft.strategies.partial.selection import advance, select_sequential


def test_expert_from_beyond_the_iteration_loses_nothing_and_what_it_had_lost_there_is_trained_again() -> (
    None
):
    assert gaps_after(100, 130, ()) == ()
    assert gaps_after(100, 140, ((80, 120),)) == ((80, 100),)
    assert gaps_after(100, 140, ((110, 120),)) == ()


def test_oldest_gaps_are_put_together_with_as_many_tokens() -> None:
    gaps = tuple((10 * number, 10 * number + 3) for number in range(MAX_GAPS))
    after = gaps_after(10 * MAX_GAPS + 9, 10 * MAX_GAPS + 4, gaps)
    assert len(after) == MAX_GAPS
    assert num_lost(after) == num_lost(gaps) + 5
    assert after[-1] == (10 * MAX_GAPS + 4, 10 * MAX_GAPS + 9)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_gaps_are_those_of_an_expert_that_remembers_every_token(
    events: list[tuple[int, int, int]],
) -> None:
    # Each event: train on some tokens and save; then a fault takes training back to one of the last
    # states, and the expert to one of the last versions, which may be older or newer than that.
    routed = 0
    gaps: Gaps = ()
    missing: set[int] = set()
    states: list[int] = [0]
    versions: list[tuple[int, Gaps, set[int]]] = [(0, (), set())]
    for tokens, back, version_back in events:
        routed += tokens
        states.append(routed)
        versions.append((routed, gaps, set(missing)))
        routed = states[-1 - min(back, len(states) - 1)]
        version_routed, version_gaps, version_missing = versions[
            -1 - min(version_back, len(versions) - 1)
        ]
        expected = {token for token in version_missing if token < routed}
        expected |= set(range(version_routed, routed))
        after = gaps_after(routed, version_routed, version_gaps)
        assert num_new(after, gaps) == len(expected - missing)
        gaps, missing = after, expected
        assert num_lost(gaps) == len(missing)
        assert {token for start, end in gaps for token in range(start, end)} == missing
        states = [state for state in states if state <= routed]


def test_plt_before_anything_is_processed_or_without_moe_layers_is_0() -> None:
    assert plt(np.zeros((2, 2), dtype=np.int64), 0) == 0
    assert plt(np.zeros((0, 2), dtype=np.int64), 100) == 0


def test_expected_plt_is_the_papers_3_75_percent_for_a_run_of_1280_iterations() -> None:
    # N = 8, K = 2, I = 32 (Fig. 5); the length of the run is not printed and chosen to fit.
    assert expected_plt(8, 2, 32, 1000, 1280 * 1000) == pytest.approx(0.0375)


@pytest.mark.parametrize(("num_experts", "k"), [(8, 1), (8, 2), (16, 4), (4, 4), (6, 3)])
def test_expected_plt_is_what_a_simulated_fault_loses(num_experts: int, k: int) -> None:
    interval, tokens_per_expert = 5, 7
    experts = ExpertLayout(num_layers=3, num_experts=num_experts, ep_size=num_experts // k)
    cursors, live = experts.first_cursors(k), np.zeros((3, num_experts), dtype=np.int64)
    saved = live.copy()
    num_snapshots = 4 * num_experts
    for _ in range(num_snapshots):
        live += interval * tokens_per_expert
        for layer, selected in enumerate(select_sequential(experts, cursors, k)):
            saved[layer, list(selected)] = live[layer, list(selected)]
        cursors = advance(experts, cursors, k)
    tokens_per_iteration = tokens_per_expert * num_experts
    processed = num_snapshots * interval * tokens_per_iteration
    expected = expected_plt(num_experts, k, interval, tokens_per_iteration, processed)
    assert plt(live - saved, processed) == pytest.approx(expected)


def test_nothing_is_expected_to_be_lost_with_all_experts_or_before_the_start() -> None:
    assert expected_plt(8, 8, 32, 1000, 10_000) == 0
    assert expected_plt(8, 2, 32, 1000, 0) == 0


@pytest.mark.parametrize(
    ("k", "num_experts", "share"),
    [
        *((1, 16, 1 / 4), (2, 16, 2 / 4), (4, 16, 3 / 4), (8, 16, 1), (3, 16, 2 / 4)),
        *((1, 6, 1 / 3), (3, 6, 1), (4, 6, 1), (1, 2, 1)),
    ],
)
def test_values_of_k_have_equal_shares_of_the_limit(k: int, num_experts: int, share: float) -> None:
    assert limit_of_k(k, num_experts, 0.04) == pytest.approx(share * 0.04)


FRACTIONS = st.floats(0, 1)


@given(st.integers(1, 64), st.integers(1, 64), FRACTIONS, FRACTIONS, FRACTIONS, FRACTIONS)
def test_k_never_falls_and_one_more_fault_stays_below_its_limit(
    k: int, num_experts: int, accumulated: float, last: float, loss: float, limit: float
) -> None:
    k = min(k, num_experts)

    def expected(k: int) -> float:
        return loss * (num_experts / k - 1)

    raised = next_k(k, num_experts, accumulated, last, expected, limit)
    assert k <= raised <= num_experts
    if raised < num_experts:
        assert accumulated + expected(raised) <= limit_of_k(raised, num_experts, limit) <= limit


def test_plt_of_a_job_is_the_mean_over_layers_of_all_stages() -> None:
    lost, share = job_plt({"layer.0": (5, 5), "layer.1": (0, 2)}, 100)
    assert lost == 12
    assert share == pytest.approx(0.06)


def test_debts_end_when_they_are_paid_or_given_up_and_a_recovery_adds_to_open_ones_alone() -> None:
    one, two = np.array([[3, 0]]), np.array([[1, 2]])
    debts = Debts(tokens=np.zeros((1, 2), np.int64))
    assert debts.owing(0 * one) is debts
    debts = debts.owing(one)
    assert (debts.num_open, debts.num_left) == (3, BOOST_ITERATIONS)
    debts = debts.paid(two)
    assert (debts.tokens.tolist(), debts.num_left) == ([[2, 0]], BOOST_ITERATIONS - 1)
    assert debts.owing(two).tokens.tolist() == [[3, 2]]
    paid = debts.paid(one)
    assert (paid.num_open, paid.num_left) == (0, 0)
    for _ in range(BOOST_ITERATIONS - 1):
        assert debts.num_open == 2
        debts = debts.paid(0 * one)
    assert (debts.num_open, debts.tokens.tolist()) == (0, [[2, 0]])  # given up
    assert debts.owing(two).tokens.tolist() == [[1, 2]]
