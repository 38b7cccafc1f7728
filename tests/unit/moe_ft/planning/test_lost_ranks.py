"""Places of ranks in schedules, and what `plan` counts of an iteration after a loss."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.planning.lost_ranks import Degraded, Layout, expert_part, lost_node_lines
from moe_ft.planning.schedules import Role, Way, plan_schedule
from tests.unit.moe_ft.planning.described import SMALL, planned_job, row


def layout(stages: int, dp: int, *, tp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> Layout:
    return Layout(num_stages=stages, tp=tp, cp=cp, dp=dp, ep=ep, expert_tp=etp)


@pytest.mark.parametrize(
    ("given_layout", "ranks", "lanes", "groups"),
    [
        (layout(2, 3), 1, 1, 3),
        (layout(2, 2, tp=2), 2, 1, 2),
        (layout(2, 2, tp=2, cp=3), 6, 1, 2),
        (layout(1, 4, ep=2), 2, 2, 2),
        (layout(2, 8, tp=2, ep=4), 4, 2, 4),
        (layout(2, 4, tp=4, ep=2), 4, 1, 4),
        (layout(2, 4, tp=2, ep=4, etp=2), 8, 4, 1),
    ],
)
def test_ranks_that_wait_for_each_other_are_those_of_a_lane_and_of_an_all_to_all(
    given_layout: Layout, ranks: int, lanes: int, groups: int
) -> None:
    assert (given_layout.group_size, given_layout.num_groups) == (ranks, groups)
    assert given_layout.pipelines(3).group_size == lanes
    assert given_layout.pipelines(3).num_pipelines == groups * lanes


def test_roles_are_those_of_lanes() -> None:
    assert layout(2, 4, ep=2).role_of(6) == (2, 1)
    assert layout(2, 4, ep=2).ranks_of((2, 1)) == range(6, 7)
    job = layout(2, 2, tp=2, cp=2)
    assert [job.role_of(rank) for rank in job.ranks_of((1, 1))] == [(1, 1)] * 4
    assert job.ranks_of((1, 1)) == range(12, 16)


def test_hosts_are_lanes_of_the_ranks_whose_devices_are_shared() -> None:
    assert layout(2, 3).hosts_of({4: 0, 5: 1}) == {(1, 1): (0, 0), (2, 1): (1, 0)}
    # Half of a lane has lost its devices: the other half is its host.
    assert layout(1, 2, tp=4).hosts_of({2: 0, 3: 1}) == {(0, 0): (0, 0)}
    assert layout(2, 3).hosts_of({}) == {}


def test_part_of_experts_is_that_of_their_multiplications() -> None:
    # 4 x 8 + 16 in attention; two experts of two matrices of 12.
    part = partial(expert_part, hidden=8, seq_length=16, expert_hidden=12, topk=2)
    assert part() == 48 / (48 + 48)
    assert part(is_gated=True) == 72 / (48 + 72)
    assert part(shared_hidden=24) == 48 / (48 + 48 + 48)
    assert part(moe_share=0.5, ffn_hidden=48) == 24 / (48 + 24 + 48)


def test_iterations_of_a_degraded_job_are_those_counted_by_hand() -> None:
    alone = Degraded(layout(1, 3), {(1, 0): (2, 0)}, (18, 1))
    assert alone.ratio(alone.crowded) == 2
    assert alone.ratio(alone.shared()) == 9 / 6
    found = Degraded(layout(4, 3), {(1, 2): (2, 2)}, (18, 1))
    assert found.crowded.shares.way is Way.CROWD
    assert found.ratio(found.shared()) < found.ratio(found.crowded)
    assert found.dropped == 12 / 9
    assert found.shrunk(11) == 12 / 9
    assert found.shrunk(3) == math.inf


def test_hit_pipelines_are_dropped_and_their_survivors_make_one_after_a_restart() -> None:
    job = layout(2, 4)
    hosts = {(0, 0): (2, 0), (1, 1): (3, 1)}
    found = Degraded(job, hosts, (24, 1))
    assert (found.dropped, found.shrunk(6)) == (13 / 7, 9 / 7)
    every = {(lane, 0): (lane, 1) for lane in range(4)}
    assert Degraded(job, every, (24, 1)).dropped == math.inf


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(3, 9), st.integers(1, 3), st.sampled_from([1, 2]))
def test_pipelines_that_no_peer_is_needed_of_change_less_than_a_micro_batch(
    stages: int, groups: int, micro_batches: int, ep: int
) -> None:
    job = layout(stages, groups * ep, ep=ep)
    hosts: dict[Role, Role] = {(groups * ep - 1, stages - 1): (groups * ep - ep - 1, 0)}
    for is_split in (False, True):
        exact = plan_schedule(
            job.pipelines(micro_batches), hosts, is_split=is_split, most_more_held=stages
        )
        found = Degraded(job, hosts, (groups * ep * micro_batches, 1))
        assert abs(found.shared(is_split=is_split).duration - exact.duration) < 3


def lines_of(*flags: str) -> str:
    words = (*SMALL, "--micro-batch-size", "1", "--global-batch-size", "64", *flags)
    return "\n".join(lost_node_lines(planned_job(*words, world_size=16, ranks_per_node=2)))


def test_plan_has_the_answers_to_a_lost_node() -> None:
    text = lines_of()
    crowd = row(text, "crowd: a node that trains runs its ranks")
    share = row(text, "share: peers run their micro-batches")
    assert (crowd[1], share[1]) == ("1.89", "1.33")
    assert row(text, "its pipelines are dropped")[1] == "1.33"
    assert "share: peers run all micro-batches of its ranks\n" in text
    assert "on the next node of the same stage, the worse place" in text


def test_plan_says_why_guests_compute_their_experts() -> None:
    text = lines_of("--expert-model-parallel-size", "8")
    assert "its processes compute their experts" in text
    assert "as experts of a stage live on one rank only" in text


def test_plan_of_a_job_without_peers_or_nodes_has_no_answers() -> None:
    words = (*SMALL, "--micro-batch-size", "1", "--global-batch-size", "64")
    assert not lost_node_lines(planned_job(*words, world_size=16, ranks_per_node=16))
    assert not lost_node_lines(planned_job(*SMALL, world_size=16, ranks_per_node=2))
