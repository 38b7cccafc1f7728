"""Shares of plans: each rank finds in its own what the whole plan has for it, and nothing else travels."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.recovery import Plan, Source, Version, plan_recovery, plan_to_keep
from moe_ft.planning.shares import Common, Packer, Share, Unpacker, share_out, take_share
from tests.unit.moe_ft.planning.test_local_recovery import PIPELINES, failure, found_logs, plan_of
from tests.unit.moe_ft.planning.test_other_layouts import NOW, other
from tests.unit.moe_ft.planning.test_recovery import FIRST, inventories, make_version

COMMON, SHARE = msgspec.msgpack.Decoder(Common), msgspec.msgpack.Decoder(Share)


def check_shares(
    plan: Plan,
    kept: Plan | None,
    node_of: Sequence[str],
    stage_of: Sequence[int],
    *,
    needs_elsewhere: bool = True,
) -> list[Plan]:
    """Check that every rank gets what is for it; return the plans that the ranks get."""
    common, shares = share_out(plan, kept, len(node_of), needs_elsewhere=needs_elsewhere)
    common = COMMON.decode(msgspec.msgpack.encode(common))
    taken = []
    for rank, node in enumerate(node_of):
        own, own_kept = take_share(
            common, SHARE.decode(shares[rank]), rank=rank, stage=stage_of[rank], node=node
        )
        assert own.sources_of(rank) == plan.sources_of(rank)
        assert own.elsewhere.get(rank, ()) == (plan.elsewhere[rank] if needs_elsewhere else ())
        assert own.basis == plan.basis and own.version == plan.version
        bare = replace(plan, stages={}, elsewhere={}, noted=plan.basis)
        assert replace(own, stages={}, elsewhere={}) == bare
        assert [(each.target, each.replay_from) for each in own.stages.values()] == [
            (each.target, each.replay_from) for each in plan.stages.values()
        ]
        assert (own_kept is None) == (kept is None)
        if kept is not None and own_kept is not None:
            assert own_kept.sources_of(rank) == kept.sources_of(rank)
            assert (own_kept.basis, own_kept.replay_from) == (kept.basis, kept.replay_from)
        taken.append(own)
    return taken


@given(inventories(), st.booleans(), st.data())
def test_rank_gets_the_sources_of_any_plan_and_of_the_one_that_is_kept(
    found: tuple[list[Version], tuple[str, ...]], needs_elsewhere: bool, data: st.DataObject
) -> None:
    versions, node_of = found
    marks = data.draw(st.lists(st.booleans(), min_size=len(versions), max_size=len(versions)))
    versions = [
        replace(each, is_breakpoint=mark) for each, mark in zip(versions, marks, strict=True)
    ]
    stage_of = [data.draw(st.integers(0, 1)) for _ in node_of]
    plans, _ = plan_recovery(versions, node_of, stage_of)
    for plan in plans:
        kept = plan_to_keep(plan, plans)
        check_shares(plan, kept, node_of, stage_of, needs_elsewhere=needs_elsewhere)


@pytest.mark.parametrize("is_kept_moved", [False, True])
def test_state_of_another_layout_comes_to_every_rank_nearest_first(is_kept_moved: bool) -> None:
    older = [other(rank, 3) for rank in range(3)]
    if not is_kept_moved:
        older = [make_version(rank, 3, history=FIRST, node=NOW[rank]) for rank in range(2)]
    best = [other(rank, 5, NOW[rank % 2], is_breakpoint=True) for rank in range(3)]
    plans, _ = plan_recovery([*older, *best], NOW)
    kept = plan_to_keep(plans[0], plans)
    assert kept is not None and kept.is_other_layout == is_kept_moved
    own, _ = check_shares(plans[0], kept, NOW, [0, 0])
    assert own.is_other_layout
    assert len(own.sources_of(0)) == 3


@pytest.mark.parametrize("needs_elsewhere", [False, True])
def test_rank_that_recovers_alone_gets_its_logs_and_the_records_that_answer(
    needs_elsewhere: bool,
) -> None:
    remains = failure({1})
    plan, _, plans = plan_of(remains.versions, found_logs(remains))
    assert plan is not None
    common, shares = share_out(plan, plan_to_keep(plan, plans), 3, needs_elsewhere=needs_elsewhere)
    common = COMMON.decode(msgspec.msgpack.encode(common))
    for rank, node in enumerate(PIPELINES.node_of):
        own, _ = take_share(common, SHARE.decode(shares[rank]), rank=rank, stage=rank, node=node)
        assert own.is_local
        for scope, whole in zip(own.scopes, plan.scopes, strict=True):
            mine = tuple(each for each in whole.logs if each.receiver == rank)
            assert scope.logs == mine
            assert bool(mine) == (rank == 1)
            assert scope.records == whole.records
            records = [each for found in whole.records.values() for each in found]
            unread = [each for each in records if each.numbers is None]
            assert unread, "a state has the record, and its numbers are not known yet"
            for record in unread:
                assert places(own.elsewhere.get(record.rank, ())) >= {(record.node, record.path)}


def places(sources: Sequence[Source]) -> set[tuple[str | None, str]]:
    return {(each.version.node, each.version.path) for each in sources}


@given(inventories())
def test_versions_of_several_tables_come_out_as_they_went_in_and_share_their_writers(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, _ = found
    unpacker = Unpacker()
    tables = [Packer().table(versions[::2]), Packer().table(versions[1::2])]
    taken = [each for table in tables for each in unpacker.versions(table)]
    assert taken == [*versions[::2], *versions[1::2]]
    assert len({id(each.history) for each in taken}) == len({each.start for each in taken})
