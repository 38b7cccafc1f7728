"""The order of units in sparse windows: experts that freeze together, and when it changes."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.strategies.sparse.windows import RankUnits
from tests.unit.moe_ft.strategies.sparse.stages import (
    EMBEDDING,
    LARGEST,
    NORM,
    NUMBER_OF_TIGHT_STAGE,
    REFUSED,
    SEEDS,
    TAKEN,
    Stage,
    by_hand,
    counts_of,
    expert,
    groups,
    options_of,
    order,
    positions,
    random_stage,
)

# Experts that freeze only together


def grouped_stage(num_layers: int, num_local: int, window: int, num_owners: int = 1) -> Stage:
    """Return a stage of two expert-parallel ranks, whose equal experts so many ranks share layer by layer."""
    layers = frozenset(f"layer.{layer}" for layer in range(num_layers))
    ranks = []
    for ep_rank in range(2):
        own = range(ep_rank * num_local, (ep_rank + 1) * num_local)
        for owner in range(num_owners):
            sizes = {
                expert(layer, each): (12, 2)
                if layer * num_owners // num_layers == owner
                else (0, 0)
                for layer in range(num_layers)
                for each in own
            }
            ranks.append(RankUnits(ep_rank=ep_rank, sizes=sizes, grouped_layers=layers))
    config = options_of(window=window, longest=window)
    return Stage(ranks, num_layers, 2 * num_local, config)


def frozen_modules(stage: Stage, rank: int = 0) -> list[list[int]]:
    """Return ``[replay]`` the layers of which a rank has no expert at FULL yet."""
    full_at = positions(stage.plan()[rank])
    first = {
        layer: min(own for unit, own in full_at.items() if unit.layer == layer)
        for layer in {unit.layer for unit in full_at}
    }
    num_replays = max(full_at.values())
    return [
        sorted(layer for layer, own in first.items() if own > replay)
        for replay in range(num_replays)
    ]


def test_modules_are_frozen_from_the_most_popular_on_in_every_replay() -> None:
    stage = grouped_stage(num_layers=4, num_local=4, window=4)
    # Of the second expert-parallel rank's tokens each layer has what the first one's has not.
    stage.count([[1, 0, 0, 99] + [25] * 4, [20] * 4 + [5] * 4, [4] * 4 + [21] * 4, [9] * 8])
    # The first rank's shares are 0.5, 0.8, 0.16 and 0.5, the second's the rest: 0.5, 0.2, 0.84 and 0.5.
    assert frozen_modules(stage) == [[0, 1, 3], [1, 3], [1]]
    assert frozen_modules(stage, 1) == [[0, 2, 3], [2, 3], [2]]


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), SEEDS)
def test_with_groups_of_modules_no_replay_freezes_a_module_less_than_can_be(
    num_layers: int, num_local: int, window: int, num_owners: int, seed: random.Random
) -> None:
    # A border between two groups divides one module of each owner at most.
    stage = grouped_stage(num_layers, num_local, window, num_owners)
    stage.count(counts_of(stage, seed))
    plans = stage.plan()
    for rank, plan in enumerate(plans):
        full_at = positions(plan)
        for replay, frozen in enumerate(frozen_modules(stage, rank)):
            num_frozen = sum(own > replay for own in full_at.values())
            assert num_frozen - num_local * len(frozen) <= num_owners * (num_local - 1)


def test_grouped_experts_make_no_snapshot_larger_where_one_rank_has_them_all() -> None:
    for window in range(1, 6):
        grouped, single = by_hand(window=window), by_hand(window=window, is_grouped=True)
        facts = [stage.plan()[0].facts["largest_bytes"] for stage in (grouped, single)]
        assert facts == [LARGEST[window - 1]] * 2


# When the order changes


def test_order_stays_while_popularity_has_not_moved() -> None:
    stage = by_hand()
    stage.count([[60, 40], [55, 45]])
    before = order(stage)
    for _ in range(5):
        stage.count([[62, 38], [53, 47]])  # less than ten percent of each
        (window,) = stage.plan()
        assert not window.facts["reordered"]
        assert [unit for group in groups(window) for unit in group] == before


def test_order_changes_when_a_quarter_of_the_experts_has_moved() -> None:
    stage = by_hand()
    stage.count([[60, 40], [55, 45]])
    stage.plan()
    stage.count([[60, 40], [20, 80]])  # two of four
    assert stage.plan()[0].facts["reordered"]
    assert order(stage)[:4] == [expert(1, 0), expert(0, 1), expert(0, 0), expert(1, 1)]


def test_popularity_is_counted_since_the_order_was_made() -> None:
    stage = by_hand()
    stage.count([[1000, 1], [1, 1]])
    stage.plan()
    stage.count([[1, 2], [1, 2]])  # with the tokens before, nothing would have moved
    assert stage.plan()[0].facts["reordered"]
    assert order(stage)[:4] == [expert(0, 0), expert(1, 0), expert(0, 1), expert(1, 1)]


def test_order_is_not_said_to_have_changed_where_it_comes_out_the_same() -> None:
    stage = by_hand()
    stage.count([[1, 9], [1, 9]])
    stage.plan()
    stage.count([[4, 6], [4, 6]])  # moved, and ascending as before
    assert not stage.plan()[0].facts["reordered"]


def test_order_that_needs_more_memory_than_there_is_is_not_taken_and_said_to_be_refused() -> None:
    stage = random_stage(NUMBER_OF_TIGHT_STAGE, None)
    before = [groups(window) for window in stage.plan()]
    stage.count(REFUSED)
    after = stage.plan()
    assert [groups(window) for window in after] == before
    for window in after:
        assert window.facts["reorder_refused"] and not window.facts["reordered"]


def test_order_that_was_refused_is_tried_again_with_all_that_was_counted() -> None:
    stage = random_stage(NUMBER_OF_TIGHT_STAGE, None)
    stage.count(REFUSED)
    for _ in range(2):  # popularity has not moved in between
        assert stage.plan()[0].facts["reorder_refused"]
    stage.count(TAKEN)
    (facts, _) = (window.facts for window in stage.plan())
    assert facts["reordered"] and not facts["reorder_refused"]


@pytest.mark.parametrize("window", [2, 3, 4])
def test_popularity_decides_the_order_where_each_data_parallel_rank_has_some_of_the_layers(
    window: int,
) -> None:
    # That is how the distributed optimizer divides a stage: every rank gets a run of its parameters.
    large, nothing = (12_000, 2_000), (0, 0)
    ranks = [
        RankUnits(
            ep_rank=0,
            sizes={
                expert(layer, number): large if layer // 2 == dp_rank else nothing
                for layer in range(4)
                for number in range(8)
            },
        )
        for dp_rank in range(2)
    ]
    for number in range(5):
        stage = Stage(ranks, 4, 8, options_of(window=window, longest=8))
        stage.count(np.random.default_rng(number).gamma(1, size=(4, 8)) * 1000)
        assert stage.plan()[0].facts["reordered"]


def test_stage_without_experts_is_planned_and_reordered_by_nothing() -> None:
    sizes = {EMBEDDING: (120, 20), NORM: (12, 2)}
    stage = Stage([RankUnits(ep_rank=0, sizes=sizes)], 0, 0, options_of(window=2, longest=2))
    stage.count(np.zeros((0, 0)))
    assert groups(stage.plan()[0]) == [[NORM], [EMBEDDING]]
