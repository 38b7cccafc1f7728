"""MoC-System's arithmetic: what ranks save adds up, and is what the paper says where that follows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers.models import PRESETS, ModelShape, Sharding
from benchmarks.papers.sizes import (
    NonExpertUnit,
    PaperBytes,
    PaperLayout,
    assign_greedy,
    checkpoint_bytes,
    paper_workload,
    rank_bytes,
    reduction,
)
from tests.unit.benchmarks.shapes import TINY, shapes

LARGE = PRESETS["gpt-350m-16e"]
MASTER_IN_FULL = PaperBytes(master_always_full=True)
CASES = [(8, 8), (16, 16), (16, 8)]

# 2 MoE layers of 4 experts with 10 parameters each (width 1, no biases), 22 others.
TINY_OTHERS = 1 + 2 * (4 + 2 + 4) + 1  # embedding; per layer attention, two norms, router; norm


@st.composite
def plans(draw: st.DrawFn) -> tuple[ModelShape, int, PaperBytes, PaperLayout]:
    ep = draw(st.integers(1, 4))
    shape = draw(shapes(ep))
    byte_model = PaperBytes(
        weights_always_full=draw(st.booleans()),
        master_always_full=draw(st.booleans()),
        moments_always_full=draw(st.booleans()),
    )
    layout = PaperLayout(
        dp=ep * draw(st.integers(1, 3)),
        ep=ep,
        sharding=draw(st.sampled_from(Sharding)),
        is_optimizer_distributed=draw(st.booleans()),
        non_expert_unit=draw(st.sampled_from(NonExpertUnit)),
    )
    return shape, draw(st.integers(1, shape.num_experts)), byte_model, layout


def most(k: int, case: tuple[int, int], sharding: Sharding, **changes: object) -> int:
    """Return the bottleneck of GPT-350M-16E with the bytes that the paper's measurements imply."""
    layout = PaperLayout(dp=case[0], ep=case[1], sharding=sharding)
    layout = replace(layout, **changes)  # type: ignore[arg-type]
    return paper_workload(LARGE, k, MASTER_IN_FULL, layout).bottleneck_bytes


@given(plans())
def test_ranks_together_save_the_checkpoint_once(
    plan: tuple[ModelShape, int, PaperBytes, PaperLayout],
) -> None:
    shape, k, byte_model, layout = plan
    for of_snapshot in paper_workload(shape, k, byte_model, layout).rotation:
        assert sum(of_snapshot) == checkpoint_bytes(shape, k, byte_model)


@given(plans())
def test_adaptive_sharding_never_has_a_heavier_bottleneck_than_equal_sharding(
    plan: tuple[ModelShape, int, PaperBytes, PaperLayout],
) -> None:
    shape, k, byte_model, layout = plan
    layout = replace(layout, non_expert_unit=NonExpertUnit.ELEMENT)
    equal, adaptive = (
        paper_workload(shape, k, byte_model, replace(layout, sharding=sharding)).bottleneck_bytes
        for sharding in (Sharding.EQUAL, Sharding.ADAPTIVE)
    )
    assert adaptive <= equal


@given(plans())
def test_full_checkpoint_is_every_parameter_in_all_its_bytes(
    plan: tuple[ModelShape, int, PaperBytes, PaperLayout],
) -> None:
    shape, _, byte_model, _ = plan
    full = checkpoint_bytes(shape, shape.num_experts, byte_model)
    assert full == shape.num_parameters * byte_model.total


def test_checkpoint_of_a_tiny_model_is_as_large_as_counted_by_hand() -> None:
    assert checkpoint_bytes(TINY, 1, PaperBytes()) == (TINY_OTHERS + 2 * 10) * 14
    assert checkpoint_bytes(TINY, 1, MASTER_IN_FULL) == (TINY_OTHERS + 2 * 10) * 14 + 60 * 4


def test_baseline_has_the_first_rank_and_group_save_what_is_replicated() -> None:
    # dp 4, ep 2, one expert selected on each expert-parallel rank; the optimizer's 12 bytes are owned:
    # 22 * 12 / 4 = 66 of non-experts and 10 * 12 / 2 = 60 of experts for each rank.
    layout = PaperLayout(dp=4, ep=2, sharding=Sharding.NONE)
    of_ranks = rank_bytes(TINY, [1, 1], PaperBytes(), layout)
    assert of_ranks == [126 + 10 * 2 + 22 * 2, 126 + 10 * 2, 126, 126]


def test_adaptive_sharding_fills_the_ranks_with_fewer_experts() -> None:
    layout = PaperLayout(dp=2, ep=2, is_optimizer_distributed=False, sharding=Sharding.ADAPTIVE)
    # 308 bytes of non-experts on top of 280 and 140: both end at (308 + 420) / 2.
    assert rank_bytes(TINY, [2, 1], PaperBytes(), layout) == [364, 364]


def test_figure_4_has_one_rank_save_two_experts_and_the_heavy_rank_move() -> None:
    shape = replace(TINY, num_layers=4, moe_layers=(0, 1, 2, 3), num_experts=3, num_positions=0)
    layout = PaperLayout(dp=3, ep=3, is_optimizer_distributed=False)
    workload = paper_workload(shape, 1, PaperBytes(), layout)
    heavy = [of_ranks.index(max(of_ranks)) for of_ranks in workload.rotation]
    assert heavy == [0, 1, 2]


def test_one_expert_is_42_2_percent_with_all_master_weights_and_19_1_by_equation_6() -> None:
    full = checkpoint_bytes(LARGE, 16, PaperBytes())
    assert checkpoint_bytes(LARGE, 1, MASTER_IN_FULL) / full == pytest.approx(0.4219, abs=5e-5)
    assert checkpoint_bytes(LARGE, 1, PaperBytes()) / full == pytest.approx(0.1907, abs=5e-5)


@pytest.mark.parametrize(
    ("classes_in_full", "share"),
    [
        ({"master_always_full": True, "moments_always_full": True}, 0.88),
        ({"master_always_full": True, "weights_always_full": True}, 0.54),
        ({"master_always_full": True}, 0.42),
    ],
)
def test_sizes_of_table_3_follow_with_all_master_weights(
    classes_in_full: dict[str, bool], share: float
) -> None:
    num_bytes = checkpoint_bytes(LARGE, 1, PaperBytes(**classes_in_full))
    assert round(num_bytes / checkpoint_bytes(LARGE, 16, PaperBytes()), 2) == share


@pytest.mark.parametrize(
    ("k", "unit", "percent"),
    [
        (16, NonExpertUnit.ELEMENT, [12.0, 22.7, 29.4]),
        (16, NonExpertUnit.MODULE, [11.0, 19.3, 26.3]),
        (1, NonExpertUnit.ELEMENT, [23.9, 40.3, 41.1]),
    ],
)
def test_equal_sharding_of_the_three_cases_saves_what_was_worked_out(
    k: int, unit: NonExpertUnit, percent: list[float]
) -> None:
    saved = [
        100
        * reduction(
            most(k, case, Sharding.EQUAL, non_expert_unit=unit),
            most(k, case, Sharding.NONE, non_expert_unit=unit),
        )
        for case in CASES
    ]
    assert [round(each, 1) for each in saved] == percent


def test_greedy_modules_are_assigned_as_worked_by_hand() -> None:
    # 6 to rank 1 (least: 0), 4 to rank 2 (1), 3 to rank 0 (5 = 5, lower), 3 to rank 2, 1 to rank 1.
    assert assign_greedy([3, 6, 1, 4, 3], [5, 0, 1]) == [0, 1, 1, 2, 2]
