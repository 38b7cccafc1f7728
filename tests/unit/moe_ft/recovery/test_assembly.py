"""A rank's strategy and the sizes of its memory, from flags and a model."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.memory.layout import lay_out
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.format.entries import ParameterEntry
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.recovery.assembly import (
    build_strategy,
    measure_sizes,
)
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.dense import DenseStrategy
from moe_ft.strategies.interface import MeasuredBytes, Strategy
from moe_ft.strategies.partial.selection import PartialConfig
from moe_ft.strategies.sparse.strategy import SparseConfig
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_optimizer
from tests.unit.moe_ft.engine.boundary.logs import TRAFFIC
from tests.unit.moe_ft.together import run_together

EP_SIZE, EXPT_DP_SIZE = 2, 4
NUM_LAYERS = 3
DP_EP_RANKS = tuple(rank % EP_SIZE for rank in range(EP_SIZE * EXPT_DP_SIZE))
EXPERT_ELEMENTS, DENSE_ELEMENTS = 1000, 7777
OPTIMIZER = make_optimizer()


def parameter(
    unit: UnitId, num_elements: int, slice_: tuple[int, int], name: str = ""
) -> LocalParameter:
    live = torch.nn.Parameter(torch.zeros(num_elements))
    return LocalParameter(
        unit=unit,
        name=name or f"{unit}.weight",
        entry=ParameterEntry(shape=(num_elements,)),
        parameter=live,
        start=slice_[0],
        end=slice_[1],
        optimizer=OPTIMIZER,
        master=live,
        is_sharded=False,
        is_expert=unit.kind is UnitKind.EXPERT,
    )


def catalog_of(dp_rank: int) -> UnitCatalog:
    """Return the units of a rank of a model with three layers, without the distributed optimizer."""
    expt_dp_rank, ep_rank = divmod(dp_rank, EP_SIZE)
    experts = [
        UnitId(kind=UnitKind.EXPERT, layer=layer, expert=ep_rank) for layer in range(NUM_LAYERS)
    ]
    dense = [UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.OUTPUT)]
    sizes = [EXPERT_ELEMENTS] * NUM_LAYERS
    slices = assign_equal_slices(sizes, EXPT_DP_SIZE)[expt_dp_rank]
    found = [
        parameter(unit, EXPERT_ELEMENTS, each) for unit, each in zip(experts, slices, strict=True)
    ]
    slices = assign_equal_slices([DENSE_ELEMENTS] * 2, len(DP_EP_RANKS))[dp_rank]
    found += [
        parameter(unit, DENSE_ELEMENTS, each) for unit, each in zip(dense, slices, strict=True)
    ]
    return UnitCatalog(found, leaves_out_frozen=True)


def facts(dp_rank: int, num_experts: int = EP_SIZE) -> ExpertFacts:
    return ExpertFacts(
        num_experts=num_experts,
        ep_rank=dp_rank % EP_SIZE,
        ep_size=EP_SIZE,
        tokens_per_sample=1,
        planned_samples=100,
        samples_per_iteration=1,
    )


def config_of(partial: PartialConfig | None = None, **strategy: Any) -> MoeFtConfig:
    return MoeFtConfig(
        strategy=StrategyConfig(**{"strategy": "partial", **strategy}),
        options={"partial": partial or PartialConfig(k_snapshot="1")},
    )


def strategies_of(config: MoeFtConfig) -> list[Strategy]:
    """Return the strategies of all ranks."""
    return run_together(
        len(DP_EP_RANKS),
        lambda dp_rank, gather: build_strategy(
            config, catalog_of(dp_rank), facts(dp_rank), DP_EP_RANKS, gather
        ),
    )


@pytest.mark.parametrize("k", ["1", "2", "auto"])
@pytest.mark.parametrize("sharding", ["none", "equal", "adaptive"])
def test_every_snapshot_fits_into_the_region_and_its_slots(k: str, sharding: str) -> None:
    config = config_of(PartialConfig(k_snapshot=k), sharding=sharding)
    for dp_rank, strategy in enumerate(strategies_of(config)):
        layouts = UnitLayouts(catalog_of(dp_rank), dp_rank)
        sizes = measure_sizes(strategy, layouts)
        layouts.region_bytes = sizes.region_bytes
        for iteration in range(5):
            window = strategy.plan_window(iteration)
            assert layouts.lay_out(window).num_bytes == sizes.region_bytes
            rotating = [unit for plan in window.snapshots for unit in plan.rotating]
            places = [layouts.place(unit, 0) for unit in rotating]
            assert all(place.num_bytes <= sizes.slot_bytes for place in places)
            strategy.note_complete(window, iteration)


# Sparse windows


def sparse_config(window: str) -> MoeFtConfig:
    return MoeFtConfig(
        strategy=StrategyConfig(strategy="sparse"),
        options={"sparse": SparseConfig(window=window, max_window=4)},
    )


def sparse_strategies(window: str) -> list[Strategy]:
    """Return the strategies of all ranks."""
    return run_together(
        len(DP_EP_RANKS),
        lambda dp_rank, gather: build_strategy(
            sparse_config(window), catalog_of(dp_rank), facts(dp_rank), DP_EP_RANKS, gather, dp_rank
        ),
    )


def agree(strategies: list[Strategy], budget: float) -> None:
    for strategy in strategies:
        strategy.note_measured(MeasuredBytes(copied_bytes=budget, flow_bytes=budget))
    values = [strategy.values() for strategy in strategies]
    least = [min(column) for column in zip(*values, strict=True)]
    for strategy in strategies:
        strategy.agree(least)


@pytest.mark.parametrize("window", ["1", "2", "3", "4", "auto"])
def test_every_window_fits_into_the_region_in_any_order_and_length(window: str) -> None:
    seed = random.Random(window)
    strategies = sparse_strategies(window)
    layouts = [UnitLayouts(catalog_of(rank), rank) for rank in range(len(strategies))]
    for strategy, layout in zip(strategies, layouts, strict=True):
        layout.region_bytes = measure_sizes(strategy, layout).region_bytes
    for iteration in range(8):
        agree(strategies, seed.choice([10.0, 1e4, 1e5, 1e9]))
        counts = [[seed.choice([0, 1, 100]) for _ in range(EP_SIZE)] for _ in range(NUM_LAYERS)]
        for strategy, layout in zip(strategies, layouts, strict=True):
            strategy.add_tokens(np.array(counts))
            is_whole = iteration == 7
            plan = strategy.plan_window(iteration, is_whole=is_whole)
            strategy.note_begun(plan)
            assert layout.lay_out(plan).num_bytes == layout.region_bytes


def test_ranks_of_a_stage_have_each_unit_at_full_in_the_same_snapshot() -> None:
    found: dict[UnitId, set[int]] = {}
    for strategy in sparse_strategies("3"):
        for position, snapshot in enumerate(strategy.plan_window(0).snapshots):
            for unit, level in snapshot.levels.items():
                if level is Level.FULL:
                    found.setdefault(unit, set()).add(position)
    assert len(found) == EP_SIZE * NUM_LAYERS + 2
    assert all(len(positions) == 1 for positions in found.values())


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        (
            "local_experts.{}.linear_fc1.weight",
            [{(1, 0), (0, 1), (0, 2)}, {(0, 0), (1, 1), (1, 2)}],
        ),
        ("linear_fc1.weight{}", [{(1, 0), (1, 1), (1, 2)}, {(0, 0), (0, 1), (0, 2)}]),
    ],
)
def test_experts_of_one_module_are_saved_together_which_is_known_by_their_names(
    name: str, groups: list[set[tuple[int, int]]]
) -> None:
    parameters = [
        parameter(
            UnitId(kind=UnitKind.EXPERT, layer=layer, expert=each),
            EXPERT_ELEMENTS,
            (0, EXPERT_ELEMENTS),
            f"decoder.layers.{layer}.mlp.experts.{name.format(each)}",
        )
        for layer in (0, 1)
        for each in range(3)
    ]
    catalog = UnitCatalog(parameters, leaves_out_frozen=False)
    strategy = build_strategy(
        sparse_config("2"), catalog, facts(0, num_experts=6), [0], lambda value, _: [value]
    )
    # Shares 0.5, 0.1, 0.1 and 0.1, 0.2, 0.3; the other expert-parallel rank's experts get the rest.
    strategy.add_tokens(np.array([[5, 1, 1, 1, 1, 1], [1, 2, 3, 2, 1, 1]]))
    found = [
        {(unit.layer, unit.expert) for unit, level in each.levels.items() if level is Level.FULL}
        for each in strategy.plan_window(0).snapshots
    ]
    assert found == groups


def test_sizes_of_units_are_those_that_they_take_in_a_file() -> None:
    # The lengths of windows are chosen by them.
    catalog = catalog_of(0)
    for unit in catalog.units:
        for level in (Level.FULL, Level.COMPUTE):
            planned = catalog.num_bytes(unit, level, alignment=ALIGNMENT_BYTES)
            layout = lay_out([(unit, level, catalog.tensors(unit, level))])
            taken = layout.ends[0] - len(layout.header)
            assert taken <= planned < taken + ALIGNMENT_BYTES


def test_boundary_log_has_slots_for_the_windows_of_the_strategy() -> None:
    catalog = catalog_of(0)
    strategy, layouts = DenseStrategy(catalog.units), UnitLayouts(catalog, 0)
    assert measure_sizes(strategy, layouts).num_boundary_slots == 0
    sizes = measure_sizes(strategy, layouts, traffic=TRAFFIC, stage=1, interval=4)
    assert sizes.boundary_slot_bytes == TRAFFIC.slot_bytes(1)
    assert sizes.num_boundary_slots == 7
