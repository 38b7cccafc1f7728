"""Sparse windows: every unit FULL once, COMPUTE before it, the same on all ranks, and never too large."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from moe_ft.strategies.sparse.strategy import SparseStrategy
from moe_ft.strategies.sparse.windows import RankUnits
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.strategies.sparse.stages import (
    DENSE,
    EMBEDDING,
    NORM,
    NUMBER_OF_TIGHT_STAGE,
    REFUSED,
    ROUTERS,
    SEEDS,
    SIZES,
    UNITS,
    Stage,
    by_hand,
    counts_of,
    expert,
    groups,
    options_of,
    order,
    positions,
    random_stage,
    stages,
    window_bytes,
)


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_every_unit_of_a_rank_is_full_once_and_compute_in_all_snapshots_before_it_only(
    stage: Stage, seed: random.Random
) -> None:
    for iteration in range(3):
        for rank, window in zip(stage.ranks, stage.plan(iteration), strict=True):
            full_at = positions(window)
            assert set(full_at) == set(rank.sizes)
            for unit, position in full_at.items():
                levels = [each.levels.get(unit) for each in window.snapshots]
                rest = len(levels) - position - 1
                assert levels == [Level.COMPUTE] * position + [Level.FULL] + [None] * rest
        stage.count(counts_of(stage, seed))


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_all_ranks_have_a_shared_unit_at_full_in_the_same_snapshot(
    stage: Stage, seed: random.Random
) -> None:
    for iteration in range(3):
        found: dict[UnitId, set[int]] = {}
        for window in stage.plan(iteration):
            for unit, position in positions(window).items():
                found.setdefault(unit, set()).add(position)
        assert all(len(places) == 1 for places in found.values())
        stage.count(counts_of(stage, seed))


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_plans_of_one_key_are_equal_and_those_of_others_differ(
    stage: Stage, seed: random.Random
) -> None:
    # The engine keeps the layout of each key.
    strategy = stage.strategies[-1]
    found: dict[Any, list[Any]] = {}
    for iteration in range(4):
        window = strategy.plan_window(iteration)
        strategy.note_begun(window)
        levels = [list(each.levels.items()) for each in window.snapshots]
        assert found.setdefault(window.key, levels) == levels
        strategy.add_tokens(counts_of(stage, seed))


def limits_of(stage: Stage) -> list[float]:
    """Return ``[rank]`` what the memory is made for."""
    return [
        max(sum(window_bytes(window, rank.sizes)) for window in strategy.possible_windows())
        * (1 + strategy.memory_margin)
        for rank, strategy in zip(stage.ranks, stage.strategies, strict=True)
    ]


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_no_window_takes_more_memory_than_the_possible_ones_and_the_margin_whatever_the_order(
    stage: Stage, seed: random.Random
) -> None:
    limits = limits_of(stage)
    for iteration in range(4):
        stage.settle(seed.choice([1, 3_000, 30_000, 10**6]))
        stage.count(counts_of(stage, seed))
        for rank, window, limit in zip(stage.ranks, stage.plan(iteration), limits, strict=True):
            assert sum(window_bytes(window, rank.sizes)) <= limit


def test_window_that_grows_after_a_change_of_the_order_fits_into_memory() -> None:
    # In a window of one snapshot every order takes the same.
    stage = random_stage(NUMBER_OF_TIGHT_STAGE, None)
    limits = limits_of(stage)
    assert stage.settle(10**6) == 1
    stage.count(REFUSED)
    stage.plan()
    stage.settle(1)
    for rank, window, limit in zip(stage.ranks, stage.plan(), limits, strict=True):
        assert sum(window_bytes(window, rank.sizes)) <= limit


@settings(max_examples=20)
@given(stages())
def test_last_window_of_a_training_holds_everything_at_once(stage: Stage) -> None:
    for rank, window in zip(stage.ranks, stage.plan(7, is_whole=True), strict=True):
        (snapshot,) = window.snapshots
        assert dict(snapshot.levels) == dict.fromkeys(rank.sizes, Level.FULL)


@settings(max_examples=20)
@given(stages())
def test_possible_windows_are_the_longest_that_may_be_chosen_and_the_last_one(stage: Stage) -> None:
    for strategy in stage.strategies:
        longest, last = strategy.possible_windows()
        assert longest == strategy.plan_window(0)
        assert last == strategy.plan_window(1, is_whole=True)


# A stage worked by hand


def test_experts_come_first_and_the_rest_from_back_to_front() -> None:
    found = order(by_hand())
    assert set(found[: len(UNITS)]) == set(UNITS)
    assert found[len(UNITS) :] == [
        NORM,
        DENSE[1],
        ROUTERS[1],
        DENSE[0],
        ROUTERS[0],
        EMBEDDING,
    ]


def test_parts_of_a_multi_token_prediction_layer_come_before_those_of_the_decoder() -> None:
    mtp = UnitId(kind=UnitKind.NON_EXPERT, block="mtp", layer=0)
    output, other = UnitId(kind=UnitKind.OUTPUT), UnitId(kind=UnitKind.OTHER)
    sizes = {unit: (12, 2) for unit in (EMBEDDING, DENSE[1], mtp, other, NORM, output)}
    config = options_of(window=1, longest=1)
    stage = Stage([RankUnits(ep_rank=0, sizes=sizes)], 0, 0, config)
    window = stage.strategies[0].possible_windows()[0]
    assert list(window.snapshots[0].levels) == [output, NORM, other, mtp, DENSE[1], EMBEDDING]


def test_experts_of_layers_in_which_nothing_is_counted_come_first() -> None:
    config = options_of(window=1, longest=1)
    strategy = SparseStrategy(0, [RankUnits(ep_rank=0, sizes=SIZES)], ["layer.0"], config)
    strategy.add_tokens(np.array([[2, 1]]))
    (snapshot,) = strategy.plan_window(0).snapshots
    assert list(snapshot.levels)[:4] == [expert(1, 0), expert(1, 1), expert(0, 1), expert(0, 0)]


def test_ranks_of_one_expert_parallel_rank_order_alike_and_others_their_own() -> None:
    # Ranks 0 and 1 have the even experts, ranks 2 and 3 the odd ones.
    def units(ep_rank: int) -> RankUnits:
        own = {expert(0, number): (12, 2) for number in range(ep_rank, 4, 2)}
        return RankUnits(ep_rank=ep_rank, sizes=own)

    stage = Stage([units(rank // 2) for rank in range(4)], 1, 4, options_of(window=2, longest=2))
    stage.count([[5, 1, 3, 4]])
    found = [[unit.expert for group in groups(each) for unit in group] for each in stage.plan()]
    assert found == [[2, 0], [2, 0], [1, 3], [1, 3]]


# Which iterations are whole


@pytest.mark.parametrize("window", [1, 2])
def test_only_a_window_of_one_snapshot_leaves_its_iteration_whole(window: int) -> None:
    strategy = by_hand(window=window).strategies[0]
    strategy.note_complete(strategy.plan_window(5), 6)
    assert strategy.is_whole(6) == (window == 1)
    assert not strategy.is_whole(5)


def test_last_window_leaves_its_iteration_whole_when_all_ranks_have_it() -> None:
    strategy = by_hand(window=3).strategies[0]
    plan = strategy.plan_window(9, is_whole=True)
    assert not strategy.is_whole(9)
    strategy.note_complete(plan, 9)
    assert strategy.is_whole(9)
