"""Sizes that are planned before the first iteration: every division of shared state is among them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.experts import ExpertLayout
from moe_ft.strategies.partial.selection import RankShare
from tests.unit.moe_ft.strategies.partial.experts import (
    SETTINGS,
    Settings,
    possible,
    progress_in,
    raise_k,
    resume,
    shapes,
    snapshot,
    strategy_of,
    take,
    take_plan,
)


@st.composite
def shared(draw: st.DrawFn) -> tuple[ExpertLayout, Settings, RankShare]:
    """Draw a job with adaptive sharding."""
    experts, k = draw(shapes())
    raises_k = draw(st.booleans())
    is_auto = draw(st.booleans())
    num_copies = draw(st.integers(1, 3))
    share = RankShare(
        always_bytes=100,
        unit_bytes=draw(st.integers(1, 50)),
        replicated_bytes=draw(st.integers(1, 500)),
        ep_ranks=tuple(range(experts.ep_size)) * num_copies,
    )
    settings = replace(SETTINGS, k_snapshot=None if is_auto else k, raises_k=raises_k)
    return experts, settings, share


@given(shared(), st.integers(0, 40))
def test_division_of_any_sequential_snapshot_and_of_the_last_ones_is_among_those_that_regions_are_sized_for(
    job: tuple[ExpertLayout, Settings, RankShare], num_snapshots: int
) -> None:
    experts, settings, share = job
    strategy = strategy_of(experts, settings, 0, share)
    sized_for = [plan.shares for plan in possible(strategy)]
    for iteration in range(num_snapshots):
        assert take_plan(strategy, iteration).shares in sized_for
    while not strategy.is_whole(num_snapshots):
        assert take_plan(strategy, num_snapshots, is_whole=True).shares in sized_for


@given(shared(), st.integers(0, 100))
def test_division_after_dynamic_k_is_among_those_that_regions_are_sized_for(
    job: tuple[ExpertLayout, Settings, RankShare], seed: int
) -> None:
    experts, settings, share = job
    strategy = strategy_of(experts, replace(settings, raises_k=True), 0, share)
    sized_for = [plan.shares for plan in possible(strategy)]
    for iteration in range(seed % 7):
        take(strategy, iteration)
    raise_k(strategy, accumulated_plt=0.01)
    assert snapshot(strategy, 7).shares in sized_for


def test_k_that_regions_were_not_sized_for_divides_equally() -> None:
    experts = ExpertLayout(num_layers=1, num_experts=8, ep_size=4)
    share = RankShare(
        always_bytes=0, unit_bytes=40, replicated_bytes=1000, ep_ranks=tuple(range(4))
    )
    strategy = strategy_of(experts, replace(SETTINGS, raises_k=True, k_snapshot=4), 0, share)
    plan = snapshot(
        strategy_of(experts, replace(SETTINGS, raises_k=True, k_snapshot=5), 0, share), 1
    )
    resume(strategy, progress_in(plan), 1, {})
    assert strategy.k.snapshot == 5
    assert snapshot(strategy, 2).shares is None


def test_rank_with_fewer_selected_experts_takes_more_of_what_all_ranks_hold() -> None:
    experts = ExpertLayout(num_layers=1, num_experts=2, ep_size=2)
    share = RankShare(always_bytes=0, unit_bytes=40, replicated_bytes=60, ep_ranks=(0, 1))
    assert snapshot(strategy_of(experts, SETTINGS, 0, share), 1).shares == (10, 50)
