"""Cost of replays, by hand and against a schedule that is run slot by slot."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.remains import Pipelines, Remains
from moe_ft.planning.replay_cost import ReplayCost, Schedule, cost_of, speedup_of_one_failure
from moe_ft.planning.scope import plan_scope
from tests.unit.moe_ft.planning.failures import make_failure, make_pipelines, make_version

NEWEST, BEGIN = 6, 3


def cost(remains: Remains, pipelines: Pipelines, num_microbatches: int = 4) -> ReplayCost:
    decision = plan_scope(remains, pipelines)
    assert decision.plan is not None, decision.reason
    schedule = Schedule(num_stages=pipelines.num_stages, num_microbatches=num_microbatches)
    return cost_of(decision.plan, pipelines, schedule)


def failure(pipelines: Pipelines, dead: set[int]) -> Remains:
    return make_failure(pipelines, {rank: NEWEST for rank in range(4) if rank not in dead})


@given(st.integers(1, 16), st.integers(1, 32))
def test_slots_are_those_of_micro_batches_that_pass_through_the_stages_one_after_the_other(
    num_stages: int, num_microbatches: int
) -> None:
    done = [0] * num_stages  # of each stage, the slot after which it is free
    for _ in range(num_microbatches):
        arrived = 0
        for stage in range(num_stages):
            arrived = done[stage] = max(arrived, done[stage]) + 1
    schedule = Schedule(num_stages=num_stages, num_microbatches=num_microbatches)
    assert schedule.slots(num_stages) == done[-1]
    assert Fraction(schedule.bubble_share) == Fraction((done[-1] - num_microbatches) / done[-1])


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "share"), [(3, 6, 0.25), (4, 8, 3 / 11), (1, 4, 0.0)]
)
def test_bubble_share_is_that_of_the_papers_formula(
    num_stages: int, num_microbatches: int, share: float
) -> None:
    schedule = Schedule(num_stages=num_stages, num_microbatches=num_microbatches)
    assert schedule.bubble_share == share


@given(st.integers(1, 16), st.integers(1, 32), st.integers(1, 4))
def test_one_stage_alone_saves_the_bubble(
    num_stages: int, num_microbatches: int, chunks: int
) -> None:
    schedule = Schedule(num_stages=num_stages, num_microbatches=num_microbatches, num_chunks=chunks)
    assert schedule.speedup() == pytest.approx(1 / (1 - schedule.bubble_share))
    assert schedule.speedup(num_stages) == 1


def test_chunks_shorten_the_bubble() -> None:
    schedule = Schedule(num_stages=4, num_microbatches=4, num_chunks=2)
    assert schedule.bubble_share == 3 / 11


def test_stage_alone_costs_its_micro_batches_and_a_global_replay_the_bubble_too() -> None:
    pipelines = make_pipelines(4)
    found = cost(failure(pipelines, {1}), pipelines)
    assert found == ReplayCost(replays=(0, 3, 0, 0), slots=3 * 4, global_slots=3 * 7)
    assert found.speedup == 7 / 4


def test_scopes_run_at_the_same_time_and_a_segment_of_two_has_a_bubble_of_one() -> None:
    pipelines = make_pipelines(4)
    assert cost(failure(pipelines, {0, 2}), pipelines).slots == 3 * 4
    assert cost(failure(pipelines, {1, 2}), pipelines).slots == 3 * 5


def test_stage_that_joins_late_lengthens_only_the_iterations_that_it_runs() -> None:
    pipelines = make_pipelines(4)
    remains = make_failure(pipelines, {0: NEWEST, 2: 5, 3: NEWEST})
    assert cost(remains, pipelines).slots == 2 * 4 + 5


def test_nothing_that_is_run_again_costs_nothing() -> None:
    pipelines = make_pipelines(4)
    found = cost(failure(pipelines, set()), pipelines)
    assert (found.replays, found.slots, found.global_slots) == ((0, 0, 0, 0), 0, 0)
    assert found.speedup == math.inf


def test_longest_scope_counts() -> None:
    pipelines = make_pipelines(4)
    remains = failure(pipelines, {0, 2})
    versions = [*remains.versions, make_version(2, 5)]
    found = cost(replace(remains, versions=versions), pipelines)
    assert (found.replays, found.slots) == ((3, 0, 1, 0), 3 * 4)


@pytest.mark.parametrize(
    ("couplings", "is_ring", "speedup"),
    [
        ([], False, 7 / 4),
        ([(0, 3)], False, 7 / 4),  # two segments of one stage
        ([(0, 3)], True, 7 * 4 / (4 + 4 + 5 + 5)),  # one segment of two stages
        ([(0, 1, 2, 3)], False, 1.0),
    ],
)
def test_speedup_of_a_failure_anywhere_follows_from_what_runs_again_with_it(
    couplings: list[tuple[int, ...]], is_ring: bool, speedup: float
) -> None:
    pipelines = make_pipelines(4, is_ring=is_ring, couplings=couplings)
    schedule = Schedule(num_stages=4, num_microbatches=4)
    assert speedup_of_one_failure(pipelines, schedule) == pytest.approx(speedup)
