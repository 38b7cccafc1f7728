"""Bytes of sparse windows: slices, windows and budgets by hand, and against the strategy that runs."""

import numpy as np
import pytest

from moe_ft.strategies.sparse.plan import (
    choose_length,
    measure_window,
    order_stage,
    position_work,
    region_bytes,
)
from moe_ft.strategies.sparse.strategy import MEMORY_MARGIN, SparseConfig, SparseStrategy
from moe_ft.strategies.sparse.windows import PositionSizes, rank_units, snapshot_bytes
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.planning.described import SMALL, planned_job

SIX_EQUAL = PositionSizes(full=np.full((1, 6), 12), compute=np.full((1, 6), 2))


def test_windows_of_the_quickstart_model_have_the_bytes_that_a_run_logged() -> None:
    # Events "window" of examples/quickstart.sh --moe-ft-strategy sparse --moe-ft-window 3.
    job = planned_job(*SMALL, world_size=4)
    stages = [order_stage(stage, 8, 0, is_grouped=False).sizes for stage in job.stages]
    window = measure_window(stages, 3)
    of_ranks = [
        snapshot_bytes(stage, cuts.ends).tolist()
        for stage, cuts in zip(stages, window.cuts, strict=True)
    ]
    assert of_ranks == [
        [[3705344, 4295168, 4537344]] * 2,
        [[3705472, 4295296, 4538112]] * 2,
    ]


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("world_size", [4, 8])
def test_windows_and_regions_are_those_of_the_strategy_that_runs(
    world_size: int, is_grouped: bool
) -> None:
    stage = planned_job(*SMALL, world_size=world_size).stages[0]
    layers = sorted({unit.layer_name for unit in stage.elements if unit.expert >= 0})
    grouped = frozenset(layers if is_grouped else ())
    ranks = [rank_units(rank.ep_rank, rank, grouped) for rank in stage.ranks]
    sizes = order_stage(stage, 8, 0, is_grouped=is_grouped).sizes
    reserved = []
    for rank, own in enumerate(ranks):
        options = SparseConfig(window="3", max_window=3)
        strategy = SparseStrategy(rank, ranks, layers, options)
        window = strategy.plan_window(0)
        assert window.facts["largest_bytes"] == measure_window([sizes], 3).largest_bytes
        region = max(
            sum(
                own.sizes[unit][level is Level.COMPUTE]
                for snapshot in each.snapshots
                for unit, level in snapshot.levels.items()
            )
            for each in strategy.possible_windows()
        )
        reserved.append(region * (1 + strategy.memory_margin))
    planned = region_bytes([sizes], 3, MEMORY_MARGIN, shortest=3)
    assert planned == pytest.approx(max(reserved), abs=1)


def test_six_equal_operators_have_the_snapshots_of_figure_6() -> None:
    window = measure_window([SIX_EQUAL], 3)
    assert window.snapshots == (32, 28, 24)
    assert (window.window_bytes, window.dense_bytes) == (84, 72)
    assert (window.largest_bytes, window.mean_bytes, window.length) == (32, 28, 3)


def test_sizes_are_those_of_the_heaviest_rank_and_stage() -> None:
    light = PositionSizes(full=np.array([[6, 6], [0, 24]]), compute=np.array([[1, 1], [0, 4]]))
    heavy = PositionSizes(full=np.array([[30]]), compute=np.array([[5]]))
    window = measure_window([light, heavy], 2)
    # Light: {6 + 1, 6} and {0 + 4, 24}; heavy: everything in the first snapshot.
    assert window.snapshots == (30, 24)
    assert window.window_bytes == 30
    assert window.dense_bytes == 30


@pytest.mark.parametrize(
    ("budget", "length"), [(72, 1), (71, 2), (42, 2), (41, 3), (32, 3), (31, 4), (12, 6)]
)
def test_window_is_the_shortest_that_fits_every_stage(budget: int, length: int) -> None:
    small = PositionSizes(full=np.array([[1]]), compute=np.array([[1]]))
    assert choose_length([small, SIX_EQUAL], budget, 8) == length


@pytest.mark.parametrize(("longest", "length"), [(2, 2), (4, 4), (9, 6)])
def test_window_is_the_longest_if_none_fits(longest: int, length: int) -> None:
    assert choose_length([SIX_EQUAL], 1, longest) == length


def test_region_holds_the_longest_window_and_the_margin() -> None:
    # By chance 72 bytes at FULL, and 12 at COMPUTE in half of the other snapshots.
    assert region_bytes([SIX_EQUAL], 1, 0.0) == 72
    assert region_bytes([SIX_EQUAL], 3, 0.0) == 84
    assert region_bytes([SIX_EQUAL], 3, 0.1) == 93


def test_region_is_made_for_the_first_order_where_that_takes_more() -> None:
    # A large unit in the last place is at COMPUTE in the other snapshot: 1 + 8, then 12; by chance 17.5.
    sizes = PositionSizes(full=np.array([[1, 12]]), compute=np.array([[1, 8]]))
    assert region_bytes([sizes], 2, 0.0) == 21


def test_work_of_a_position_is_what_a_token_passes_through() -> None:
    stage = planned_job(*SMALL, world_size=4).stages[0]
    expert = max(count for unit, count in stage.elements.items() if unit.expert >= 0)
    embedding = UnitId(kind=UnitKind.EMBEDDING)
    others = [
        count * (unit != embedding) for unit, count in stage.elements.items() if unit.expert < 0
    ]
    order = order_stage(stage, 8, 0, is_grouped=False)
    work = position_work(order, stage.elements, 2 / 8, is_grouped=False)
    # Each position has an expert of both expert-parallel ranks; the embedding is looked up.
    assert work[:8].tolist() == [2 * expert / 4] * 8
    assert sorted(work[8:].tolist()) == sorted(others)


def test_work_of_a_module_is_where_the_first_of_its_experts_is() -> None:
    stage = planned_job(*SMALL, world_size=4).stages[0]
    order = order_stage(stage, 8, 0, is_grouped=True)
    work = position_work(order, stage.elements, 2 / 8, is_grouped=True)
    assert [place for place, each in enumerate(work[:8]) if each] == [0, 4]
