"""Bytes of ranks with partial experts: sums, and the limits that follow."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from moe_ft.planning.experts import experts_of_stage
from moe_ft.strategies.partial import plan
from moe_ft.strategies.partial.plan import PartialPlan, Workload, largest_hidden_k
from moe_ft.strategies.partial.selection import PartialConfig
from moe_ft.units import UnitId
from tests.unit.moe_ft.planning.described import SMALL, planned_job

REPLICATED = tuple(word for word in SMALL if word != "--use-distributed-optimizer")
NUM_EXPERTS, EXPERT_ELEMENTS, NUM_LAYERS = 8, 98_304, 4


@functools.cache
def sizes_of(sharding: str | None, *, master_always_full: bool = False) -> PartialPlan:
    """Return what eight ranks save in two stages; with a sharding the optimizer is not distributed."""
    flags = SMALL if sharding is None else (*REPLICATED, "--moe-ft-sharding", sharding)
    job = planned_job(*flags, "--moe-ft-strategy", "partial")
    options = PartialConfig(master_always_full=master_always_full)
    return PartialPlan(job, options)


@pytest.mark.parametrize("sharding", [None, "none", "equal", "adaptive"])
@pytest.mark.parametrize("master_always_full", [False, True])
def test_ranks_together_save_the_selected_experts_and_everything_else_once(
    sharding: str | None, master_always_full: bool
) -> None:
    sizes = sizes_of(sharding, master_always_full=master_always_full)
    whole = sizes.plan_workload(NUM_EXPERTS).total_bytes
    assert len(sizes.plan_workload(NUM_EXPERTS).rotation) == 1
    for k in (1, 3):
        left_out = NUM_LAYERS * (NUM_EXPERTS - k) * EXPERT_ELEMENTS
        expected = whole - left_out * (8 if master_always_full else 12)
        totals = {sum(of_ranks) for of_ranks in sizes.plan_workload(k).rotation}
        assert totals == {expected}


def test_first_of_the_ranks_saves_everything_without_sharding() -> None:
    (every,) = sizes_of("none").plan_workload(NUM_EXPERTS).rotation
    assert [count > 0 for count in every] == [True, True, False, False] * 2


def test_adaptive_sharding_lightens_the_heaviest_rank() -> None:
    adaptive, equal = sizes_of("adaptive").plan_workload(1), sizes_of("equal").plan_workload(1)
    assert adaptive.bottleneck_bytes <= equal.bottleneck_bytes
    assert adaptive.total_bytes == equal.total_bytes


def test_bottleneck_is_the_lowest_rank_of_those_with_the_most() -> None:
    workload = Workload(((3, 5, 2), (1, 2, 7), (2, 7, 1)))
    assert (workload.total_bytes, workload.bottleneck_bytes) == (10, 7)
    assert workload.bottleneck_rank == 1
    assert workload.most_by_rank() == [3, 7, 7]
    assert workload.mean_by_rank() == [2.0, 14 / 3, 10 / 3]


@pytest.mark.parametrize("budget_bytes", [0, 1_500_000, 3_000_000, 9_000_000])
def test_hidden_k_fits_and_the_next_does_not_and_automatic_k_is_no_larger(
    budget_bytes: int,
) -> None:
    sizes = sizes_of(None)
    most = [sizes.plan_workload(k).bottleneck_bytes for k in range(1, NUM_EXPERTS + 1)]
    hidden = largest_hidden_k(sizes.plan_workload, NUM_EXPERTS, float(budget_bytes))
    assert hidden == sum(each <= budget_bytes for each in most)
    assert sizes.automatic_k(budget_bytes) <= max(1, hidden)


def test_ranks_of_a_stage_are_asked_without_reading_what_all_others_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def num_readings(world_size: int) -> int:
        read: list[int] = []

        def count(units: Sequence[Iterable[UnitId]], num_experts: int) -> Any:
            read.append(len(units))
            return experts_of_stage(units, num_experts)

        monkeypatch.setattr(plan, "experts_of_stage", count)
        job = planned_job(*SMALL, "--moe-ft-strategy", "partial", world_size=world_size)
        PartialPlan(job, PartialConfig()).plan_workload(1)
        assert set(read) == {world_size // 2}
        return len(read)

    assert num_readings(8) == num_readings(64) > 0
