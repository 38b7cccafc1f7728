"""Strategies with budgets of bytes for tests: stages whose experts have sizes, and the steps of a run."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.strategies.interface import SnapshotPlan
from moe_ft.strategies.rotating import ExpertVersions, PlannedRun, Selection
from moe_ft.strategies.selective.selection import Need, RankLoads, SelectiveConfig
from moe_ft.strategies.selective.strategy import SelectiveStrategy
from moe_ft.units import UnitId, UnitKind

ALWAYS, SIZE = 100, 10
EMBEDDING = UnitId(kind=UnitKind.EMBEDDING)


def layout(num_layers: int, num_experts: int, ep_size: int = 1) -> ExpertLayout:
    return ExpertLayout(num_layers=num_layers, num_experts=num_experts, ep_size=ep_size)


def loads_of(experts: ExpertLayout) -> RankLoads:
    """Return the loads of a stage of which each expert-parallel rank is one rank."""
    owners = [experts.rank_of(number) for number in range(experts.num_experts)] * experts.num_layers
    costs = [[SIZE * (owner == rank) for owner in owners] for rank in range(experts.ep_size)]
    return RankLoads([ALWAYS] * experts.ep_size, np.array(costs, np.int64))


def budget(num_experts: int) -> str:
    """Return a budget in which so many experts of a rank have room."""
    return f"{ALWAYS + num_experts * SIZE}"


def need_of(tokens: Counts, age: Counts) -> Need:
    everywhere = np.ones_like(tokens, np.bool_)
    return Need(tokens=tokens, age=age, is_missing=~everywhere, is_new=everywhere)


def chosen(selection: Selection) -> set[tuple[int, int]]:
    return {(layer, expert) for layer, experts in enumerate(selection) for expert in experts}


def strategy_of(
    experts: ExpertLayout,
    place: int = 0,
    *,
    has_peers: bool = True,
    takes_whole: bool = False,
    are_followed: bool = False,
    **options: Any,
) -> SelectiveStrategy:
    """Return the strategy of one expert-parallel rank."""
    units = [
        UnitId(kind=UnitKind.EXPERT, layer=layer, expert=number)
        for layer in range(experts.num_layers)
        for number in range(experts.num_experts)
        if experts.rank_of(number) == place
    ]
    run = PlannedRun(
        interval=1, planned_tokens=10_000, tokens_per_iteration=100, takes_whole=takes_whole
    )
    return SelectiveStrategy(
        [EMBEDDING],
        units,
        [f"layer.{layer}" for layer in range(experts.num_layers)],
        experts,
        SelectiveConfig(**options),
        run,
        loads_of(experts),
        place,
        has_peers=has_peers,
        are_followed=are_followed,
    )


def train(ranks: Sequence[SelectiveStrategy], counts: Counts) -> None:
    """Train an iteration on all ranks."""
    for each in ranks:
        each.add_tokens(counts)


def take(
    ranks: Sequence[SelectiveStrategy],
    iteration: int,
    *,
    is_sent: bool = True,
    is_whole: bool = False,
) -> list[SnapshotPlan]:
    """Take a snapshot on all ranks that completes, and return its plans."""
    plans: list[SnapshotPlan] = []
    for each in ranks:
        window = each.plan_window(iteration, is_whole=is_whole)
        each.note_begun(window)
        each.note_complete(window, iteration)
        if is_sent:
            each.note_sent(window)
        plans += window.snapshots
    return plans


def experts_in(units: Collection[UnitId]) -> set[tuple[int, int]]:
    """Return layer and number of experts."""
    return {(unit.layer, unit.expert) for unit in units}


def versions(iterations: npt.NDArray[np.int64]) -> ExpertVersions:
    return ExpertVersions(trained=np.zeros_like(iterations), iterations=iterations)
