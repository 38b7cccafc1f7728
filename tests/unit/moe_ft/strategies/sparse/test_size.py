"""Bytes of sparse windows: slices, windows and budgets by hand, and against the strategy that runs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_models import evenly_spaced_layers
from moe_ft.planning.model_size import ByteModel, ModelShape, stage_units
from moe_ft.planning.ownership import SavingLayout, Sharding
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.positions import RankUnits
from moe_ft.strategies.sparse.size import (
    choose_length,
    measure_window,
    position_sizes,
    position_work,
    region_bytes,
)
from moe_ft.strategies.sparse.strategy import MEMORY_MARGIN, SparseStrategy
from moe_ft.strategies.sparse.windows import PositionSizes, snapshot_bytes
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.planning.shapes import TINY

# 2 MoE layers of 4 experts with 10 parameters each; embedding 1, per layer 6 and a router of 4, norm 1.
# The model of examples/quickstart.sh.
QUICKSTART = ModelShape(
    num_layers=4,
    hidden_size=128,
    num_experts=8,
    moe_layers=(0, 1, 2, 3),
    ffn_hidden_size=256,
    num_attention_heads=4,
    vocab_size=256,
    num_positions=0,
    has_output_layer=True,
    is_gated=True,
    has_bias=False,
    has_norm_bias=False,
)
SIX_EQUAL = PositionSizes(full=np.full((1, 6), 12), compute=np.full((1, 6), 2))


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelShape, SavingLayout]:
    """Draw a model, also without experts, and a layout that it can have."""
    ep = draw(st.integers(1, 3))
    num_layers = draw(st.integers(1, 5))
    num_moe_layers = draw(st.integers(0, num_layers))
    shape = ModelShape(
        num_layers=num_layers,
        hidden_size=draw(st.integers(1, 5)),
        num_experts=ep * draw(st.integers(1, 3)),
        moe_layers=evenly_spaced_layers(num_layers, num_moe_layers),
        vocab_size=draw(st.integers(0, 60)),
        num_positions=0,
        has_output_layer=draw(st.booleans()),
    )
    layout = SavingLayout(
        dp=ep * draw(st.integers(1, 3)),
        ep=ep,
        sharding=draw(st.sampled_from((Sharding.NONE, Sharding.EQUAL))),
        is_optimizer_distributed=draw(st.booleans()),
    )
    return shape, layout


def stages_of(shape: ModelShape, layout: SavingLayout, num_stages: int = 1) -> list[PositionSizes]:
    return [position_sizes(each, layout, ByteModel()) for each in stage_units(shape, num_stages)]


def test_positions_of_a_tiny_model_are_those_laid_out_by_hand() -> None:
    (sizes,) = stages_of(TINY, SavingLayout(dp=2, ep=2))
    # Two experts of both layers each; then norm, layer 1, its router, layer 0, its router, embedding. The
    # buffer begins with the norm: its first half is layer 1's, and the two halves are interleaved.
    rank_0, rank_1 = [10, 10, 10, 10, 1, 0, 6, 0, 4, 0], [10, 10, 10, 10, 0, 6, 0, 4, 0, 1]
    assert sizes.full.tolist() == [[12 * n for n in rank_0], [12 * n for n in rank_1]]
    assert sizes.compute.tolist() == [[2 * n for n in rank_0], [2 * n for n in rank_1]]


def test_ranks_with_the_same_experts_own_whole_ones_from_the_end_on() -> None:
    (sizes,) = stages_of(TINY, SavingLayout(dp=4, ep=2))
    experts = (sizes.full[:, :4] // 12).tolist()
    assert experts == [[0, 10, 0, 10]] * 2 + [[10, 0, 10, 0]] * 2


def test_ranks_without_a_distributed_optimizer_divide_from_the_beginning_on() -> None:
    layout = SavingLayout(dp=2, ep=1, is_optimizer_distributed=False)
    (sizes,) = stages_of(TINY, layout)
    # Of both halves in turn the first rank has those of the first.
    assert (sizes.full[0, :8] // 12).tolist() == [10, 0] * 4


def test_first_of_the_ranks_saves_everything_without_sharding() -> None:
    layout = SavingLayout(dp=4, ep=2, is_optimizer_distributed=False, sharding=Sharding.NONE)
    (sizes,) = stages_of(TINY, layout)
    assert (sizes.full.sum(axis=1) // 12).tolist() == [62, 40, 0, 0]


def test_windows_of_the_quickstart_model_have_the_bytes_that_a_run_logged() -> None:
    # Events "window" of examples/quickstart.sh --moe-ft-strategy sparse --moe-ft-window 3.
    stages = stages_of(QUICKSTART, SavingLayout(dp=2, ep=2), 2)
    window = measure_window(stages, 3)
    of_ranks = [
        snapshot_bytes(stage, cuts.ends).tolist()
        for stage, cuts in zip(stages, window.cuts, strict=True)
    ]
    assert of_ranks == [
        [[3705344, 4295168, 4537344]] * 2,
        [[3705472, 4295296, 4538112]] * 2,
    ]


@given(models())
def test_ranks_together_save_every_parameter_once(model: tuple[ModelShape, SavingLayout]) -> None:
    shape, layout = model
    (sizes,) = stages_of(shape, layout)
    assert sizes.full.sum() == shape.num_parameters * 12
    assert sizes.compute.sum() == shape.num_parameters * 2


@given(models(), st.integers(0, 99))
def test_popularity_moves_the_experts_of_a_rank_and_nothing_else(
    model: tuple[ModelShape, SavingLayout], seed: int
) -> None:
    shape, layout = model
    (units,) = stage_units(shape, 1)
    plain = position_sizes(units, layout, ByteModel())
    drawn = position_sizes(units, layout, ByteModel(), np.random.default_rng(seed))
    num_experts = shape.num_moe_layers * shape.num_experts // layout.ep
    assert np.array_equal(plain.full[:, num_experts:], drawn.full[:, num_experts:])
    assert np.array_equal(
        np.sort(plain.full[:, :num_experts]), np.sort(drawn.full[:, :num_experts])
    )


def test_ranks_with_the_same_experts_have_them_in_the_same_order() -> None:
    (units,) = stage_units(TINY, 1)
    layout = SavingLayout(dp=4, ep=2)
    sizes = position_sizes(units, layout, ByteModel(), np.random.default_rng(3))
    together = sizes.full[:2, :4] + sizes.full[2:, :4]
    assert together.tolist() == [[120] * 4] * 2


@given(models(), st.integers(1, 5), st.booleans())
def test_windows_are_those_of_the_strategy_that_runs(
    model: tuple[ModelShape, SavingLayout], length: int, is_grouped: bool
) -> None:
    shape, layout = model
    layout = replace(layout, is_optimizer_distributed=True)
    (units,) = stage_units(shape, 1)
    layers = [f"layer.{layer}" for layer in shape.moe_layers]
    ranks = [rank_units(units, shape, layout, rank) for rank in range(layout.dp)]
    ranks = [replace(each, grouped_layers=frozenset(layers * is_grouped)) for each in ranks]
    flags = SparseConfig(window=str(length), max_window=8)
    plan = SparseStrategy(0, ranks, layers, flags).plan_window(0)
    sizes = position_sizes(
        units, layout, ByteModel(), np.random.default_rng(0), is_grouped=is_grouped
    )
    window = measure_window([sizes], length)
    actual = [
        sum(ranks[0].sizes[unit][level is Level.COMPUTE] for unit, level in snapshot.levels.items())
        for snapshot in plan.snapshots
    ]
    assert actual == snapshot_bytes(sizes, window.cuts[0].ends)[0].tolist()
    assert plan.facts["largest_bytes"] == window.largest_bytes


def rank_units(
    units: dict[UnitId, int], shape: ModelShape, layout: SavingLayout, rank: int
) -> RankUnits:
    """Return the units of a rank as the engine finds them: slices of buffers that begin at the end."""
    ep_rank = rank % layout.ep
    num_local = shape.num_experts // layout.ep
    experts = [each for each in units if each.kind is UnitKind.EXPERT]
    own = [each for each in experts if each.expert // num_local == ep_rank][::-1]
    others = [each for each in units if each.kind is not UnitKind.EXPERT][::-1]
    sizes = {}
    for names, place, count in (
        (own, rank // layout.ep, layout.num_groups),
        (others, rank, layout.dp),
    ):
        slices = assign_equal_slices([units[name] for name in names], count)[place]
        for name, (start, end) in zip(names, slices, strict=True):
            sizes[name] = (12 * (end - start), 2 * (end - start))
    return RankUnits(ep_rank=ep_rank, sizes=sizes)


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


@settings(max_examples=40)
@given(models(), st.integers(1, 5), st.booleans())
def test_region_is_that_of_the_strategy_that_runs(
    model: tuple[ModelShape, SavingLayout], longest: int, is_grouped: bool
) -> None:
    shape, layout = model
    layout = replace(layout, is_optimizer_distributed=True)
    (units,) = stage_units(shape, 1)
    layers = [f"layer.{layer}" for layer in shape.moe_layers]
    ranks = [rank_units(units, shape, layout, rank) for rank in range(layout.dp)]
    ranks = [replace(each, grouped_layers=frozenset(layers * is_grouped)) for each in ranks]
    flags = SparseConfig(max_window=longest)
    reserved = []
    for rank, own in enumerate(ranks):
        strategy = SparseStrategy(rank, ranks, layers, flags)
        largest = max(
            sum(
                own.sizes[unit][level is Level.COMPUTE]
                for snapshot in window.snapshots
                for unit, level in snapshot.levels.items()
            )
            for window in strategy.possible_windows()
        )
        reserved.append(largest * (1 + strategy.memory_margin))
    sizes = position_sizes(
        units, layout, ByteModel(), np.random.default_rng(0), is_grouped=is_grouped
    )
    assert region_bytes([sizes], longest, MEMORY_MARGIN) == pytest.approx(max(reserved), abs=1)


def test_work_of_a_position_is_what_a_token_passes_through() -> None:
    (units,) = stage_units(TINY, 1)
    work = position_work(units, SavingLayout(dp=4, ep=2), 2 / 4)
    # Each position has an expert of both expert-parallel ranks; the embedding is looked up.
    assert sorted(work[:4]) == [10.0] * 4
    assert sorted(work[4:]) == [0, 1, 4, 4, 6, 6]
    owned = position_sizes(units, SavingLayout(dp=4, ep=2), ByteModel()).full[:, 4:].sum(axis=0)
    assert [size // 12 for size in owned] == [max(1, size) for size in work[4:]]


def test_work_of_a_module_is_where_the_first_of_its_experts_is() -> None:
    (units,) = stage_units(TINY, 1)
    # One owner: two modules of two experts; two owners of a module each have their experts in turn.
    alone, shared = SavingLayout(dp=2, ep=2), SavingLayout(dp=4, ep=2)
    assert position_work(units, alone, 0.5, is_grouped=True)[:4].tolist() == [20, 0, 20, 0]
    assert position_work(units, shared, 0.5, is_grouped=True)[:4].tolist() == [20, 20, 0, 0]
