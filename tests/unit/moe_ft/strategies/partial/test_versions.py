"""Versions of experts on storage: every expert goes there, and none twice."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.experts import ExpertLayout
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.units import UnitId
from tests.unit.moe_ft.strategies.partial.experts import (
    ONE_LAYER,
    SETTINGS,
    expert,
    persist,
    progress_of,
    resume,
    shapes,
    strategy_of,
    take,
    version,
)


@given(shapes(), st.data())
def test_every_expert_goes_to_storage_in_one_round_of_persists(
    shape: tuple[ExpertLayout, int], data: st.DataObject
) -> None:
    experts, k = shape
    k_persist = data.draw(st.integers(1, k))
    strategy = strategy_of(experts, replace(SETTINGS, k_snapshot=k, k_persist=k_persist))
    per_persist = data.draw(st.integers(1, 4))
    persisted: set[UnitId] = set()
    for number in range(2 * -(-experts.num_experts // k_persist) + 1):
        for step in range(per_persist):
            take(strategy, number * per_persist + step)
        persisted |= persist(strategy)
    assert persisted == _saved(strategy) or persisted == strategy.rotation.units


def _saved(strategy: PartialStrategy) -> set[UnitId]:
    layers, numbers = np.nonzero(strategy._saved.iterations >= 0)
    return {expert(int(a), int(b)) for a, b in zip(layers, numbers, strict=True)}


def test_version_that_is_on_storage_is_not_written_again() -> None:
    strategy = strategy_of(ONE_LAYER, SETTINGS)
    take(strategy, 1)
    assert persist(strategy) == {expert(0, 0)}
    assert strategy.plan_persist().units == frozenset()


def test_version_that_was_saved_while_its_predecessor_was_written_is_not_taken_for_persisted() -> (
    None
):
    strategy = strategy_of(ONE_LAYER, replace(SETTINGS, k_snapshot=4, k_persist=4))
    take(strategy, 1)
    plan = strategy.plan_persist()
    take(strategy, 2)
    strategy.note_persisted(plan)
    assert strategy.plan_persist().units == strategy.rotation.units


def test_version_on_storage_that_is_newer_than_the_restored_one_is_not_taken_for_intact() -> None:
    strategy = strategy_of(ONE_LAYER, SETTINGS)
    restored, persisted = {("layer.0", 0): version(3, 3)}, {("layer.0", 0): version(7, 7)}
    resume(strategy, progress_of((9, 9, 9, 9)), 9, restored, persisted)
    assert strategy.plan_persist().units == {expert(0, 0)}
