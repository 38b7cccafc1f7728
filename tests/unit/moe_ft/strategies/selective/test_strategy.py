"""The selective strategy: its counters for each target, its budgets, and what no expert has to fear."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.lost_tokens import UnitVersion
from moe_ft.strategies.interface import MeasuredBytes, Resumed
from moe_ft.strategies.selective.strategy import SelectiveStrategy
from tests.unit.moe_ft.strategies.selective.budgets import (
    ALWAYS,
    SIZE,
    budget,
    experts_in,
    layout,
    strategy_of,
    take,
    train,
)

FOREVER = 10**6
Expert = tuple[int, int]


def run_of(count: int, remote: int, **more: int) -> dict[str, Any]:
    return {"local_budget": budget(count), "remote_budget": budget(remote), **more}


class Target:
    """Second count of what one target has, by dictionaries."""

    def __init__(self, experts: list[Expert]) -> None:
        self.versions: dict[Expert, tuple[int, int]] = {}  # iteration and tokens
        self.experts = experts

    def best(self, offered: dict[Expert, tuple[int, int]], count: int) -> set[Expert]:
        """Return the experts that gain the most by the offered versions."""

        def rank(expert: Expert) -> tuple[int, ...]:
            at, tokens = self.versions.get(expert, (-1, 0))
            age, more = offered[expert][0] - at, offered[expert][1] - tokens
            is_missing = expert not in self.versions
            return (not is_missing, 0 if is_missing else -age * more, -age, *expert)

        new = [
            each
            for each in self.experts
            if each in offered and self.versions.get(each, (-1, 0))[0] < offered[each][0]
        ]
        return set(sorted(new, key=rank)[:count])


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_each_target_gets_what_it_has_lacked_the_most_tokens_of_for_the_longest_time(
    seed: int, local: int, remote: int, fails: bool
) -> None:
    rng, experts = np.random.default_rng(seed), layout(2, 4)
    rank = strategy_of(experts, **run_of(local, remote, age_limit=FOREVER))
    everyone = list(itertools.product(range(2), range(4)))
    memory, peers = Target(everyone), Target(everyone)
    tokens = dict.fromkeys(everyone, 0)
    is_known = False  # whether peers have ever had whatever memory had
    for iteration in range(1, 20):
        counts = rng.integers(0, 9, (2, 4))
        train([rank], counts)
        for each in everyone:
            tokens[each] += int(counts[each])
        is_sent = not (fails and rng.random() < 0.3)
        (plan,) = take([rank], iteration, is_sent=is_sent)
        now = {each: (iteration, tokens[each]) for each in everyone}
        wanted = memory.best(now, local)
        assert experts_in([*plan.rotating]) == wanted
        memory.versions |= {each: now[each] for each in wanted}
        if not is_known:
            assert plan.remote is None
            chosen = set(everyone)
        else:
            assert plan.remote is not None
            chosen = peers.best(memory.versions, remote)
            assert experts_in(plan.remote) == chosen
        if is_sent:
            is_known = True
            peers.versions |= {
                each: memory.versions[each] for each in chosen if each in memory.versions
            }


@pytest.mark.parametrize(("age_limit", "is_saved"), [(8, True), (FOREVER, False)])
def test_expert_without_tokens_is_saved_again_if_ages_have_a_limit(
    age_limit: int, is_saved: bool
) -> None:
    rank = strategy_of(layout(1, 4), **run_of(1, 1, age_limit=age_limit))
    again = set()
    for iteration in range(1, 60):
        train([rank], np.array([[50, 40, 30, 0]]))
        (plan,) = take([rank], iteration)
        if iteration > 4:  # by then each has been saved once
            again |= experts_in([*plan.rotating])
    assert ((0, 3) in again) is is_saved


def test_first_snapshot_is_full_where_the_budget_is_measured_and_peers_get_all_of_it() -> None:
    rank = strategy_of(layout(2, 4))
    train([rank], np.ones((2, 4), np.int64))
    first, second = (take([rank], iteration)[0] for iteration in (1, 2))
    assert set(first.rotating) == rank.rotation.units
    assert first.remote is None
    assert len(second.rotating) == 1  # nothing is measured yet
    assert rank.most_rotating == len(rank.rotation.units)
    assert rank.most_retained == len(rank.rotation.units)


def test_given_budget_limits_every_snapshot_and_the_memory_for_it() -> None:
    rank = strategy_of(layout(2, 4), **run_of(3, 1))
    assert rank.most_rotating == 3
    held = set()
    for iteration in range(1, 4):
        (plan,) = take([rank], iteration)
        assert len(plan.rotating) <= 3
        held |= set(plan.rotating)
    assert held == rank.rotation.units  # what was never saved comes first


def test_without_peers_nothing_is_chosen_for_them_and_nothing_is_retained() -> None:
    rank = strategy_of(layout(1, 4), local_budget=budget(2), has_peers=False)
    plans = [take([rank], iteration)[0] for iteration in range(1, 5)]
    assert {plan.remote for plan in plans} == {None}
    assert rank.most_retained == 0


def test_after_a_recovery_peers_get_whatever_they_lack() -> None:
    rank = strategy_of(layout(1, 4), **run_of(2, 1))
    train([rank], np.array([[5, 6, 7, 8]]))
    take([rank], 1)
    assert take([rank], 2)[0].remote is not None
    restored = {
        str(unit): UnitVersion(iteration=1, routed_tokens=unit.expert)
        for unit in rank.rotation.units
    }
    rank.resume(Resumed(iteration=2, restored=restored))
    assert take([rank], 3)[0].remote is None


def test_tokens_at_risk_are_those_that_each_target_lacks() -> None:
    rank = strategy_of(layout(1, 4), **run_of(4, 1))
    assert rank.at_risk() == {}
    train([rank], np.array([[5, 6, 7, 8]]))
    take([rank], 1)
    assert rank.at_risk() == {"memory": 0, "peers": 0}
    train([rank], np.array([[1, 0, 9, 0]]))
    assert rank.at_risk() == {"memory": 10, "peers": 10}
    take([rank], 2)  # all to memory, one expert to peers
    assert rank.at_risk() == {"memory": 0, "peers": 1}
    plan = rank.plan_persist()
    train([rank], np.array([[0, 3, 0, 0]]))
    rank.note_persisted(plan)
    assert rank.at_risk() == {"memory": 3, "peers": 4, "storage": 3}


@pytest.mark.parametrize("takes_whole", [False, True])
def test_last_state_is_whole_after_as_many_snapshots_as_memory_makes_necessary(
    takes_whole: bool,
) -> None:
    rank = strategy_of(layout(2, 4), **run_of(3, 1), takes_whole=takes_whole)
    take([rank], 1)
    held, count = set(), 0
    while not rank.is_whole(5):
        held |= set(take([rank], 5, is_whole=True)[0].rotating)
        count += 1
    assert held == set(rank.rotation.units)
    assert count == (1 if takes_whole else 3)
    assert not rank.is_whole(6)


def test_last_state_takes_as_many_snapshots_as_the_stage_that_needs_most() -> None:
    rank = strategy_of(layout(2, 4), **run_of(3, 1))
    assert rank.values() == [-3] and rank.agree([-5]) == {}
    held = []
    while not rank.is_whole(5):
        held.append(len(take([rank], 5, is_whole=True)[0].rotating))
    assert held == [3, 3, 2, 0, 0]


def test_storage_gets_versions_that_are_newer_than_its_own_within_the_budget_of_memory() -> None:
    rank = strategy_of(layout(1, 4), **run_of(2, 1))
    written = []
    for iteration in range(1, 4):
        train([rank], np.array([[1, 1, 1, 1]]))
        take([rank], iteration)
        plan = rank.plan_persist()
        rank.note_persisted(plan)
        written.append(experts_in(plan.units))
    assert written[:2] == [{(0, 0), (0, 1)}, {(0, 2), (0, 3)}]
    assert len(written[2]) == 2
    assert rank.plan_persist().units == frozenset()


def test_budget_is_the_least_of_what_can_be_copied_committed_and_sent() -> None:
    rank = strategy_of(layout(1, 4))
    assert rank.values() == [0, 0, -1]
    rank.note_measured(MeasuredBytes(copied_bytes=500.0, committed_bytes=300.0, sent_bytes=200.0))
    assert rank.values() == [300, 200, -1]
    assert rank.agree([ALWAYS + 3 * SIZE, ALWAYS + 2 * SIZE, -1]) == {
        "local_budget_bytes": ALWAYS + 3 * SIZE,
        "remote_budget_bytes": ALWAYS + 2 * SIZE,
    }
    take([rank], 1)
    train([rank], np.ones((1, 4), np.int64))
    (plan,) = take([rank], 2)
    assert len(plan.rotating) == 3
    assert plan.remote is not None
    assert len(plan.remote) == 2


def test_budget_changes_after_some_snapshots_and_only_if_it_is_notably_different() -> None:
    rank = strategy_of(layout(1, 4), remote_budget=budget(1))
    assert rank.agree([0, -1]) == {}  # some rank has not measured it
    assert rank.agree([1000, -1]) == {"local_budget_bytes": 1000}
    assert rank.agree([2000, -1]) == {}
    for iteration in range(1, 11):
        take([rank], iteration)
    assert rank.agree([1040, -1]) == {}
    assert rank.agree([2000, -1]) == {"local_budget_bytes": 2000}


def test_ranks_of_a_stage_hold_together_what_one_rank_with_all_budgets_would() -> None:
    experts = layout(2, 4, 2)
    ranks = [strategy_of(experts, place, **run_of(2, 1)) for place in (0, 1)]
    for iteration in range(1, 9):
        train(ranks, np.random.default_rng(iteration).integers(0, 9, (2, 4)))
        plans = take(ranks, iteration)
        assert [len(plan.rotating) for plan in plans] == [2, 2]
        memos = [each.plan_window(iteration).memo for each in ranks]
        assert memos[0].selection == memos[1].selection
        assert memos[0].remote == memos[1].remote


def following() -> SelectiveStrategy:
    """Return a rank whose peers have room for the gradient of one expert, and the state of one."""
    remote = math.ceil(ALWAYS / 3) + math.ceil(SIZE / 3) + SIZE
    options: dict[str, Any] = {"local_budget": budget(4), "remote_budget": f"{remote}"}
    return strategy_of(layout(1, 4), are_followed=True, **options)


def test_peers_follow_the_expert_with_the_most_tokens_and_lack_none_of_them() -> None:
    rank, popular = following(), {(0, 2)}
    for iteration in range(1, 20):
        train([rank], np.array([[1, 1, 1000, 1]]))
        followed = experts_in(rank.followed)
        (plan,) = take([rank], iteration)
        if iteration < 5:
            continue
        assert followed == popular
        assert plan.remote is not None
        assert popular < experts_in(plan.remote) <= experts_in([*plan.rotating])
        assert len(plan.remote) == 2
        assert rank.at_risk()["peers"] < 10
    assert rank.followable == rank.rotation.units


def test_snapshot_after_one_that_peers_lack_follows_no_expert_until_it_was_sent_again() -> None:
    rank, popular = following(), {(0, 2)}

    def step(iteration: int, *, is_sent: bool = True) -> tuple[set[Expert], int]:
        train([rank], np.array([[1, 1, 1000, 1]]))
        followed = experts_in(rank.followed)
        (plan,) = take([rank], iteration, is_sent=is_sent)
        return followed, len(plan.remote or ())

    for iteration in range(1, 10):
        step(iteration)
    assert step(10, is_sent=False) == (popular, 2)
    _, num_sent = step(11)  # the step was kept, but leads from nowhere
    assert num_sent == 1
    assert step(12) == (popular, 2)
    assert step(14)[1] == 1  # there was no snapshot of 13


def test_no_expert_is_followed_once_a_peer_of_any_rank_computes_other_bits() -> None:
    rank = following()
    for iteration in range(1, 10):
        train([rank], np.array([[1, 1, 1000, 1]]))
        take([rank], iteration)
    assert rank.values() == [1, -1]
    rank.note_measured(MeasuredBytes(can_follow=False))
    assert rank.values() == [0, -1]
    assert rank.agree(rank.values()) == {"followed": 0}
    assert rank.agree(rank.values()) == {}
    train([rank], np.array([[1, 1, 1000, 1]]))
    take([rank], 10)
    assert rank.followed == frozenset()


def test_algorithm_1_follows_no_experts() -> None:
    options: dict[str, Any] = {"local_budget": budget(4), "remote_budget": budget(4)}
    rank = strategy_of(layout(1, 4), are_followed=True, selective_rule="paper", **options)
    for iteration in range(1, 6):
        train([rank], np.array([[1, 1, 1000, 1]]))
        take([rank], iteration)
        assert (rank.followed, rank.followable) == (frozenset(), ())
