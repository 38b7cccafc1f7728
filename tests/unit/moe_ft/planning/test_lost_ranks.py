"""Peers can play the roles of ranks whose state is somewhere else, and `plan` counts what that takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.lost_ranks import Degraded, Layout, _pieces_on_nodes
from moe_ft.planning.schedules import Pipelines, plan_schedule


def layout(stages: int, dp: int, *, tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> Layout:
    return Layout(num_stages=stages, tp=tp, cp=cp, dp=dp, ep=ep, expert_tp=etp)


@pytest.mark.parametrize(
    ("given_layout", "size", "groups"),
    [
        (layout(2, 3), 1, 3),
        (layout(2, 2, tp=2), 2, 2),
        (layout(2, 2, tp=2, cp=3), 6, 2),
        (layout(1, 4, ep=2), 2, 2),
        (layout(2, 8, tp=2, ep=4), 4, 4),
        (layout(2, 4, tp=4, ep=2), 4, 4),
        (layout(2, 4, tp=2, ep=4, etp=2), 8, 1),
    ],
)
def test_ranks_that_are_lost_together_are_those_of_an_all_to_all_and_of_a_tensor(
    given_layout: Layout, size: int, groups: int
) -> None:
    assert (given_layout.group_size, given_layout.num_groups) == (size, groups)


def test_roles_of_dead_ranks_are_those_of_their_groups() -> None:
    assert layout(2, 3).roles_of([0, 4]) == {(0, 0), (1, 1)}
    assert layout(2, 4, ep=2).roles_of([1, 6, 7]) == {(0, 0), (1, 1)}
    assert layout(2, 2, tp=2).roles_of([]) == frozenset()
    assert layout(2, 4, ep=2).ranks_of((1, 0)) == range(2, 4)
    assert layout(2, 4, ep=2).ranks_of((0, 1)) == range(4, 6)


@pytest.mark.parametrize(("num_micro_batches", "more"), [(1, 1), (4, 0)])
def test_peer_that_plays_a_role_holds_as_many_micro_batches_as_there_are_stages(
    num_micro_batches: int, more: int
) -> None:
    size = Pipelines(num_stages=2, num_pipelines=2, num_micro_batches=num_micro_batches)
    assert plan_schedule(size, frozenset({(1, 0)}), is_whole=True).more_held == more


@pytest.mark.parametrize(
    ("given_layout", "dead", "reason"),
    [
        (layout(2, 2), [2, 3], "stage 1 has no live group"),
        (layout(2, 4, ep=2), [0, 2], "stage 0 has no live group"),
        (layout(2, 1, tp=2), [0], "only one data-parallel rank"),
        (layout(2, 2, cp=2), [0], "jobs with context parallelism have"),
        (layout(2, 4, ep=4), [0], "every expert .* group of 4 expert-parallel ranks"),
    ],
)
def test_roles_that_nobody_can_play_are_refused_with_the_reason(
    given_layout: Layout, dead: list[int], reason: str
) -> None:
    with pytest.raises(PlanError, match=reason):
        given_layout.roles_of(dead)


def test_iterations_of_a_degraded_job_are_those_counted_before() -> None:
    job = layout(4, 3)
    found = Degraded(job, job.roles_of([7]), 18, 1)
    assert round(found.ratio(found.rerouted(is_split=False, more=4)), 2) == 1.22
    assert round(found.ratio(found.rerouted(is_split=True, more=4)), 2) <= 1.07
    assert found.dropped == 12 / 9
    assert found.shrunk(11) == 12 / 9
    assert found.idle == 3 / 9


def test_survivors_of_hit_pipelines_are_grouped_again() -> None:
    # Two pipelines have lost a stage each, in different ones: together they still make one.
    job = layout(2, 4)
    assert Degraded(job, frozenset({(0, 0), (1, 1)}), 24, 1).dropped == 9 / 7
    assert Degraded(job, frozenset({(0, 0), (1, 0)}), 24, 1).dropped == 13 / 7


@given(st.integers(1, 3), st.integers(3, 9), st.integers(1, 3), st.integers(1, 2))
def test_pipelines_that_no_peer_is_needed_of_change_nothing(
    stages: int, groups: int, micro_batches: int, num_dead: int
) -> None:
    job = layout(stages, groups)
    dead = frozenset((groups - 1 - each, stages - 1) for each in range(num_dead))
    whole = Pipelines(num_stages=stages, num_pipelines=groups, num_micro_batches=micro_batches)
    for is_split in (False, True):
        exact = plan_schedule(whole, dead, is_split=is_split, most_more_held=stages)
        found = Degraded(job, dead, groups * micro_batches, 1)
        assert found.rerouted(is_split=is_split, more=stages).duration == exact.duration


def test_pieces_of_experts_lie_on_the_nodes_of_their_ranks() -> None:
    assert _pieces_on_nodes(layout(2, 4, ep=2), 2, ((0,), (1,))) == [
        ((0, 1), (0, 1), (), ()),
        ((), (), (0, 1), (0, 1)),
    ]
    assert _pieces_on_nodes(layout(1, 2, ep=2), 1, ((0, 2), (1, 2))) == [((0, 2), (1, 2))]
    rows = ((0,), (1,), (2,), (3,))
    assert _pieces_on_nodes(layout(1, 4, ep=4), 3, rows) == [((0, 1, 2), (3,))]
