"""Breakpoints in plans of a recovery: when they come first, and what stays in memory after them."""

from dataclasses import replace

import pytest

from moe_ft.planning.recovery import Version, plan_recovery, plan_to_keep
from tests.unit.moe_ft.builders import make_history

NODES = ("a", "b")
FIRST = make_history([(0, 0)])
LATER = make_history([(0, 0), (1, 8)])


def snapshot(rank: int, iteration: int, window: int = 1) -> Version:
    return Version(
        rank=rank,
        iteration=iteration,
        lineage="run-a",
        history=FIRST,
        node=NODES[rank],
        path=f"rank_{rank}/region_{iteration}.json",
        window=window,
    )


def left(rank: int, iteration: int) -> Version:
    """Return the breakpoint of a rank."""
    path = f"rank_{rank}/breakpoint.json"
    return replace(snapshot(rank, iteration), path=path, is_breakpoint=True)


def paths(versions: list[Version], rank: int) -> list[str]:
    """Return where a rank reads the best plan of an inventory, best first."""
    best = plan_recovery(versions, NODES)[0][0]
    return [source.version.path.partition("/")[2] for source in best.sources_of(rank)]


WINDOWS = [snapshot(rank, 6, window=3) for rank in range(2)]


def test_breakpoints_of_all_ranks_are_a_state_that_replays_nothing() -> None:
    plans, _ = plan_recovery([*WINDOWS, left(0, 8), left(1, 8)], NODES)
    assert [(plan.iteration, plan.num_replays) for plan in plans] == [(8, 0), (6, 2)]
    assert [plan.basis.is_on_breakpoints for plan in plans] == [True, False]


def test_breakpoints_of_two_iterations_make_no_state() -> None:
    plans, rejected = plan_recovery([*WINDOWS, left(0, 8), left(1, 9)], NODES)
    assert [plan.iteration for plan in plans] == [6]
    assert [each.iteration for each in rejected] == [9, 8]


def test_dead_ranks_snapshot_and_the_survivors_breakpoint_make_a_state() -> None:
    found = [snapshot(0, 7), snapshot(1, 7), left(0, 8), snapshot(1, 8)]
    plan = plan_recovery(found, NODES)[0][0]
    assert plan.iteration == 8 and plan.basis.is_on_breakpoints


def test_snapshots_come_first_where_all_ranks_have_one() -> None:
    found = [each for rank in range(2) for each in (left(rank, 8), snapshot(rank, 8))]
    assert paths(found, 0) == ["region_8.json", "breakpoint.json"]
    assert not plan_recovery(found, NODES)[0][0].basis.is_on_breakpoints


def test_snapshots_come_first_where_a_rank_has_no_breakpoint() -> None:
    # Snapshots may divide what the ranks share in another way than breakpoints do.
    found = [left(0, 8), snapshot(0, 8), snapshot(1, 8)]
    assert paths(found, 0) == ["region_8.json", "breakpoint.json"]


def test_breakpoints_come_first_where_a_rank_has_nothing_else() -> None:
    found = [left(0, 8), snapshot(0, 8), left(1, 8)]
    assert paths(found, 0) == ["breakpoint.json", "region_8.json"]


@pytest.mark.parametrize(
    ("older", "kept"),
    [(WINDOWS, 6), ([snapshot(0, 6), left(1, 6)], None), ([], None)],
)
def test_newest_snapshots_before_breakpoints_are_kept(
    older: list[Version], kept: int | None
) -> None:
    plans, _ = plan_recovery([*older, left(0, 8), left(1, 8)], NODES)
    found = plan_to_keep(plans[0], plans)
    assert (None if found is None else found.iteration) == kept


def test_state_of_snapshots_is_itself_kept() -> None:
    plans, _ = plan_recovery([*WINDOWS, left(0, 8)], NODES)
    assert plan_to_keep(plans[0], plans) is plans[0]


def test_state_of_another_branch_is_not_kept() -> None:
    other = [replace(each, lineage="run-b", history=make_history([(3, 0)])) for each in WINDOWS]
    plans, _ = plan_recovery([*other, left(0, 8), left(1, 8)], NODES)
    assert plan_to_keep(plans[0], plans) is None


def test_what_a_later_start_has_passed_is_no_source_any_more() -> None:
    newer = [replace(snapshot(rank, 9), history=LATER) for rank in range(2)]
    plans, _ = plan_recovery([*newer, *(left(rank, 8) for rank in range(2))], NODES)
    assert [plan.iteration for plan in plans] == [9, 8]
