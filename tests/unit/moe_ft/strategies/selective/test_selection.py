"""Selection within budgets: the rule, its limits, and Algorithm 1, compared with all selections there are."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.strategies.selective.selection import (
    AGE,
    PAPER,
    Need,
    RankLoads,
    by_rate,
    divide_quota,
    select,
)
from tests.unit.moe_ft.strategies.selective.budgets import (
    ALWAYS,
    SIZE,
    chosen,
    layout,
    loads_of,
    need_of,
)


def pick(
    need: Need,
    experts: ExpertLayout,
    count: int,
    rule: str = AGE,
    *,
    age_limit: int = 10**6,
    turn: int = 0,
) -> set[tuple[int, int]]:
    """Return the experts that are selected where each rank has room for some."""
    loads = loads_of(experts)
    rooms = loads.rooms(ALWAYS + count * SIZE)
    return chosen(select(need, loads, rooms, experts, rule, age_limit=age_limit, turn=turn))


@st.composite
def cases(draw: st.DrawFn) -> tuple[ExpertLayout, Need, int]:
    """Draw a small stage, its tokens and ages, and the experts that each rank has room for."""
    ep_size = draw(st.integers(1, 2))
    experts = layout(draw(st.integers(1, 3)), ep_size * draw(st.integers(1, 3)), ep_size)
    shape = (experts.num_layers, experts.num_experts)
    numbers = st.integers(0, 6)
    tokens = draw(st.lists(numbers, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    ages = draw(st.lists(numbers, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    need = need_of(np.array(tokens).reshape(shape), np.array(ages).reshape(shape))
    return experts, need, draw(st.integers(1, 4))


def members(experts: ExpertLayout, rank: int) -> list[tuple[int, int]]:
    """Return the experts of a rank by layer and number."""
    return [
        (layer, number)
        for layer in range(experts.num_layers)
        for number in range(experts.num_experts)
        if experts.rank_of(number) == rank
    ]


@given(cases())
def test_rule_saves_the_most_tokens_times_age_that_each_rank_has_room_for(
    case: tuple[ExpertLayout, Need, int],
) -> None:
    experts, need, count = case
    found = pick(need, experts, count)
    value = need.tokens * need.age
    for rank in range(experts.ep_size):
        own = members(experts, rank)
        size = min(count, len(own))
        best = max(sum(value[each] for each in some) for some in itertools.combinations(own, size))
        mine = found & set(own)
        assert len(mine) == size
        assert sum(value[each] for each in mine) == best


@given(cases())
def test_algorithm_1_saves_the_most_tokens_that_the_quotas_of_layers_allow(
    case: tuple[ExpertLayout, Need, int],
) -> None:
    experts, need, count = case
    found = pick(need, experts, count, PAPER)
    for rank in range(experts.ep_size):
        own = members(experts, rank)
        mine = found & set(own)
        assert len(mine) == min(count, len(own))
        for layer in range(experts.num_layers):
            of_layer = [each for each in own if each[0] == layer]
            quota = sum(each[0] == layer for each in mine)
            best = sorted((need.tokens[each] for each in of_layer), reverse=True)[:quota]
            assert sorted(need.tokens[each] for each in mine if each[0] == layer) == best[::-1]


@given(st.lists(st.integers(0, 11), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 18))
def test_quotas_are_as_near_to_the_proportion_as_whole_experts_can_be(
    risk: list[int], most: int, total: int
) -> None:
    limits = [most] * len(risk)
    found = divide_quota(risk, total, limits)
    assert sum(found) == min(total, sum(limits))
    assert all(0 <= each <= most for each in found)
    exact = [each / sum(risk) * total for each in risk] if sum(risk) else []
    if exact and all(np.ceil(each) <= most for each in exact):  # no limit acts
        possible = itertools.product(range(most + 1), repeat=len(risk))
        best = min(
            sum(abs(a - b) for a, b in zip(each, exact, strict=True))
            for each in possible
            if sum(each) == total
        )
        assert sum(abs(a - b) for a, b in zip(found, exact, strict=True)) == pytest.approx(best)


def test_ties_go_to_the_older_then_to_the_lower_number() -> None:
    need = need_of(np.array([[2, 1, 2, 4]]), np.array([[2, 4, 2, 1]]))
    assert pick(need, layout(1, 4), 1) == {(0, 1)}
    assert pick(need, layout(1, 4), 2) == {(0, 1), (0, 0)}


@pytest.mark.parametrize("rule", [AGE, PAPER])
def test_experts_that_a_target_lacks_come_before_all_others(rule: str) -> None:
    need = need_of(np.array([[9, 0, 9, 0]]), np.array([[9, 1, 9, 1]]))
    missing = np.array([[False, True, False, False]])
    need = Need(tokens=need.tokens, age=need.age, is_missing=missing, is_new=need.is_new)
    assert pick(need, layout(1, 4), 1, rule) == {(0, 1)}
    assert pick(need, layout(1, 4), 2, rule) == {(0, 1), (0, 0)}


def test_expert_whose_version_the_target_has_is_not_chosen() -> None:
    need = need_of(np.array([[9, 8, 7, 0]]), np.array([[9, 8, 7, 1]]))
    is_new = np.array([[False, True, False, True]])
    need = Need(tokens=need.tokens, age=need.age, is_missing=need.is_missing, is_new=is_new)
    assert pick(need, layout(1, 4), 4) == {(0, 1), (0, 3)}


def test_experts_beyond_the_age_limit_get_a_quarter_of_the_room_the_oldest_first() -> None:
    tokens, age = np.zeros((2, 8), np.int64), np.ones((2, 8), np.int64)
    tokens[0] = 5
    age[1] = [30, 90, 10, 80, 70, 20, 60, 50]
    found = pick(need_of(tokens, age), layout(2, 8), 8, age_limit=40)
    assert {number for layer, number in found if layer == 1} == {1, 3}
    assert sum(layer == 0 for layer, _ in found) == 6


@pytest.mark.parametrize(("count", "num_old"), [(1, 1), (2, 2), (3, 3), (5, 5)])
def test_small_room_has_a_quarter_for_the_old_over_four_snapshots(count: int, num_old: int) -> None:
    tokens = np.array([[9] * 8 + [0] * 8])
    age = np.array([[1] * 8 + [99] * 8])
    need = need_of(tokens, age)
    found = [pick(need, layout(1, 16), count, age_limit=40, turn=turn) for turn in range(4)]
    assert sum(number >= 8 for each in found for _, number in each) == num_old
    assert all(len(each) == count for each in found)


def test_no_rank_holds_more_bytes_than_its_budget_however_experts_are_cut() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        num_ranks, num_experts = int(rng.integers(1, 4)), int(rng.integers(1, 7))
        costs = rng.integers(0, 9, (num_ranks, num_experts)) * rng.integers(
            0, 2, (num_ranks, num_experts)
        )
        always = rng.integers(0, 20, num_ranks)
        loads = RankLoads(always.tolist(), costs)
        budget = loads.least_budget + int(rng.integers(0, 12))
        shape = (1, num_experts)
        need = need_of(rng.integers(0, 9, shape), rng.integers(0, 9, shape))
        for rule, turn in itertools.product((AGE, PAPER), range(4)):
            selection = select(
                need,
                loads,
                loads.rooms(budget),
                layout(1, num_experts),
                rule,
                age_limit=4,
                turn=turn,
            )
            picked = list(selection[0])
            held = costs[:, picked].sum(axis=1)
            assert (held + always <= budget).all()
            has_some = costs.any(axis=1)
            assert picked or not has_some.any()
            most = [loads.most_on_rank(rank, budget) for rank in range(num_ranks)]
            counts = (costs[:, picked] > 0).sum(axis=1)
            assert all(counts <= most)


def test_gradients_in_place_of_state_outside_experts_leave_room_for_more_of_them() -> None:
    loads = loads_of(layout(2, 4))
    limit = ALWAYS + 3 * SIZE
    assert loads.rooms(limit).tolist() == [3 * SIZE]
    followed = loads.as_gradients().rooms(limit).tolist()
    assert followed == [3 * SIZE + ALWAYS - math.ceil(ALWAYS / 3)]


@pytest.mark.parametrize("num_experts", [1, 3, 6])
def test_experts_are_followed_if_that_leaves_the_fewest_tokens_at_risk_of_all_choices(
    num_experts: int,
) -> None:
    rng = np.random.default_rng(num_experts)
    experts, size = layout(1, num_experts), 12
    loads = RankLoads([0], np.full((1, num_experts), size))
    none = np.zeros(num_experts, np.bool_)
    for _ in range(100):
        rates = rng.permutation((10_000 * rng.random(num_experts) ** 3).astype(np.int64) + 1)
        room = int(rng.integers(size, size * num_experts + 9))

        def risk(followed: Sequence[int], rates: Counts = rates, room: int = room) -> float:
            rest = np.delete(rates, list(followed)).astype(float)
            left = room - len(followed) * size // 3
            if left < (size if len(rest) else 0):
                return math.inf
            if not len(rest):
                return 0.0
            rest, lost = np.sort(rest)[::-1], math.inf
            for num_always in range(len(rest)):  # these are sent in every iteration
                room_left = left - num_always * size
                others = rest[num_always:]
                if room_left > 0:
                    period = np.sqrt(size / others) * np.sqrt(others * size).sum() / room_left
                    if (period >= 1).all():
                        lost = min(lost, float((others * (period - 1)).sum()))
            return 0.0 if left >= size * len(rest) else lost

        found = by_rate(rates, none, loads, np.array([room]), experts).tolist()
        choices = itertools.chain.from_iterable(
            itertools.combinations(range(num_experts), count) for count in range(num_experts + 1)
        )
        assert risk(found) == pytest.approx(min(map(risk, choices)), abs=1e-6)


def test_all_experts_are_followed_from_a_third_of_their_bytes_on_and_each_rank_by_its_own_room() -> (
    None
):
    experts = layout(2, 4, 2)
    loads, none = loads_of(experts), np.zeros(8, np.bool_)
    gradients = loads.as_gradients().bytes_of(range(8))
    rates = np.arange(8)
    assert set(by_rate(rates, none, loads, gradients, experts)) == {*range(8)}
    rooms = np.array([gradients[0], SIZE])
    found = by_rate(rates, none, loads, rooms, experts).tolist()
    assert {each for each in found if experts.rank_of(each % 4) == 0} == {0, 1, 4, 5}
    assert len(found) == 4  # one place on the other rank is for all of its experts in turn


def test_expert_that_is_followed_stays_until_another_one_has_clearly_more_tokens() -> None:
    experts, rooms = layout(1, 4), np.array([SIZE + 4])
    loads = loads_of(experts)
    held = np.array([True, False, False, False])

    def followed(*rates: int) -> list[int]:
        return [*map(int, by_rate(np.array(rates), held, loads, rooms, experts))]

    assert followed(1000, 1200, 1, 1) == [0]
    assert followed(1000, 1500, 1, 1) == [1]
