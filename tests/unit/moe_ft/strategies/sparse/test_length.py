"""The length of sparse windows, and how ranks agree on it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.strategies.sparse.strategy import SparseStrategy
from moe_ft.strategies.sparse.windows import RankUnits
from tests.unit.moe_ft.strategies.sparse.stages import (
    LARGEST,
    SEEDS,
    SIZES,
    Stage,
    by_hand,
    options_of,
    stages,
    values,
)


def test_largest_snapshots_of_the_stage_by_hand_are_those_that_the_tests_assume() -> None:
    found = [by_hand(window=length).plan()[0].facts["largest_bytes"] for length in range(1, 6)]
    assert found == LARGEST


def test_window_is_the_longest_until_something_was_measured() -> None:
    stage = by_hand(window=None, longest=4)
    for _ in range(3):
        stage.agree(None)
    assert stage.window == 4


@pytest.mark.parametrize(
    ("budget", "length"), [(1400, 1), (780, 2), (777, 3), (556, 3), (468, 4), (466, 5)]
)
def test_window_is_the_shortest_whose_snapshots_fit_with_some_room(
    budget: int, length: int
) -> None:
    assert by_hand(window=None).settle(budget) == length


def test_window_grows_as_soon_as_a_snapshot_does_not_fit_any_more() -> None:
    stage = by_hand(window=None)
    assert stage.settle(780) == 2
    assert stage.settle(699) == 3


def test_window_does_not_swing_while_the_budget_varies_a_little() -> None:
    stage = by_hand(window=None)
    stage.settle(780)
    found = {stage.settle(budget, 1) for budget in (750, 785, 760, 775, 755, 790, 780)}
    assert found == {2}


def test_stage_that_needs_the_longest_window_decides() -> None:
    stage = by_hand(window=None)
    stage.settle(1400)
    assert stage.agree(1400, wanted_elsewhere=5) == [{"window": 5}]
    assert stage.window == 5


@settings(max_examples=20)
@given(stages(window=st.none()), st.lists(st.integers(1, 40_000), min_size=1, max_size=8))
def test_all_ranks_have_the_same_length_within_its_limits_after_every_agreement(
    stage: Stage, budgets: list[int]
) -> None:
    longest = stage.window
    for budget in budgets:
        stage.agree(budget)
        assert 1 <= stage.window <= longest
        assert {len(window.snapshots) for window in stage.plan()} == {stage.window}


@settings(max_examples=20)
@given(stages(window=st.none()), SEEDS)
def test_window_that_was_agreed_on_fits_the_budget_if_any_does(
    stage: Stage, seed: random.Random
) -> None:
    def largest(length: int) -> int:
        config = options_of(window=length, longest=length)
        fixed = SparseStrategy(0, stage.ranks, stage.layers, config)
        return int(fixed.plan_window(0).facts["largest_bytes"])

    possible = [largest(length) for length in range(1, stage.window + 1)]
    budget = seed.randint(min(possible), 2 * max(possible))
    assert possible[stage.settle(budget) - 1] <= budget


def test_fixed_length_is_not_agreed_on() -> None:
    stage = by_hand(window=3)
    assert values(stage.strategies[0], 1.0, 1.0) == []
    assert stage.agree(1) == [{}]
    assert stage.window == 3


@pytest.mark.parametrize(("copied", "flow"), [(None, 5e9), (5e9, None), (None, None)])
def test_longest_window_is_wanted_until_both_parts_were_measured(
    copied: float | None, flow: float | None
) -> None:
    strategy = by_hand(window=None).strategies[0]
    assert values(strategy, copied, flow) == [-8]
    assert values(strategy, 5e9, 5e9) == [-1]


@pytest.mark.parametrize(("copied", "flow"), [(780.0, 900.0), (900.0, 780.0)])
def test_budget_is_the_lesser_of_both_parts(copied: float, flow: float) -> None:
    strategy = by_hand(window=None).strategies[0]
    assert values(strategy, copied, flow) == [-2]
    assert strategy.plan_window(0).facts["budget_bytes"] == 780


def test_rank_that_saves_nothing_does_not_hold_up_the_others() -> None:
    # It will never measure anything.
    nothing = dict.fromkeys(SIZES, (0, 0))
    ranks = [RankUnits(ep_rank=0, sizes=sizes) for sizes in (SIZES, nothing)]
    stage = Stage(ranks, 2, 2, options_of(window=None, longest=8))
    for _ in range(3):
        stage.agree(1400, None)
    assert stage.window == 1


def test_rank_wants_what_its_own_snapshots_need() -> None:
    # Of two ranks with the same units, one copies half as fast.
    ranks = [RankUnits(ep_rank=0, sizes=SIZES)] * 2
    stage = Stage(ranks, 2, 2, options_of(window=None, longest=8))
    fast, slow = stage.strategies
    assert values(fast, 1400, 1400) == [-1]
    assert values(slow, 700, 700) == [-3]
