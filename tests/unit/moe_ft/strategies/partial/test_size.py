"""Bytes of ranks with partial experts: sums, cases worked out by hand, and the limits that follow."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.paper_models import PRESETS
from benchmarks.paper_sizes import PaperBytes, checkpoint_bytes
from moe_ft.planning.model_size import ModelShape, stage_units
from moe_ft.planning.ownership import SavingLayout, Sharding
from moe_ft.strategies.partial.size import (
    SavedModel,
    Workload,
    largest_hidden_k,
)
from tests.unit.moe_ft.planning.shapes import TINY, shapes

LARGE = PRESETS["gpt-350m-16e"]
SAVED = PaperBytes(weights=0)
# 2 MoE layers of 4 experts with 10 parameters each; 22 others.


def saved(
    shape: ModelShape,
    dp: int,
    ep: int,
    sharding: Sharding | None = None,
    byte_model: PaperBytes = SAVED,
    num_stages: int = 1,
    bucket_parameters: int | None = None,
) -> SavedModel:
    """Return a model and its ranks; with a sharding the optimizer is not distributed."""
    return SavedModel(
        shape=shape,
        stages=tuple(stage_units(shape, num_stages)),
        layout=SavingLayout(
            dp=dp,
            ep=ep,
            sharding=sharding or Sharding.EQUAL,
            is_optimizer_distributed=sharding is None,
        ),
        byte_model=byte_model,
        bucket_parameters=bucket_parameters,
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[SavedModel, int]:
    """Draw a model with one stage, its ranks, and k."""
    ep = draw(st.integers(1, 4))
    shape = draw(shapes(ep))
    byte_model = replace(
        SAVED,
        master_always_full=draw(st.booleans()),
    )
    sharding = draw(st.none() | st.sampled_from(Sharding))
    bucket_parameters = draw(st.none() | st.integers(1, 500))
    model = saved(
        shape,
        ep * draw(st.integers(1, 3)),
        ep,
        sharding,
        byte_model,
        bucket_parameters=bucket_parameters,
    )
    return model, draw(st.integers(1, shape.num_experts))


def snapshots(model: SavedModel, k: int) -> Sequence[Sequence[int]]:
    return model.plan_workload(k).rotation


@settings(max_examples=50)
@given(plans())
def test_ranks_together_save_master_weights_and_moments_once(plan: tuple[SavedModel, int]) -> None:
    model, k = plan
    assert isinstance(model.byte_model, PaperBytes)
    expected = checkpoint_bytes(model.shape, k, model.byte_model)
    assert {sum(of_snapshot) for of_snapshot in snapshots(model, k)} == {expected}


@settings(max_examples=20)
@given(plans(), st.integers(1, 3))
def test_stages_come_one_after_the_other_and_select_on_their_own(
    plan: tuple[SavedModel, int], num_stages: int
) -> None:
    model, k = plan
    model = replace(model, bucket_parameters=None)  # which only the first stage has
    layers = num_stages * model.shape.num_layers
    shape = replace(model.shape, num_layers=layers, moe_layers=tuple(range(layers)))
    stages = tuple(stage_units(shape, num_stages))
    whole = snapshots(replace(model, shape=shape, stages=stages), k)
    one_by_one = [snapshots(replace(model, shape=shape, stages=(units,)), k) for units in stages]
    of_snapshots = zip(*one_by_one, strict=True)
    assert [list(each) for each in whole] == [list(chain(*each)) for each in of_snapshots]


def test_slices_hold_whole_experts_and_leave_some_ranks_with_none() -> None:
    # dp 8, ep 2: of 4 experts on a rank, in 2 layers, each of 4 ranks has one, the last one first.
    # The first snapshot selects expert 0 of layer 0 and expert 2, on the other rank, of layer 1.
    first, *_ = snapshots(saved(TINY, 8, 2), 1)
    others = [22 * (rank + 1) // 8 - 22 * rank // 8 for rank in range(8)]
    elements = list(others)
    elements[3 * 2 + 0] += 10
    elements[1 * 2 + 1] += 10
    assert list(first) == [12 * count for count in elements]


def test_slices_that_do_not_fall_between_experts_share_one() -> None:
    # dp 3: 80 parameters of experts end at 26 and 53, counted from the last one.
    every, *_ = snapshots(saved(TINY, 3, 1), 4)
    assert list(every) == [12 * (26 + 7), 12 * (27 + 7), 12 * (27 + 8)]
    one, *_ = snapshots(saved(TINY, 3, 1), 1)
    # Expert 0 of layer 0 is the last, from 70 to 80; expert 1 of layer 1 from 20 to 30.
    assert list(one) == [12 * (6 + 7), 12 * (4 + 7), 12 * (10 + 8)]


def test_sharding_changes_nothing_where_the_optimizer_is_distributed() -> None:
    models = [saved(LARGE, 16, 8)] * 3
    loads = [
        snapshots(replace(model, layout=replace(model.layout, sharding=sharding)), 4)
        for model, sharding in zip(models, Sharding, strict=True)
    ]
    assert loads[0] == loads[1] == loads[2]


def test_bottleneck_may_have_as_many_times_the_mean_as_ranks_share_an_expert() -> None:
    # 24 experts on 16 ranks: where one is selected, most of it lies on one of them.
    workload = saved(LARGE, 128, 8, byte_model=replace(SAVED, master=0, moments=1)).plan_workload(1)
    others = LARGE.num_non_expert_parameters / 128
    mean = 12 * LARGE.expert_parameters / 128
    assert (workload.bottleneck_bytes - others) / mean == pytest.approx(128 / 12, rel=0.001)


def test_buckets_of_one_expert_divide_it_equally() -> None:
    buckets = LARGE.expert_tensors[0]  # each of the two large tensors fills one
    workload = saved(LARGE, 16, 8, bucket_parameters=buckets).plan_workload(8)
    (first, *_) = workload.rotation
    assert max(first) / min(first) == pytest.approx(1, abs=1e-3)


def test_baseline_leaves_everything_to_the_first_rank_and_group() -> None:
    first, *_ = snapshots(saved(TINY, 4, 2, Sharding.NONE), 2)
    assert list(first) == [12 * (22 + 20), 12 * 20, 0, 0]


def test_adaptive_sharding_fills_the_ranks_with_fewer_experts() -> None:
    # One expert in each of 3 layers on 2 ranks: 20 and 10 elements, 28 others on top.
    shape = replace(TINY, num_layers=3, moe_layers=(0, 1, 2), num_experts=2, moe_ffn_hidden_size=5)
    model = saved(shape, 2, 2, Sharding.ADAPTIVE)
    num_others = shape.num_non_expert_parameters
    level = (num_others + 30) // 2 * 12
    assert [sorted(each) for each in snapshots(model, 1)] == [
        [level, (num_others + 30) * 12 - level]
    ] * 2


def test_adaptive_sharding_takes_whole_experts_for_what_is_one_ranks_only() -> None:
    # As training: where two ranks hold an expert, both count as its savers.
    model = saved(TINY, 4, 2, Sharding.ADAPTIVE)
    first, *_ = snapshots(model, 1)
    assert sum(first) == 12 * (22 + 20)
    assert max(first) > sum(first) / 4


def test_bottleneck_is_the_lowest_rank_of_those_with_the_most() -> None:
    workload = Workload(((3, 5, 2), (1, 2, 7), (2, 7, 1)))
    assert (workload.total_bytes, workload.bottleneck_bytes) == (10, 7)
    assert workload.bottleneck_rank == 1
    assert workload.most_by_rank() == [3, 7, 7]
    assert workload.mean_by_rank() == [2.0, 14 / 3, 10 / 3]


@settings(max_examples=50)
@given(plans(), st.integers(0, 4000))
def test_largest_hidden_k_fits_and_the_next_does_not(
    plan: tuple[SavedModel, int], most_bytes: int
) -> None:
    model, _ = plan
    num_experts = model.shape.num_experts
    hidden = largest_hidden_k(model.plan_workload, num_experts, float(most_bytes))
    fits = partial(_fits, model, most_bytes)
    assert hidden == 0 or fits(hidden)
    assert hidden == num_experts or not fits(hidden + 1)


def _fits(model: SavedModel, most_bytes: int, k: int) -> bool:
    return model.plan_workload(k).bottleneck_bytes <= most_bytes


@settings(max_examples=50)
@given(plans(), st.integers(0, 40000))
def test_automatic_k_is_one_or_hidden(plan: tuple[SavedModel, int], most_bytes: int) -> None:
    model, _ = plan
    # With adaptive sharding non-experts are divided by the selection, of which auto knows nothing.
    assume(model.layout.sharding is not Sharding.ADAPTIVE)
    k = model.automatic_k(most_bytes)
    assert k == 1 or _fits(model, most_bytes, k)
