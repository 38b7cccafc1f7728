"""Plans with state of another layout: complete by the ranks that were, and never taken for that of a rank."""

from dataclasses import replace

from moe_ft.planning.branches import continue_history
from moe_ft.planning.recovery import Plan, Version, left_of, plan_recovery, plan_to_keep
from moe_ft.planning.tiers import MEMORY, PEER, STORAGE
from tests.unit.moe_ft.builders import make_history
from tests.unit.moe_ft.planning.test_recovery import FIRST, make_version

LATER = continue_history(FIRST, make_history([(1, 5)])[0])
NOW = ("a", "b")  # nodes of the two ranks of this start


def other(
    rank: int, iteration: int = 5, node: str | None = "a", *, is_breakpoint: bool = False
) -> Version:
    """Return a version of one of three ranks that were."""
    version = make_version(rank, iteration, node=node)
    return replace(version, layout="three", world_size=3, is_breakpoint=is_breakpoint)


def only(versions: list[Version]) -> Plan:
    (plan,), _ = plan_recovery(versions, NOW)
    return plan


def test_state_of_more_ranks_is_complete_with_all_of_them_and_read_by_every_rank() -> None:
    plan = only([other(0), other(1, node="b"), other(2, node=None)])
    assert plan.is_other_layout
    for rank in range(2):
        assert {source.version.rank for source in plan.sources_of(rank)} == {0, 1, 2}
    assert [source.tier for source in plan.sources_of(1)] == [MEMORY, PEER, STORAGE]
    plans, rejected = plan_recovery([other(0), other(1)], NOW)
    assert not plans
    assert [each.reason for each in rejected] == ["iteration 5: no state of rank 2 in any tier"]


def test_state_of_fewer_ranks_is_complete_without_those_of_now() -> None:
    alone = replace(other(0), world_size=1)
    assert only([alone]).sources_of(1)[0].version == alone


def test_ranks_of_the_same_numbers_that_were_are_nothing_that_a_run_has_left_to_those_of_now() -> (
    None
):
    own = [make_version(rank, 6, history=LATER, node=NOW[rank]) for rank in range(2)]
    old = [other(rank) for rank in range(3)]
    best, older = plan_recovery([*own, *old], NOW)[0]
    assert not best.is_other_layout
    for rank in range(2):
        assert [each.version for each in best.elsewhere[rank]] == [own[rank]]
        assert {each.version.layout for each in older.elsewhere[rank]} == {"three"}
    assert not left_of(LATER, old, NOW)[0]


def test_state_rests_on_storage_or_breakpoints_if_that_of_one_rank_that_was_does() -> None:
    plan = only([other(0), other(1), other(2, node=None)])
    assert plan.basis.is_on_storage
    assert not plan.basis.is_on_breakpoints
    copies = [other(0), other(1), other(2), other(2, node=None), other(2, is_breakpoint=True)]
    assert not only(copies).basis.is_on_storage
    assert not only(copies).basis.is_on_breakpoints
    left = [other(0), other(1), other(2, is_breakpoint=True)]
    assert only(left).basis.is_on_breakpoints


def test_snapshots_before_breakpoints_of_another_layout_are_kept() -> None:
    older = [other(rank, 3) for rank in range(3)]
    plans, _ = plan_recovery([*older, *(other(r, 5, is_breakpoint=True) for r in range(3))], NOW)
    kept = plan_to_keep(plans[0], plans)
    assert kept is not None
    assert (plans[0].iteration, kept.iteration) == (5, 3)
