"""Sparse windows: every unit FULL once, COMPUTE before it, alike on all ranks, and never too large."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.strategies.interface import WindowPlan
from moe_ft.strategies.sparse.positions import RankUnits
from moe_ft.strategies.sparse.strategy import SparseSettings, SparseStrategy
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
        self, ranks: Sequence[RankUnits], num_layers: int, num_experts: int, config: SparseSettings
    ) -> None:
        self.ranks, self.num_experts = list(ranks), num_experts
        self.layers = [f"layer.{layer}" for layer in range(num_layers)]
        self.strategies = [
            SparseStrategy(rank, ranks, self.layers, config) for rank in range(len(ranks))
        ]

    def plan(self, iteration: int = 0, *, is_last: bool = False) -> list[WindowPlan]:
        """Return the next window of every rank."""
        return [each.plan_window(iteration, is_last=is_last) for each in self.strategies]

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
        values = [
            strategy.values(budget, budget)
            for strategy, budget in zip(self.strategies, each, strict=True)
        ]
        if values[0]:
            values.append([-wanted_elsewhere])
        least = [min(column) for column in zip(*values, strict=True)]
        return [strategy.agree(least) for strategy in self.strategies]

    def settle(self, budget: float, rounds: int = 3) -> int:
        """Have a budget take effect and return the length of the window."""
        for _ in range(rounds):
            self.agree(budget)
        return self.window

    @property
    def window(self) -> int:
        """The length that all ranks have."""
        (length,) = {strategy.window for strategy in self.strategies}
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
    config = SparseSettings(
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
    """Give each of those that hold a unit a slice of it, perhaps an empty one."""
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


# What a window holds

SEEDS = st.randoms(use_true_random=False)


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_every_unit_of_a_rank_is_full_once_and_compute_in_all_snapshots_before_it_only(
    stage: Stage, seed: random.Random
) -> None:
    for iteration in range(3):
        for rank, window in zip(stage.ranks, stage.plan(iteration), strict=True):
            full_at = positions(window)
            assert set(full_at) == set(rank.sizes)
            for unit, position in full_at.items():
                levels = [each.levels.get(unit) for each in window.snapshots]
                rest = len(levels) - position - 1
                assert levels == [Level.COMPUTE] * position + [Level.FULL] + [None] * rest
        stage.count(counts_of(stage, seed))


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_all_ranks_have_a_shared_unit_at_full_in_the_same_snapshot(
    stage: Stage, seed: random.Random
) -> None:
    for iteration in range(3):
        found: dict[UnitId, set[int]] = {}
        for window in stage.plan(iteration):
            for unit, position in positions(window).items():
                found.setdefault(unit, set()).add(position)
        assert all(len(places) == 1 for places in found.values())
        stage.count(counts_of(stage, seed))


@settings(max_examples=20)
@given(stages(window=st.integers(1, 6)))
def test_window_of_a_fixed_length_has_it_on_every_rank(stage: Stage) -> None:
    length = stage.strategies[0].window
    assert [len(window.snapshots) for window in stage.plan()] == [length] * len(stage.ranks)


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_plans_of_one_key_are_equal_and_those_of_others_differ(
    stage: Stage, seed: random.Random
) -> None:
    # The engine keeps the layout of each key.
    strategy = stage.strategies[-1]
    found: dict[Any, list[Any]] = {}
    for iteration in range(4):
        window = strategy.plan_window(iteration)
        levels = [list(each.levels.items()) for each in window.snapshots]
        assert found.setdefault(window.key, levels) == levels
        strategy.add_tokens(counts_of(stage, seed))


def limits_of(stage: Stage) -> list[float]:
    """Return ``[rank]`` what the memory is made for."""
    return [
        max(sum(window_bytes(window, rank.sizes)) for window in strategy.possible_windows())
        * (1 + strategy.memory_margin)
        for rank, strategy in zip(stage.ranks, stage.strategies, strict=True)
    ]


@settings(max_examples=20)
@given(stages(), SEEDS)
def test_no_window_takes_more_memory_than_the_possible_ones_and_the_margin_whatever_the_order(
    stage: Stage, seed: random.Random
) -> None:
    limits = limits_of(stage)
    for iteration in range(4):
        stage.settle(seed.choice([1, 3_000, 30_000, 10**6]))
        stage.count(counts_of(stage, seed))
        for rank, window, limit in zip(stage.ranks, stage.plan(iteration), limits, strict=True):
            assert sum(window_bytes(window, rank.sizes)) <= limit


# Of this stage of two ranks with three layers of two experts one order needs too much memory.
NUMBER_OF_TIGHT_STAGE = 2388
REFUSED, TAKEN = [[1, 9], [1, 1], [1, 9]], [[900, 100], [800, 200], [700, 300]]


def test_window_that_grows_after_a_change_of_the_order_fits_into_memory() -> None:
    # In a window of one snapshot every order takes the same.
    stage = random_stage(NUMBER_OF_TIGHT_STAGE, None)
    limits = limits_of(stage)
    assert stage.settle(10**6) == 1
    stage.count(REFUSED)
    stage.plan()
    stage.settle(1)
    for rank, window, limit in zip(stage.ranks, stage.plan(), limits, strict=True):
        assert sum(window_bytes(window, rank.sizes)) <= limit


@settings(max_examples=20)
@given(stages())
def test_last_window_of_a_training_holds_everything_at_once(stage: Stage) -> None:
    for rank, window in zip(stage.ranks, stage.plan(7, is_last=True), strict=True):
        (snapshot,) = window.snapshots
        assert dict(snapshot.levels) == dict.fromkeys(rank.sizes, Level.FULL)


@settings(max_examples=20)
@given(stages(window=st.just(1)))
def test_window_of_one_snapshot_holds_what_a_dense_one_does(stage: Stage) -> None:
    for rank, window in zip(stage.ranks, stage.plan(), strict=True):
        (snapshot,) = window.snapshots
        assert dict(snapshot.levels) == dict.fromkeys(rank.sizes, Level.FULL)


@settings(max_examples=20)
@given(stages())
def test_possible_windows_are_the_longest_that_may_be_chosen_and_the_last_one(stage: Stage) -> None:
    for strategy in stage.strategies:
        longest, last = strategy.possible_windows()
        assert longest == strategy.plan_window(0)
        assert last == strategy.plan_window(1, is_last=True)


@settings(max_examples=20)
@given(stages(window=st.none(), is_grouped=st.just(False)), st.integers(1, 40_000))
def test_longest_window_takes_the_most_memory(stage: Stage, budget: int) -> None:
    longest = [sum(window_bytes(*each)) for each in zip(stage.plan(), sizes_of(stage), strict=True)]
    stage.settle(budget)
    shorter = [sum(window_bytes(*each)) for each in zip(stage.plan(), sizes_of(stage), strict=True)]
    assert all(most >= other for most, other in zip(longest, shorter, strict=True))


@settings(max_examples=20)
@given(stages())
def test_nothing_rotates(stage: Stage) -> None:
    for strategy in stage.strategies:
        assert strategy.saves_all
        assert (strategy.rotating, strategy.most_rotating) == (frozenset(), 0)
        assert strategy.plan_persist(is_last=True) == frozenset()
        assert all(not each.rotating for each in strategy.plan_window(0).snapshots)


# A stage worked by hand: one rank, two layers with two experts each, 10 elements a unit

UNITS = [expert(layer, number) for layer in range(2) for number in range(2)]
EMBEDDING, NORM = UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.FINAL_NORM)
DENSE = [UnitId(kind=UnitKind.NON_EXPERT, layer=layer) for layer in range(2)]
ROUTERS = [UnitId(kind=UnitKind.ROUTER, layer=layer) for layer in range(2)]
SIZES = dict.fromkeys([*UNITS, EMBEDDING, NORM, *DENSE, *ROUTERS], (120, 20))


def by_hand(
    window: int | None = 5, longest: int = 8, *, is_grouped: bool = False, **changes: Any
) -> Stage:
    config = SparseSettings(window=window, longest=longest, **changes)
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


def test_experts_come_first_and_the_rest_from_back_to_front() -> None:
    found = order(by_hand())
    assert set(found[: len(UNITS)]) == set(UNITS)
    assert found[len(UNITS) :] == [
        NORM,
        DENSE[1],
        ROUTERS[1],
        DENSE[0],
        ROUTERS[0],
        EMBEDDING,
    ]


def test_parts_of_a_multi_token_prediction_layer_come_before_those_of_the_decoder() -> None:
    mtp = UnitId(kind=UnitKind.NON_EXPERT, block="mtp", layer=0)
    output, other = UnitId(kind=UnitKind.OUTPUT), UnitId(kind=UnitKind.OTHER)
    sizes = {unit: (12, 2) for unit in (EMBEDDING, DENSE[1], mtp, other, NORM, output)}
    config = SparseSettings(window=1, longest=1)
    stage = Stage([RankUnits(ep_rank=0, sizes=sizes)], 0, 0, config)
    window = stage.strategies[0].possible_windows()[0]
    assert list(window.snapshots[0].levels) == [output, NORM, other, mtp, DENSE[1], EMBEDDING]


def test_groups_are_cut_so_that_the_largest_snapshot_is_the_smallest() -> None:
    # 120 for each unit at FULL and 20 for each that comes later.
    (window,) = by_hand(window=3).plan()
    assert window_bytes(window, SIZES) == [3 * 120 + 7 * 20, 3 * 120 + 4 * 20, 4 * 120]


def test_experts_are_ordered_by_their_share_of_the_tokens_of_their_layer() -> None:
    stage = by_hand()
    stage.count([[9, 1], [400, 600]])
    expected = [expert(0, 1), expert(1, 0), expert(1, 1), expert(0, 0)]
    assert order(stage)[:4] == expected


def test_experts_that_are_equally_popular_are_in_the_order_of_their_numbers() -> None:
    stage = by_hand()
    stage.count([[5, 5], [5, 5]])
    assert order(stage)[:4] == UNITS


def test_experts_of_layers_in_which_nothing_is_counted_come_first() -> None:
    config = SparseSettings(window=1, longest=1)
    strategy = SparseStrategy(0, [RankUnits(ep_rank=0, sizes=SIZES)], ["layer.0"], config)
    strategy.add_tokens(np.array([[2, 1]]))
    (snapshot,) = strategy.plan_window(0).snapshots
    assert list(snapshot.levels)[:4] == [expert(1, 0), expert(1, 1), expert(0, 1), expert(0, 0)]


def test_ranks_of_one_expert_parallel_rank_order_alike_and_others_their_own() -> None:
    # Ranks 0 and 1 have the even experts, ranks 2 and 3 the odd ones.
    def units(ep_rank: int) -> RankUnits:
        own = {expert(0, number): (12, 2) for number in range(ep_rank, 4, 2)}
        return RankUnits(ep_rank=ep_rank, sizes=own)

    stage = Stage(
        [units(rank // 2) for rank in range(4)], 1, 4, SparseSettings(window=2, longest=2)
    )
    stage.count([[5, 1, 3, 4]])
    found = [[unit.expert for group in groups(each) for unit in group] for each in stage.plan()]
    assert found == [[2, 0], [2, 0], [1, 3], [1, 3]]


# Experts that freeze only together


def grouped_stage(num_layers: int, num_local: int, window: int, num_owners: int = 1) -> Stage:
    """Return a stage of two expert-parallel ranks, whose equal experts so many ranks share layer by layer."""
    layers = frozenset(f"layer.{layer}" for layer in range(num_layers))
    ranks = []
    for ep_rank in range(2):
        own = range(ep_rank * num_local, (ep_rank + 1) * num_local)
        for owner in range(num_owners):
            sizes = {
                expert(layer, each): (12, 2)
                if layer * num_owners // num_layers == owner
                else (0, 0)
                for layer in range(num_layers)
                for each in own
            }
            ranks.append(RankUnits(ep_rank=ep_rank, sizes=sizes, grouped_layers=layers))
    config = SparseSettings(window=window, longest=window)
    return Stage(ranks, num_layers, 2 * num_local, config)


def frozen_modules(stage: Stage, rank: int = 0) -> list[list[int]]:
    """Return ``[replay]`` the layers of which a rank has no expert at FULL yet."""
    full_at = positions(stage.plan()[rank])
    first = {
        layer: min(own for unit, own in full_at.items() if unit.layer == layer)
        for layer in {unit.layer for unit in full_at}
    }
    num_replays = max(full_at.values())
    return [
        sorted(layer for layer, own in first.items() if own > replay)
        for replay in range(num_replays)
    ]


def test_modules_are_frozen_from_the_most_popular_on_in_every_replay() -> None:
    stage = grouped_stage(num_layers=4, num_local=4, window=4)
    # Of the second expert-parallel rank's tokens each layer has what the first one's has not.
    stage.count([[1, 0, 0, 99] + [25] * 4, [20] * 4 + [5] * 4, [4] * 4 + [21] * 4, [9] * 8])
    # The first rank's shares are 0.5, 0.8, 0.16 and 0.5, the second's the rest: 0.5, 0.2, 0.84 and 0.5.
    assert frozen_modules(stage) == [[0, 1, 3], [1, 3], [1]]
    assert frozen_modules(stage, 1) == [[0, 2, 3], [2, 3], [2]]


def test_modules_of_two_owners_are_frozen_as_many_of_each() -> None:
    stage = grouped_stage(num_layers=6, num_local=2, window=3, num_owners=2)
    stage.count([[each + 1, 1, 10, 10] for each in range(6)])
    assert frozen_modules(stage) == [[1, 2, 4, 5], [2, 5]]
    stage.count([[60 - 10 * each, 1, 10, 10] for each in range(6)])
    assert stage.plan()[0].facts["reordered"]
    assert frozen_modules(stage) == [[0, 1, 3, 4], [0, 3]]


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), SEEDS)
def test_with_groups_of_modules_no_replay_freezes_a_module_less_than_can_be(
    num_layers: int, num_local: int, window: int, num_owners: int, seed: random.Random
) -> None:
    # A border between two groups divides one module of each owner at most.
    stage = grouped_stage(num_layers, num_local, window, num_owners)
    stage.count(counts_of(stage, seed))
    plans = stage.plan()
    for rank, plan in enumerate(plans):
        full_at = positions(plan)
        for replay, frozen in enumerate(frozen_modules(stage, rank)):
            num_frozen = sum(own > replay for own in full_at.values())
            assert num_frozen - num_local * len(frozen) <= num_owners * (num_local - 1)


def test_grouped_experts_make_no_snapshot_larger_where_one_rank_has_them_all() -> None:
    for window in range(1, 6):
        grouped, single = by_hand(window=window), by_hand(window=window, is_grouped=True)
        facts = [stage.plan()[0].facts["largest_bytes"] for stage in (grouped, single)]
        assert facts == [LARGEST[window - 1]] * 2


# When the order changes


def test_order_is_made_when_the_first_tokens_are_known() -> None:
    stage = by_hand()
    stage.plan()
    stage.count([[9, 1], [1, 9]])
    (window,) = stage.plan()
    assert window.facts["reordered"]


def test_order_stays_while_popularity_has_not_moved() -> None:
    stage = by_hand()
    stage.count([[60, 40], [55, 45]])
    before = order(stage)
    for _ in range(5):
        stage.count([[62, 38], [53, 47]])  # less than ten percent of each
        (window,) = stage.plan()
        assert not window.facts["reordered"]
        assert [unit for group in groups(window) for unit in group] == before


def test_order_changes_when_a_quarter_of_the_experts_has_moved() -> None:
    stage = by_hand()
    stage.count([[60, 40], [55, 45]])
    stage.plan()
    stage.count([[60, 40], [20, 80]])  # two of four
    assert stage.plan()[0].facts["reordered"]
    assert order(stage)[:4] == [expert(1, 0), expert(0, 1), expert(0, 0), expert(1, 1)]


def test_order_stays_when_fewer_experts_have_moved_than_asked_for() -> None:
    stage = by_hand(fraction=0.75)
    stage.count([[60, 40], [55, 45]])
    stage.plan()
    stage.count([[60, 40], [20, 80]])
    assert not stage.plan()[0].facts["reordered"]


def test_popularity_is_counted_since_the_order_was_made() -> None:
    stage = by_hand()
    stage.count([[1000, 1], [1, 1]])
    stage.plan()
    stage.count([[1, 2], [1, 2]])  # with the tokens before, nothing would have moved
    assert stage.plan()[0].facts["reordered"]
    assert order(stage)[:4] == [expert(0, 0), expert(1, 0), expert(0, 1), expert(1, 1)]


def test_order_is_not_said_to_have_changed_where_it_comes_out_the_same() -> None:
    stage = by_hand()
    stage.count([[1, 9], [1, 9]])
    stage.plan()
    stage.count([[4, 6], [4, 6]])  # moved, and ascending as before
    assert not stage.plan()[0].facts["reordered"]


def test_order_that_needs_more_memory_than_there_is_is_not_taken_and_said_to_be_refused() -> None:
    stage = random_stage(NUMBER_OF_TIGHT_STAGE, None)
    before = [groups(window) for window in stage.plan()]
    stage.count(REFUSED)
    after = stage.plan()
    assert [groups(window) for window in after] == before
    for window in after:
        assert window.facts["reorder_refused"] and not window.facts["reordered"]


def test_order_that_was_refused_is_tried_again_with_all_that_was_counted() -> None:
    stage = random_stage(NUMBER_OF_TIGHT_STAGE, None)
    stage.count(REFUSED)
    for _ in range(2):  # popularity has not moved in between
        assert stage.plan()[0].facts["reorder_refused"]
    stage.count(TAKEN)
    (facts, _) = (window.facts for window in stage.plan())
    assert facts["reordered"] and not facts["reorder_refused"]


@pytest.mark.parametrize("window", [2, 3, 4])
def test_popularity_decides_the_order_where_each_data_parallel_rank_has_some_of_the_layers(
    window: int,
) -> None:
    # That is how the distributed optimizer divides a stage: every rank gets a run of its parameters.
    large, nothing = (12_000, 2_000), (0, 0)
    ranks = [
        RankUnits(
            ep_rank=0,
            sizes={
                expert(layer, number): large if layer // 2 == dp_rank else nothing
                for layer in range(4)
                for number in range(8)
            },
        )
        for dp_rank in range(2)
    ]
    for number in range(5):
        stage = Stage(ranks, 4, 8, SparseSettings(window=window, longest=8))
        stage.count(np.random.default_rng(number).gamma(1, size=(4, 8)) * 1000)
        assert stage.plan()[0].facts["reordered"]


def test_stage_without_experts_is_planned_and_reordered_by_nothing() -> None:
    sizes = {EMBEDDING: (120, 20), NORM: (12, 2)}
    stage = Stage([RankUnits(ep_rank=0, sizes=sizes)], 0, 0, SparseSettings(window=2, longest=2))
    stage.count(np.zeros((0, 0)))
    assert groups(stage.plan()[0]) == [[NORM], [EMBEDDING]]


def test_rank_that_saves_nothing_plans_a_window_like_the_others() -> None:
    ranks = [
        RankUnits(ep_rank=0, sizes=sizes)
        for sizes in ({NORM: (120, 20), EMBEDDING: (120, 20)}, {NORM: (0, 0), EMBEDDING: (0, 0)})
    ]
    stage = Stage(ranks, 0, 0, SparseSettings(window=2, longest=2))
    assert [groups(window) for window in stage.plan()] == [[[NORM], [EMBEDDING]]] * 2


# How long a window is

# Of the stage by hand: the largest snapshot of the windows of 1, 2, ... snapshots.
LARGEST = [1200, 700, 500, 420, 380]


def test_largest_snapshots_of_the_stage_by_hand_are_those_that_the_tests_assume() -> None:
    found = [by_hand(window=length).plan()[0].facts["largest_bytes"] for length in range(1, 6)]
    assert found == LARGEST


def test_window_is_the_longest_until_something_was_measured() -> None:
    stage = by_hand(window=None, longest=4)
    for _ in range(3):
        stage.agree(None)
    assert stage.window == 4


@pytest.mark.parametrize(
    ("budget", "length"), [(1400, 1), (780, 2), (777, 3), (556, 3), (468, 4), (466, 5)]
)
def test_window_is_the_shortest_whose_snapshots_fit_with_some_room(
    budget: int, length: int
) -> None:
    assert by_hand(window=None).settle(budget) == length


def test_window_is_the_longest_where_nothing_fits() -> None:
    assert by_hand(window=None, longest=3).settle(1) == 3


def test_window_grows_as_soon_as_a_snapshot_does_not_fit_any_more() -> None:
    stage = by_hand(window=None)
    assert stage.settle(780) == 2
    assert stage.settle(699) == 3


def test_window_does_not_shrink_to_one_that_would_fit_without_any_room() -> None:
    stage = by_hand(window=None)
    assert stage.settle(600) == 3
    assert stage.settle(701) == 3
    assert stage.settle(780) == 2


def test_window_does_not_swing_while_the_budget_varies_a_little() -> None:
    stage = by_hand(window=None)
    stage.settle(780)
    found = {stage.settle(budget, 1) for budget in (750, 785, 760, 775, 755, 790, 780)}
    assert found == {2}


def test_rank_with_the_least_budget_decides() -> None:
    config = SparseSettings(window=None, longest=8)
    stage = Stage([RankUnits(ep_rank=0, sizes=SIZES)] * 2, 2, 2, config)
    for _ in range(3):
        stage.agree(1400, 468)
    assert stage.window == 4


def test_stage_that_needs_the_longest_window_decides() -> None:
    stage = by_hand(window=None)
    stage.settle(1400)
    assert stage.agree(1400, wanted_elsewhere=5) == [{"window": 5}]
    assert stage.window == 5


def test_window_follows_when_the_other_stage_needs_less() -> None:
    stage = by_hand(window=None)
    stage.settle(1400)
    stage.agree(1400, wanted_elsewhere=5)
    stage.agree(1400)
    assert stage.window == 1


@settings(max_examples=20)
@given(stages(window=st.none()), st.lists(st.integers(1, 40_000), min_size=1, max_size=8))
def test_all_ranks_have_the_same_length_within_its_limits_after_every_agreement(
    stage: Stage, budgets: list[int]
) -> None:
    longest = stage.window
    for budget in budgets:
        stage.agree(budget)
        assert 1 <= stage.window <= longest
        assert {len(window.snapshots) for window in stage.plan()} == {stage.window}


@settings(max_examples=20)
@given(stages(window=st.none()), SEEDS)
def test_window_that_was_agreed_on_fits_the_budget_if_any_does(
    stage: Stage, seed: random.Random
) -> None:
    def largest(length: int) -> int:
        config = SparseSettings(window=length, longest=length)
        fixed = SparseStrategy(0, stage.ranks, stage.layers, config)
        return int(fixed.plan_window(0).facts["largest_bytes"])

    possible = [largest(length) for length in range(1, stage.window + 1)]
    budget = seed.randint(min(possible), 2 * max(possible))
    assert possible[stage.settle(budget) - 1] <= budget


def test_change_of_the_length_is_reported_once() -> None:
    stage = by_hand(window=None)
    found = [stage.agree(780)[0] for _ in range(4)]
    assert [each for each in found if each] == [{"window": 2}]


def test_fixed_length_is_not_agreed_on() -> None:
    stage = by_hand(window=3)
    assert stage.strategies[0].values(1.0, 1.0) == []
    assert stage.agree(1) == [{}]
    assert stage.window == 3


@pytest.mark.parametrize(("copied", "flow"), [(None, 5e9), (5e9, None), (None, None)])
def test_longest_window_is_wanted_until_both_parts_were_measured(
    copied: float | None, flow: float | None
) -> None:
    strategy = by_hand(window=None).strategies[0]
    assert strategy.values(copied, flow) == [-8]
    assert strategy.values(5e9, 5e9) == [-1]


@pytest.mark.parametrize(("copied", "flow"), [(780.0, 900.0), (900.0, 780.0)])
def test_budget_is_the_lesser_of_both_parts(copied: float, flow: float) -> None:
    strategy = by_hand(window=None).strategies[0]
    assert strategy.values(copied, flow) == [-2]
    assert strategy.plan_window(0).facts["budget_bytes"] == 780


def test_rank_that_saves_nothing_does_not_hold_up_the_others() -> None:
    # It will never measure anything.
    nothing = dict.fromkeys(SIZES, (0, 0))
    ranks = [RankUnits(ep_rank=0, sizes=sizes) for sizes in (SIZES, nothing)]
    stage = Stage(ranks, 2, 2, SparseSettings(window=None, longest=8))
    for _ in range(3):
        stage.agree(1400, None)
    assert stage.window == 1


def test_rank_wants_what_its_own_snapshots_need() -> None:
    # Of two ranks with the same units, one copies half as fast.
    ranks = [RankUnits(ep_rank=0, sizes=SIZES)] * 2
    stage = Stage(ranks, 2, 2, SparseSettings(window=None, longest=8))
    fast, slow = stage.strategies
    assert fast.values(1400, 1400) == [-1]
    assert slow.values(700, 700) == [-3]


def test_window_says_what_it_was_planned_for() -> None:
    stage = by_hand(window=None)
    stage.settle(780)
    (window,) = stage.plan()
    assert window.facts == {
        "reordered": False,
        "reorder_refused": False,
        "largest_bytes": 700,
        "budget_bytes": 780,
    }


def test_window_that_was_planned_without_a_measurement_names_no_budget() -> None:
    assert by_hand().plan()[0].facts["budget_bytes"] is None


# Which iterations are whole


def test_window_of_several_snapshots_leaves_no_iteration_whole() -> None:
    strategy = by_hand(window=2).strategies[0]
    strategy.plan_window(5)
    strategy.note_complete(6)
    assert not strategy.is_whole(6)


def test_window_of_one_snapshot_leaves_its_iteration_whole() -> None:
    strategy = by_hand(window=1).strategies[0]
    strategy.plan_window(5)
    strategy.note_complete(5)
    assert strategy.is_whole(5)
    assert not strategy.is_whole(4)


def test_last_window_leaves_its_iteration_whole_when_all_ranks_have_it() -> None:
    strategy = by_hand(window=3).strategies[0]
    strategy.plan_window(9, is_last=True)
    assert not strategy.is_whole(9)
    strategy.note_complete(9)
    assert strategy.is_whole(9)


@settings(max_examples=20)
@given(SEEDS)
def test_ranks_that_count_the_same_tokens_stay_in_the_same_order(seed: random.Random) -> None:
    config = SparseSettings(window=3, longest=3, measure="decayed")
    stage = Stage([RankUnits(ep_rank=0, sizes=SIZES)] * 3, 2, 2, config)
    for iteration in range(5):
        stage.count(counts_of(stage, seed))
        found = [groups(window) for window in stage.plan(iteration)]
        assert found == [found[0]] * 3
