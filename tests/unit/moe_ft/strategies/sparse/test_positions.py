"""Orders of a stage: nobody's state is bunched together, and within what a rank owns the order is kept."""

import random
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.strategies.sparse.windows import (
    PositionSizes,
    RankUnits,
    StageUnits,
    cut_window,
    order_modules,
    spread_over_ranks,
)
from moe_ft.units import UnitId, UnitKind


@st.composite
def owned(draw: st.DrawFn, *, shared: bool = True) -> npt.NDArray[np.int64]:
    """Return ``[rank, unit]`` bytes; each unit is one rank's, or divided between two."""
    num_ranks, num_units = draw(st.integers(1, 4)), draw(st.integers(0, 12))
    full = np.zeros((num_ranks, num_units), np.int64)
    for unit in range(num_units):
        owners = st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=2 if shared else 1)
        for rank in draw(owners):
            full[rank, unit] += draw(st.integers(1, 1000))
    return full


def runs(num_ranks: int, num_each: int) -> npt.NDArray[np.int64]:
    """Return ``[rank, unit]`` bytes where every rank owns as many neighbouring units of 600 bytes."""
    return np.kron(np.eye(num_ranks, dtype=np.int64), np.full((1, num_each), 600))


@given(owned(shared=False))
def test_units_of_one_owner_keep_their_order(full: npt.NDArray[np.int64]) -> None:
    order = spread_over_ranks(full)
    for row in full:
        own = [unit for unit in order if row[unit]]
        assert own == sorted(own)


@given(owned())
def test_with_one_owner_nothing_changes(full: npt.NDArray[np.int64]) -> None:
    together = full.sum(axis=0, keepdims=True)
    assert spread_over_ranks(together) == list(range(full.shape[1]))
    # Tensor-parallel ranks each have a part of everything: that is one owner in several ranks.
    assert spread_over_ranks(np.repeat(together, 3, axis=0)) == list(range(full.shape[1]))


def test_rank_with_fewer_and_larger_units_has_them_as_far_apart() -> None:
    full = np.array([[10, 10, 10, 10, 0, 0], [0, 0, 0, 0, 20, 20]])
    # Middles at 1/8, 3/8, 5/8, 7/8 of the first rank's bytes, and at 1/4 and 3/4 of the second's.
    assert spread_over_ranks(full) == [0, 4, 1, 2, 5, 3]


def test_unit_that_two_ranks_share_is_where_it_is_for_them_on_average() -> None:
    full = np.array([[10, 10, 20, 0, 0], [0, 0, 20, 10, 10]])
    # The middles of the third unit are at 3/4 and 1/4; the others are at 1/8, 3/8, 5/8 and 7/8.
    assert spread_over_ranks(full) == [0, 1, 2, 3, 4]


def test_unit_that_nobody_owns_stays_about_where_it_is() -> None:
    full = np.array([[10, 0, 10, 0, 0], [0, 0, 0, 10, 10]])
    assert spread_over_ranks(full) == [0, 3, 1, 2, 4]


@pytest.mark.parametrize("length", [2, 3, 4, 6])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_largest_snapshot_is_about_that_of_one_owner_of_everything(
    num_ranks: int, length: int
) -> None:
    full = runs(num_ranks, 12)
    spread = full[:, spread_over_ranks(full)]

    def largest(sizes: npt.NDArray[np.int64]) -> int:
        return cut_window(PositionSizes(full=sizes, compute=sizes // 6), length).largest_bytes

    single = largest(runs(1, 12))
    assert largest(spread) <= single + 600  # a unit more: a cut cannot suit all
    if num_ranks >= length:
        assert largest(full) == 600 * 12  # all that a rank has, which a dense snapshot has too


def test_experts_are_spread_over_the_ranks_that_own_them() -> None:
    # Expert-parallel rank 0 has experts 0 to 3, which two ranks own; rank 1 has the others alone.
    def units(ep_rank: int, owned: range) -> RankUnits:
        own = range(4 * ep_rank, 4 * ep_rank + 4)
        return RankUnits(
            ep_rank=ep_rank,
            sizes={
                UnitId(kind=UnitKind.EXPERT, layer=0, expert=each): (12, 2)
                if each in owned
                else (0, 0)
                for each in own
            },
        )

    ranks = [units(0, range(2)), units(0, range(2, 4)), units(1, range(4, 8))]
    order = StageUnits(ranks, ["layer.0"]).order(np.array([[1.0, 2, 3, 4, 8, 7, 6, 5]]))
    found = {
        ep_rank: [unit.expert if unit else None for unit in column]
        for ep_rank, column in order.columns.items()
    }
    assert found == {0: [0, 2, 1, 3], 1: [7, 6, 5, 4]}
    assert order.sizes.full.tolist() == [[12, 0, 12, 0], [0, 12, 0, 12], [12] * 4]
    assert order.sizes.compute.tolist() == [[2, 0, 2, 0], [0, 2, 0, 2], [2] * 4]


def test_rank_with_fewer_experts_has_none_at_the_last_positions() -> None:
    sizes = [
        {UnitId(kind=UnitKind.EXPERT, layer=0, expert=each): (12, 2) for each in own}
        for own in ([0, 1], [2])
    ]
    norm = UnitId(kind=UnitKind.FINAL_NORM)
    ranks = [RankUnits(ep_rank=rank, sizes={**own, norm: (6, 1)}) for rank, own in enumerate(sizes)]
    order = StageUnits(ranks, ["layer.0"]).order(np.ones((1, 3)))
    assert [str(unit) for unit in order.columns[1]] == ["layer.0.expert.2", "None", "final-norm"]
    assert order.sizes.full.tolist() == [[12, 12, 6], [12, 0, 6]]


# Experts that freeze only together


def test_modules_are_in_ascending_order_of_popularity_and_their_experts_together() -> None:
    popularity, modules = [0.9, 0.1, 0.3, 0.4, 0.0, 0.6], list("aabbcc")
    # 0.5, 0.35 and 0.3 on average; the most popular expert does not make its module the last.
    assert order_modules([0.6, 0.4, 0.3, 0.4, 0.0, 0.6], modules, runs(1, 6)) == [4, 5, 2, 3, 0, 1]
    assert order_modules(popularity, modules, runs(1, 6)) == [4, 5, 2, 3, 0, 1]


def test_modules_that_are_equally_popular_are_in_the_order_of_the_model() -> None:
    assert order_modules([0.5] * 6, list("abcabc"), runs(1, 6)) == [0, 3, 1, 4, 2, 5]


def test_ranks_with_whole_modules_have_one_after_the_other() -> None:
    # Rank 0 owns modules a and b, rank 1 c and d. Both are in the second expert of their first at once.
    order = order_modules([4, 4, 3, 3, 2, 2, 1, 1], list("aabbccdd"), runs(2, 4))
    assert order == [6, 2, 7, 3, 4, 0, 5, 1]


def test_module_that_two_ranks_share_stays_together_as_far_as_their_other_modules_allow() -> None:
    # Module c is rank 0's most popular and rank 1's least popular one, and each has half of it. In the
    # order of popularity its experts would be first and last.
    modules = list("aabbccddee")
    order = order_modules([1, 1, 2, 2, 3, 3, 4, 4, 5, 5], modules, runs(2, 5))
    places = [order.index(index) for index in (4, 5)]
    assert max(places) - min(places) == 1
    by_popularity = spread_over_ranks(runs(2, 5))
    places = [by_popularity.index(index) for index in (4, 5)]
    assert max(places) - min(places) == 7


@given(owned(), st.randoms(use_true_random=False))
def test_every_expert_has_one_place_whatever_the_modules(
    full: npt.NDArray[np.int64], seed: random.Random
) -> None:
    popularity = [seed.random() for _ in full[0]]
    modules = [seed.randint(0, 4) for _ in full[0]]
    order = order_modules(popularity, modules, full)
    assert sorted(order) == list(range(full.shape[1]))
    assert order == order_modules(popularity, modules, full)
    together = order_modules(popularity, modules, full.sum(axis=0, keepdims=True))
    changes = sum(a != b for a, b in pairwise([modules[index] for index in together]))
    assert changes == max(0, len(set(modules)) - 1)


def test_only_the_layers_that_are_grouped_are_ordered_as_a_whole() -> None:
    # Layer 0 is grouped, layer 1 is not; equal shares of tokens are in the order of the model.
    experts = [
        UnitId(kind=UnitKind.EXPERT, layer=layer, expert=each)
        for layer in (0, 1)
        for each in (0, 1)
    ]
    sizes = {unit: (12, 2) for unit in experts}
    scores = np.array([[0.2, 0.8], [0.6, 0.4]])

    def order(grouped: frozenset[str]) -> tuple[list[str], list[int] | None]:
        units = RankUnits(ep_rank=0, sizes=sizes, grouped_layers=grouped)
        found = StageUnits([units], ["layer.0", "layer.1"]).order(scores)
        splits = found.sizes.splits
        return [str(unit) for unit in found.columns[0]], None if splits is None else splits.tolist()

    a, b, c, d = map(str, experts)
    assert order(frozenset()) == ([a, d, c, b], None)
    assert order(frozenset({"layer.0"})) == ([d, a, b, c], [0, 0, 1, 0, 0])
    assert order(frozenset({"layer.0", "layer.1"})) == ([a, b, c, d], [0, 1, 0, 1, 0])
