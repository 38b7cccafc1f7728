"""The cost of a recovery in tokens, and of all recoveries of a whole run."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.format.records import ExpertProgress
from moe_ft.planning.experts import Expert, ExpertLayout
from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.strategies.partial.strategy import PartialLoss
from tests.unit.moe_ft.strategies.partial.experts import (
    ONE_LAYER,
    SETTINGS,
    expert,
    progress_in,
    progress_of,
    resume,
    snapshot,
    strategy_of,
    take,
    take_plan,
    version,
)


@given(st.integers(0, 10_000), st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_lost_tokens_are_those_that_the_parameters_lack_each_counted_once(
    seed: int, is_load_aware: bool, k: int, num_faults: int
) -> None:
    # Every expert's parameters are modelled as the set of tokens that they have been trained with.
    rng = np.random.default_rng(seed)
    settings = replace(SETTINGS, k_snapshot=k, is_load_aware=is_load_aware)
    strategy = strategy_of(ONE_LAYER, settings)
    names: list[Expert] = [("layer.0", number) for number in range(4)]
    stream: dict[Expert, int] = dict.fromkeys(names, 0)  # tokens up to the current iteration
    live: dict[Expert, set[int]] = {name: set() for name in names}
    saved: dict[Expert, tuple[UnitVersion, set[int]]] = {}
    newest: tuple[int, ExpertProgress] | None = None
    known: dict[Expert, set[int]] = {name: set() for name in names}
    iteration = 0
    for _ in range(num_faults):
        for _ in range(int(rng.integers(1, 9))):
            counts = rng.integers(0, 20, (1, 4), dtype=np.int64)
            for position, name in enumerate(names):
                live[name] |= set(range(stream[name], stream[name] + int(counts[0, position])))
                stream[name] += int(counts[0, position])
            strategy.add_tokens(counts)
            iteration += 1
            if rng.random() < 0.7:
                plan = take_plan(strategy, iteration)
                newest = iteration, progress_in(plan)
                for unit, (routed, gaps) in plan.rotating.items():
                    found = UnitVersion(iteration=iteration, routed_tokens=routed, gaps=gaps)
                    name = (unit.layer_name, unit.expert)
                    saved[name] = found, set(live[name])
        if newest is None:
            continue
        iteration, progress = newest
        versions = {name: found for name, (found, _) in saved.items()}
        before = progress_in(snapshot(strategy, iteration))
        strategy = strategy_of(ONE_LAYER, settings)
        loss = resume(strategy, progress, iteration, versions, {}, before.gaps)
        for position, name in enumerate(names):
            stream[name] = progress.routed_tokens["layer.0"][position]
            live[name] = set(saved[name][1]) if name in saved else set()
            missing = set(range(stream[name])) - live[name]
            assert loss.accumulated["layer.0"][position] == len(missing)
            assert loss.lost["layer.0"][position] == len(missing - known[name])
            known[name] = missing
        assert loss.repeated == {"layer.0": (0, 0, 0, 0)}


def test_expert_from_beyond_the_iteration_repeats_tokens_and_loses_none() -> None:
    restored = {("layer.0", number): version(9, 10) for number in range(4)}
    progress = progress_of((8, 8, 8, 10))
    loss = resume(strategy_of(ONE_LAYER, SETTINGS), progress, 7, restored)
    assert loss.lost == {"layer.0": (0, 0, 0, 0)}
    assert loss.repeated == {"layer.0": (2, 2, 2, 0)}


def test_selection_goes_on_where_the_recovered_state_was() -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=2))
    resume(strategy, progress_of((0, 0, 0, 0)), 7, {})
    assert set(snapshot(strategy, 8).rotating) == {expert(0, 2), expert(0, 3)}


def test_version_that_the_newest_checkpoint_has_is_not_written_after_a_recovery() -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_persist=4))
    versions = {("layer.0", number): version(5, 1) for number in range(4)}
    persisted = {name: each for name, each in versions.items() if name[1] < 3}
    resume(strategy, progress_of((1, 1, 1, 1)), 7, versions, persisted, {})
    assert strategy.plan_persist().units == {expert(0, 3)}


def test_version_that_is_saved_after_one_from_beyond_counts_as_newer() -> None:
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=4, k_persist=4))
    beyond = {("layer.0", number): version(20, 9) for number in range(4)}
    resume(strategy, progress_of((5, 5, 5, 5)), 7, beyond, beyond, {})
    take(strategy, 8)
    assert strategy.plan_persist().units == strategy.rotation.units


def test_state_of_a_strategy_that_counts_no_tokens_costs_nothing() -> None:
    strategy = strategy_of(ONE_LAYER, SETTINGS)
    versions = {("layer.0", number): version(7, 0) for number in range(4)}
    loss = resume(strategy, None, 7, versions)
    assert loss.lost == loss.accumulated == {"layer.0": (0, 0, 0, 0)}


# Whole runs


def train_with_faults(num_iterations: int, faults: range, *, raises_k: bool) -> list[PartialLoss]:
    """Return what each recovery of a whole run cost, from k = 1; routing is uniform and memory survives."""
    experts = ExpertLayout(num_layers=1, num_experts=8, ep_size=4)
    settings = replace(
        SETTINGS, raises_k=raises_k, planned_tokens=8 * num_iterations, tokens_per_iteration=8
    )
    strategy, versions = strategy_of(experts, settings), {}
    losses: list[PartialLoss] = []
    for iteration in range(1, num_iterations + 1):
        strategy.add_tokens(np.ones((1, 8), np.int64))
        plan = take_plan(strategy, iteration)
        for unit, (routed, gaps) in plan.rotating.items():
            version = UnitVersion(iteration=iteration, routed_tokens=routed, gaps=gaps)
            versions[unit.layer_name, unit.expert] = version
        if iteration in faults:
            progress = progress_in(plan)
            strategy = strategy_of(experts, settings)
            loss = resume(strategy, progress, iteration, versions, {}, progress.gaps)
            cost = strategy.settle_losses([loss])
            assert isinstance(cost, PartialLoss)
            losses.append(cost)
    return losses


def test_k_rises_over_a_whole_run_as_in_the_paper_and_keeps_the_plt_under_its_limit() -> None:
    faults = range(50, 1000, 50)  # evenly spaced, as in MoC-System, Fig. 15(b)
    losses = train_with_faults(1000, faults, raises_k=True)
    ks = [loss.k_snapshot for loss in losses]
    assert ks == [1] * 2 + [2] * 9 + [4] * 8
    assert losses[-1].total_plt < 0.0375
    assert train_with_faults(1000, faults, raises_k=False)[-1].total_plt > 0.0375
