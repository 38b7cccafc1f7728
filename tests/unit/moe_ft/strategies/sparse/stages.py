"""Stages of sparse strategies for tests: random ones, and one that is worked by hand."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moe_ft.strategies.interface import MeasuredBytes, WindowPlan
from moe_ft.strategies.sparse.strategy import SparseConfig, SparseStrategy
from moe_ft.strategies.sparse.windows import RankUnits
from moe_ft.units import Level, UnitId, UnitKind

KINDS = (UnitKind.EMBEDDING, UnitKind.FINAL_NORM, UnitKind.OUTPUT)


class Stage:
    """All ranks of a stage, each with a strategy, and what they agree on.

    Attributes:
        ranks: ``[rank]``.
        layers: MoE layers.
        num_experts: of a layer.
    """

    def __init__(
        self, ranks: Sequence[RankUnits], num_layers: int, num_experts: int, config: SparseConfig
    ) -> None:
        self.ranks, self.num_experts = list(ranks), num_experts
        self.layers = [f"layer.{layer}" for layer in range(num_layers)]
        self.strategies = [
            SparseStrategy(rank, ranks, self.layers, config) for rank in range(len(ranks))
        ]

    def plan(self, iteration: int = 0, *, is_whole: bool = False) -> list[WindowPlan]:
        """Begin the next window of every rank."""
        windows = [each.plan_window(iteration, is_whole=is_whole) for each in self.strategies]
        for strategy, window in zip(self.strategies, windows, strict=True):
            strategy.note_begun(window)
        return windows

    def count(self, counts: Any) -> None:
        """Have experts get tokens."""
        for strategy in self.strategies:
            strategy.add_tokens(np.asarray(counts))

    def agree(self, *budgets: float | None, wanted_elsewhere: int = 1) -> list[dict[str, int]]:
        """Agree on the least that all ranks say, and on what another stage wants.

        Args:
            budgets: what each rank has measured; one for all of them.
            wanted_elsewhere: length of the window that another stage wants.
        """
        each = list(budgets) * (len(self.ranks) if len(budgets) == 1 else 1)
        said = [
            values(strategy, budget, budget)
            for strategy, budget in zip(self.strategies, each, strict=True)
        ]
        if said[0]:
            said.append([-wanted_elsewhere])
        least = [min(column) for column in zip(*said, strict=True)]
        return [strategy.agree(least) for strategy in self.strategies]

    def settle(self, budget: float, rounds: int = 3) -> int:
        """Have a budget take effect and return the length of the window."""
        for _ in range(rounds):
            self.agree(budget)
        return self.window

    @property
    def window(self) -> int:
        """The length that all ranks have."""
        (length,) = {strategy.length.now for strategy in self.strategies}
        return length


def expert(layer: int, number: int) -> UnitId:
    return UnitId(kind=UnitKind.EXPERT, layer=layer, expert=number)


def random_stage(number: int, window: int | None, *, is_grouped: bool = False) -> Stage:
    """Return a stage of random sizes, whose data-parallel ranks divide every unit at random places.

    If it is grouped, experts of some of its layers freeze only together.
    """
    seed = random.Random(number)
    ep_size, num_layers, num_dp = seed.randint(1, 3), seed.randint(1, 3), seed.randint(1, 2)
    num_local, expert_elements = seed.randint(0, 3), seed.randint(1, 1000)
    sizes: dict[tuple[int, int], dict[UnitId, tuple[int, int]]] = {
        (ep_rank, dp_rank): {} for ep_rank in range(ep_size) for dp_rank in range(num_dp)
    }
    for layer in range(num_layers):
        for each in range(ep_size * num_local):
            holders = [sizes[each // num_local, dp_rank] for dp_rank in range(num_dp)]
            _divide(expert(layer, each), expert_elements, holders, seed)
        for kind in (UnitKind.NON_EXPERT, UnitKind.ROUTER):
            unit = UnitId(kind=kind, layer=layer)
            _divide(unit, seed.randint(1, 3000), list(sizes.values()), seed)
    for kind in seed.sample(KINDS, seed.randint(0, len(KINDS))):
        _divide(UnitId(kind=kind), seed.randint(1, 3000), list(sizes.values()), seed)
    config = options_of(
        window=window,
        longest=seed.randint(1, 8),
        measure=seed.choice(["count", "soft-count", "decayed"]),
    )
    layers = [f"layer.{layer}" for layer in range(num_layers)]
    grouped = frozenset(seed.sample(layers, seed.randint(1, num_layers)) if is_grouped else ())
    ranks = [
        RankUnits(ep_rank=ep_rank, sizes=each, grouped_layers=grouped)
        for (ep_rank, _), each in sizes.items()
    ]
    return Stage(ranks, num_layers, ep_size * num_local, config)


ANY_WINDOW = st.none() | st.integers(1, 6)
ANY_KIND = st.booleans()


def stages(
    window: st.SearchStrategy[int | None] = ANY_WINDOW,
    is_grouped: st.SearchStrategy[bool] = ANY_KIND,
) -> st.SearchStrategy[Stage]:
    return st.builds(random_stage, st.integers(0, 2**32), window, is_grouped=is_grouped)


def _divide(
    unit: UnitId,
    elements: int,
    holders: list[dict[UnitId, tuple[int, int]]],
    seed: random.Random,
) -> None:
    """Give each holder of a unit a slice of it, perhaps an empty one."""
    borders = sorted(seed.choices(range(elements + 1), k=len(holders) - 1))
    for holder, start, end in zip(holders, [0, *borders], [*borders, elements], strict=True):
        holder[unit] = (12 * (end - start), 2 * (end - start))


def counts_of(stage: Stage, seed: random.Random) -> Any:
    """Return the ``[layer, expert]`` tokens of an iteration, very unequal ones."""
    rows = [[seed.choice([0, 1, 10, 1000]) for _ in range(stage.num_experts)] for _ in stage.layers]
    return np.array(rows).reshape(len(stage.layers), stage.num_experts)


def positions(window: WindowPlan) -> dict[UnitId, int]:
    """Return which snapshot has each unit at FULL."""
    return {
        unit: position
        for position, snapshot in enumerate(window.snapshots)
        for unit, level in snapshot.levels.items()
        if level is Level.FULL
    }


def window_bytes(window: WindowPlan, sizes: Mapping[UnitId, tuple[int, int]]) -> list[int]:
    """Return ``[snapshot]`` the bytes of a rank's window."""
    return [
        sum(sizes[unit][0 if level is Level.FULL else 1] for unit, level in each.levels.items())
        for each in window.snapshots
    ]


def sizes_of(stage: Stage) -> list[Mapping[UnitId, tuple[int, int]]]:
    return [rank.sizes for rank in stage.ranks]


def options_of(
    window: int | None,
    longest: int,
    measure: str = "count",
    **changes: float,
) -> SparseConfig:
    """Return what flags would say; a window of None is automatic."""
    return SparseConfig(
        window="auto" if window is None else str(window),
        max_window=longest,
        unit_order=measure,
        **changes,
    )


def values(strategy: SparseStrategy, copied: float | None, flow: float | None) -> list[int]:
    """Return what a rank says that has measured so much."""
    strategy.note_measured(MeasuredBytes(copied_bytes=copied, flow_bytes=flow))
    return strategy.values()


SEEDS = st.randoms(use_true_random=False)

# Of this stage of two ranks with three layers of two experts one order needs too much memory.
NUMBER_OF_TIGHT_STAGE = 2388
REFUSED, TAKEN = [[1, 9], [1, 1], [1, 9]], [[900, 100], [800, 200], [700, 300]]

# A stage worked by hand: one rank, two layers with two experts each, 10 elements a unit

UNITS = [expert(layer, number) for layer in range(2) for number in range(2)]
EMBEDDING, NORM = UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.FINAL_NORM)
DENSE = [UnitId(kind=UnitKind.NON_EXPERT, layer=layer) for layer in range(2)]
ROUTERS = [UnitId(kind=UnitKind.ROUTER, layer=layer) for layer in range(2)]
SIZES = dict.fromkeys([*UNITS, EMBEDDING, NORM, *DENSE, *ROUTERS], (120, 20))


def by_hand(
    window: int | None = 5, longest: int = 8, *, is_grouped: bool = False, **changes: Any
) -> Stage:
    config = options_of(window=window, longest=longest, **changes)
    grouped = frozenset({"layer.0", "layer.1"} if is_grouped else ())
    return Stage([RankUnits(ep_rank=0, sizes=SIZES, grouped_layers=grouped)], 2, 2, config)


def groups(window: WindowPlan) -> list[list[UnitId]]:
    """Return ``[snapshot]`` the units at FULL in their order."""
    return [
        [unit for unit, level in each.levels.items() if level is Level.FULL]
        for each in window.snapshots
    ]


def order(stage: Stage) -> list[UnitId]:
    return [unit for group in groups(stage.plan()[0]) for unit in group]


# Of the stage by hand: the largest snapshot of the windows of 1, 2, ... snapshots.
LARGEST = [1200, 700, 500, 420, 380]
