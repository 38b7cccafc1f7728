"""The number of experts in a snapshot: the largest that is hidden, and Dynamic-K."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.experts import ExpertLayout
from tests.unit.moe_ft.strategies.partial.experts import (
    ONE_LAYER,
    SETTINGS,
    progress_in,
    raise_k,
    resume,
    snapshot,
    strategy_of,
    take,
)


@pytest.mark.parametrize(("budget", "k"), [(0.0, 1), (109.0, 1), (125.0, 2), (1e9, 4)])
def test_largest_k_is_that_whose_bytes_fit(budget: float, k: int) -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=None))
    assert strategy.largest_k(budget) == k


def test_automatic_k_changes_to_the_agreed_one_after_some_snapshots() -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=None))
    assert strategy.agree([3]) == {}
    for iteration in range(20):
        take(strategy, iteration)
    assert strategy.agree([3]) == {"k_snapshot": 3}
    assert strategy.agree([2]) == {}


# Dynamic-K


@given(st.integers(1, 8), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=8))
def test_k_never_decreases_with_dynamic_k(k: int, faults: list[tuple[float, float]]) -> None:
    experts = ExpertLayout(num_layers=1, num_experts=8, ep_size=1)
    settings = replace(SETTINGS, k_snapshot=k, raises_k=True)
    strategy = strategy_of(experts, settings)
    before = (strategy.k.snapshot, strategy.k.persist)
    for accumulated, last in faults:
        progress = progress_in(snapshot(strategy, 1))
        strategy = strategy_of(experts, settings)
        resume(strategy, progress, 1, {})
        has_changed = raise_k(strategy, accumulated, last)
        now = (strategy.k.snapshot, strategy.k.persist)
        assert before <= now <= (8, 8)
        assert has_changed == (now != before)
        before = now


# Of four experts, k = 1 may take the PLT to half of the limit and k = 2 to all of it. One fault is expected
# to lose 1.5 iterations of 100 with k = 1, 1.5 %, and 0.5 % with k = 2.


@pytest.mark.parametrize(
    ("k", "accumulated", "last", "after"),
    [
        (1, 0.003, 0.003, 1),
        (1, 0.004, 0.004, 2),
        (1, 0.003, 0.016, 2),  # the last one lost more than is expected
        (1, 0.033, 0.0, 4),
        (2, 0.032, 0.0, 2),
        (2, 0.033, 0.0, 4),
        (4, 0.9, 0.9, 4),
    ],
)
def test_k_doubles_until_one_more_fault_stays_below_its_limit(
    k: int, accumulated: float, last: float, after: int
) -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=k, raises_k=True))
    assert raise_k(strategy, accumulated, last) == (after > k)
    assert (strategy.k.snapshot, strategy.k.persist) == (after, after // k)


def test_automatic_k_does_not_fall_below_what_dynamic_k_has_raised_it_to() -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=None, raises_k=True))
    raise_k(strategy, accumulated_plt=0.01)
    for iteration in range(20):
        take(strategy, iteration)
    strategy.agree([1])
    assert strategy.k.snapshot == 2


def test_automatic_k_after_another_recovery_does_not_fall_below_what_dynamic_k_had_raised() -> None:
    settings = replace(SETTINGS, k_snapshot=None, raises_k=True)
    strategy = strategy_of(ONE_LAYER, settings)
    raise_k(strategy, accumulated_plt=0.01)
    progress = progress_in(snapshot(strategy, 1))
    strategy = strategy_of(ONE_LAYER, settings)
    resume(strategy, progress, 1, {})
    for iteration in range(20):
        take(strategy, iteration)
    strategy.agree([1])
    assert strategy.k.snapshot == 2


def test_snapshot_under_way_when_k_changes_does_not_bring_the_old_spacing_back() -> None:
    experts = ExpertLayout(num_layers=24, num_experts=64, ep_size=8)
    strategy = strategy_of(experts, replace(SETTINGS, k_snapshot=None))
    resume(
        strategy, msgspec.structs.replace(progress_in(snapshot(strategy, 0)), k_snapshot=8), 0, {}
    )
    for iteration in range(12):
        take(strategy, iteration)
    window = strategy.plan_window(12)
    strategy.note_begun(window)
    assert strategy.agree([1]) == {"k_snapshot": 1}
    strategy.note_complete(window, 12)
    held = snapshot(strategy, 13).rotating
    counts = [sum(experts.rank_of(unit.expert) == rank for unit in held) for rank in range(8)]
    assert counts == [3] * 8


def test_dynamic_k_expects_losses_of_the_interval_that_was_in_use() -> None:
    # Snapshots every 4 iterations, chosen automatically: the next fault costs 4 x (4/2 - 1)/2 x 100 tokens.
    settings = replace(SETTINGS, k_snapshot=2, raises_k=True, interval=None)
    strategy = strategy_of(ONE_LAYER, settings)
    for iteration in (4, 8, 12):
        take(strategy, iteration)
    progress = progress_in(snapshot(strategy, 16))
    strategy = strategy_of(ONE_LAYER, settings)
    resume(strategy, progress, 16, {})
    assert not raise_k(strategy, accumulated_plt=0.0375 - 0.0201)
    assert raise_k(strategy, accumulated_plt=0.0375 - 0.0199)
