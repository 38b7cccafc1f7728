"""The partial strategy: the contents of its snapshots, and every expert in turn."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.strategies.interface import Resumed
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.units import Level, UnitId
from tests.unit.moe_ft.strategies.partial.experts import (
    DENSE,
    ONE_LAYER,
    SETTINGS,
    SHARE,
    expert,
    persist,
    progress_in,
    resume,
    shapes,
    snapshot,
    strategy_of,
    take,
    tokens,
)


def test_rank_that_saves_experts_of_few_layers_makes_room_for_k_of_each() -> None:
    # Of 4 layers with 4 experts the distributed optimizer has given this rank one and a half.
    experts = ExpertLayout(num_layers=4, num_experts=4, ep_size=1)
    own = [expert(1, number) for number in range(4)] + [expert(2, 0), expert(2, 1)]
    layers = [f"layer.{layer}" for layer in range(4)]
    most = [
        PartialStrategy(
            [DENSE],
            own,
            layers,
            experts,
            replace(SETTINGS, k_snapshot=k).options,
            SETTINGS.run,
            SHARE,
        ).most_rotating
        for k in (1, 2, 3, 4, None)
    ]
    assert most == [2, 4, 5, 6, 6]


@given(shapes())
def test_sequential_snapshots_hold_every_expert_within_one_round(
    shape: tuple[ExpertLayout, int],
) -> None:
    experts, k = shape
    strategy = strategy_of(experts, replace(SETTINGS, k_snapshot=k))
    round_length = -(-experts.num_experts // k)
    held = [take(strategy, iteration) for iteration in range(1, 3 * round_length)]
    for start in range(len(held) - round_length + 1):
        assert set().union(*held[start : start + round_length]) == strategy.rotation.units


@given(shapes(), st.booleans(), st.booleans(), st.integers(0, 99))
def test_ranks_of_a_stage_together_hold_what_one_rank_with_all_experts_would(
    shape: tuple[ExpertLayout, int], is_load_aware: bool, is_auto: bool, seed: int
) -> None:
    experts, k = shape
    settings = replace(
        SETTINGS, k_snapshot=None if is_auto else k, k_persist=k, is_load_aware=is_load_aware
    )
    whole = strategy_of(experts, settings)
    ranks = [strategy_of(experts, settings, ep_rank) for ep_rank in range(experts.ep_size)]
    for iteration in range(1, 8):
        counted = tokens(experts, seed + iteration)
        for each in (whole, *ranks):
            each.add_tokens(counted)
        assert set().union(*(take(each, iteration) for each in ranks)) == take(whole, iteration)
        assert frozenset().union(*map(persist, ranks)) == persist(whole)


@given(shapes(), st.booleans(), st.integers(0, 99))
def test_rank_never_holds_more_in_a_snapshot_than_it_announces(
    shape: tuple[ExpertLayout, int], is_load_aware: bool, seed: int
) -> None:
    experts, k = shape
    settings = replace(SETTINGS, k_snapshot=k, is_load_aware=is_load_aware)
    ranks = [strategy_of(experts, settings, ep_rank) for ep_rank in range(experts.ep_size)]
    for iteration in range(1, 8):
        for each in ranks:
            each.add_tokens(tokens(experts, seed + iteration))
            assert len(take(each, iteration)) <= each.most_rotating


def test_load_aware_snapshot_holds_the_experts_with_most_unsaved_tokens() -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, is_load_aware=True))
    strategy.add_tokens(np.array([[5, 9, 7, 8]]))
    assert take(strategy, 1) == {expert(0, 1)}
    strategy.add_tokens(np.array([[5, 7, 2, 0]]))  # unsaved: 10, 7, 9, 8
    assert take(strategy, 2) == {expert(0, 0)}


def test_progress_is_that_of_the_plan_and_not_of_later_iterations() -> None:
    strategy = strategy_of(ONE_LAYER, SETTINGS)
    strategy.add_tokens(np.array([[1, 2, 3, 4]]))
    plan = snapshot(strategy, 1)
    strategy.add_tokens(np.array([[1, 1, 1, 1]]))
    assert progress_in(plan).routed_tokens == {"layer.0": (1, 2, 3, 4)}


@given(shapes(), st.integers(0, 5))
def test_last_snapshots_hold_every_expert_at_the_last_iteration_and_no_more_are_needed(
    shape: tuple[ExpertLayout, int], num_before: int
) -> None:
    experts, k = shape
    strategy = strategy_of(experts, replace(SETTINGS, k_snapshot=k))
    for iteration in range(num_before + 1):
        take(strategy, iteration)
    held: set[UnitId] = set()
    count = 0
    while not strategy.is_whole(num_before):
        held |= take(strategy, num_before, is_whole=True)
        count += 1
    assert count == -(-experts.num_experts // k)
    assert held | _of_iteration(strategy, num_before) == strategy.rotation.units


@given(shapes(), st.integers(0, 5))
def test_whole_state_is_one_snapshot_where_memory_was_made_for_it(
    shape: tuple[ExpertLayout, int], num_before: int
) -> None:
    experts, k = shape
    settings = replace(SETTINGS, k_snapshot=k, takes_whole=True)
    strategy, undisturbed = strategy_of(experts, settings), strategy_of(experts, settings)
    for iteration in range(num_before):
        assert take(strategy, iteration) == take(undisturbed, iteration)
    assert take(strategy, num_before, is_whole=True) == strategy.rotation.units
    assert strategy.most_rotating == len(strategy.rotation.units)
    assert [strategy.is_whole(num_before + ahead) for ahead in (0, 1)] == [True, False]
    assert strategy.plan_persist(is_whole=True).units == strategy.rotation.units
    # The rotation continues where it was.
    assert take(strategy, num_before + 1) == take(undisturbed, num_before + 1)


def _of_iteration(strategy: PartialStrategy, iteration: int) -> set[UnitId]:
    """Return the experts whose version in memory is of an iteration."""
    layers, numbers = np.nonzero(strategy._saved.iterations == iteration)
    return {expert(int(a), int(b)) for a, b in zip(layers, numbers, strict=True)}


def test_experts_that_are_not_trained_lose_nothing() -> None:
    units = [expert(0, number) for number in (0, 1)]
    frozen = {("layer.0", 2), ("layer.0", 3)}
    strategy = PartialStrategy(
        [DENSE], units, ["layer.0"], ONE_LAYER, SETTINGS.options, SETTINGS.run, SHARE, frozen
    )
    strategy.add_tokens(np.array([[5, 6, 7, 8]]))
    progress = progress_in(snapshot(strategy, 1))
    assert progress.routed_tokens == {"layer.0": (5, 6, 0, 0)}
    assert resume(strategy, progress, 1, {}).lost == {"layer.0": (5, 6, 0, 0)}


def test_breakpoint_holds_every_expert_with_the_tokens_that_are_not_counted_yet() -> None:
    first, second = tokens(ONE_LAYER, 5), tokens(ONE_LAYER, 3)
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=1))
    strategy.add_tokens(first)
    plan = strategy.plan_breakpoint()
    strategy.add_tokens(second)  # by the training thread, after the plan was asked for
    before, after = plan(lambda: None), plan(lambda: second)
    assert set(before.levels) == {*strategy.always, *strategy.rotation.units}
    assert set(before.levels.values()) == {Level.FULL}
    for found, counts in ((before, first), (after, first + second)):
        routed = {unit.expert: number for unit, (number, _) in found.rotating.items()}
        assert routed == dict(enumerate(counts[0].tolist()))
        assert found.progress is not None
        assert found.progress().routed_tokens["layer.0"] == tuple(counts[0].tolist())


def test_experts_that_memory_has_older_than_they_were_restored_are_saved_again_first() -> None:
    options = replace(SETTINGS, k_snapshot=1)
    strategy = strategy_of(ONE_LAYER, options)
    everything = range(ONE_LAYER.num_experts)
    restored = {
        str(expert(0, each)): UnitVersion(iteration=9, routed_tokens=90) for each in everything
    }
    old = {
        name: replace(version, iteration=each)
        for each, (name, version) in enumerate(restored.items())
    }
    del old[str(expert(0, 2))]  # ranks of the stage had different ones
    loss = strategy.resume(Resumed(iteration=9, restored=restored, in_memory=old))
    assert not any(map(any, loss.lost.values()))
    assert take(strategy, 9, is_whole=True) == {expert(0, 2)}
    assert take(strategy, 9, is_whole=True) == {expert(0, 0)}
