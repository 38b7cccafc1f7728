"""Recovery plans: the newest state that all ranks have of the latest start, best tier first."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.format.identity import History, Start
from moe_ft.planning.comparison import newer_than
from moe_ft.planning.recovery import (
    Plan,
    Rejection,
    Source,
    Version,
    plan_recovery,
)
from moe_ft.planning.tiers import MEMORY, PEER, STORAGE
from tests.unit.moe_ft.builders import make_history

NODES = ("a", "b")
FIRST = make_history([(0, 0)])
LATER = make_history([(0, 0), (1, 4)])


def make_version(
    rank: int,
    iteration: int,
    *,
    history: History = FIRST,
    node: str | None = None,
    lineage: str = "run-a",
    is_replica: bool = False,
    window: int = 1,
    superseded: tuple[str, ...] = (),
) -> Version:
    where = f"{'replica_' if is_replica else ''}{rank}_{iteration}_{history[-1].name}_{window}.json"
    return Version(
        rank=rank,
        iteration=iteration,
        lineage=lineage,
        history=history,
        node=node,
        path=where,
        tier=STORAGE if node is None else MEMORY,
        is_replica=is_replica,
        window=window,
        superseded=superseded,
    )


def everywhere(
    iteration: int,
    history: History = FIRST,
    window: int = 1,
    *,
    lineage: str = "run-a",
    superseded: tuple[str, ...] = (),
) -> list[Version]:
    """Return one version of each of two ranks, each in the memory of its node."""
    return [
        make_version(
            rank,
            iteration,
            history=history,
            node=NODES[rank],
            window=window,
            lineage=lineage,
            superseded=superseded,
        )
        for rank in range(len(NODES))
    ]


def iterations(plans: Iterable[Plan]) -> list[int]:
    return [plan.iteration for plan in plans]


def reasons(rejected: Iterable[Rejection]) -> list[str]:
    return [each.reason for each in rejected]


@st.composite
def histories(draw: st.DrawFn, lineage: str) -> list[History]:
    """Every start's history of a run that was started several times, each from what it had."""
    starts = [(0, 0)]
    found = [make_history(starts, lineage)]
    newest = draw(st.integers(0, 8))
    for number in range(1, draw(st.integers(1, 4))):
        resumed_at = draw(st.integers(0, newest))
        starts.append((number, resumed_at))
        newest = resumed_at + draw(st.integers(0, 8))
        found.append(make_history(starts, lineage))
    return found


@st.composite
def inventories(draw: st.DrawFn) -> tuple[list[Version], tuple[str, ...]]:
    """Versions of several ranks, lineages and starts in random places."""
    num_ranks = draw(st.integers(1, 3))
    runs = {lineage: draw(histories(lineage)) for lineage in ("run-a", "run-b")}
    version = st.sampled_from(sorted(runs)).flatmap(
        lambda lineage: st.builds(
            make_version,
            st.integers(0, num_ranks - 1),
            st.integers(0, 10),
            history=st.sampled_from(runs[lineage]),
            node=st.sampled_from([None, "a", "b", "c"]),
            lineage=st.just(lineage),
            is_replica=st.booleans(),
            window=st.sampled_from([1, 1, 3, 4]),
        )
    )
    versions = draw(st.lists(version, max_size=40, unique=True))
    node_of = tuple(draw(st.sampled_from(["a", "b", "c"])) for _ in range(num_ranks))
    return versions, node_of


def sources_by_rank(plan: Plan) -> dict[int, tuple[Source, ...]]:
    return {rank: each for stage in plan.stages.values() for rank, each in stage.sources.items()}


def all_sources(plan: Plan) -> list[Version]:
    return [source.version for sources in sources_by_rank(plan).values() for source in sources]


Group = tuple[Start, int, int]


def group_of(version: Version) -> Group:
    """Return what versions that are used together have in common."""
    return version.history[-1], version.iteration, version.window


def groups_of(versions: Sequence[Version]) -> dict[Group, list[Version]]:
    found: dict[Group, list[Version]] = defaultdict(list)
    for version in versions:
        found[group_of(version)].append(version)
    return found


def belongs_to(version: Version, run: History) -> bool:
    """Return whether all starts of the run after the writer continued from there or later."""
    if version.history[-1] not in run:
        return False
    return min((each.resumed_at for each in run[len(version.history) :]), default=99) >= (
        version.iteration
    )


@given(inventories())
def test_plans_of_any_inventory_are_what_every_rank_has_of_one_start_and_iteration(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    expected = {
        group: members
        for group, members in groups_of(versions).items()
        if {version.rank for version in members} == set(range(len(node_of)))
    }
    plans = plan_recovery(versions, node_of)[0]
    assert len(plans) == len(expected)
    for plan in plans:
        members = expected[group_of(plan.version)]
        assert sorted(map(str, all_sources(plan))) == sorted(map(str, members))
        for rank, sources in sources_by_rank(plan).items():
            assert {source.version.rank for source in sources} == {rank}


@given(inventories())
def test_whatever_is_not_a_plan_is_rejected_with_its_iteration(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    plans, rejected = plan_recovery(*found)
    assert len(plans) + len(rejected) == len(groups_of(found[0]))
    assert all(f"iteration {each.iteration}: no state of rank" in each.reason for each in rejected)


@given(inventories())
def test_plans_of_any_inventory_are_those_of_the_latest_start_first_and_its_newest(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    plans = plan_recovery(*found)[0]
    for lineage in ("run-a", "run-b"):
        order = [
            (plan.start.number, plan.iteration, -plan.version.window)
            for plan in plans
            if plan.lineage == lineage
        ]
        assert order == sorted(order, reverse=True)


@given(inventories())
def test_of_runs_that_know_nothing_of_each_other_the_one_that_got_further_comes_first(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    plans = plan_recovery(*found)[0]
    latest = {plan.lineage: plan for plan in reversed(plans)}
    if len(latest) == 2:
        assert plans[0].iteration == max(plan.iteration for plan in latest.values())


@given(inventories(), st.randoms(use_true_random=False))
def test_plans_of_any_inventory_do_not_depend_on_the_order_of_what_was_found(
    found: tuple[list[Version], tuple[str, ...]], randomness: random.Random
) -> None:
    versions, node_of = found
    shuffled = randomness.sample(versions, len(versions))
    plans, rejected = plan_recovery(versions, node_of)
    plans_again, rejected_again = plan_recovery(shuffled, node_of)
    assert plans == plans_again
    assert sorted(reasons(rejected)) == sorted(reasons(rejected_again))


@given(inventories())
def test_sources_of_any_inventory_go_from_memory_over_peers_to_storage(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    order = [MEMORY, PEER, STORAGE]
    for plan in plan_recovery(versions, node_of)[0]:
        for rank, sources in sources_by_rank(plan).items():
            tiers = [source.tier for source in sources]
            assert tiers == sorted(tiers, key=order.index)
            for source in sources:
                is_here = source.version.node == node_of[rank]
                assert (source.tier == MEMORY) == is_here


@given(inventories())
def test_elsewhere_is_all_that_a_rank_has_left_of_the_run_in_any_window(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    for plan in plan_recovery(versions, node_of)[0]:
        assert belongs_to(plan.version, plan.history)
        for rank, sources in plan.elsewhere.items():
            expected = [
                version
                for version in versions
                if version.rank == rank and belongs_to(version, plan.history)
            ]
            found_there = [each.version for each in sources]
            assert sorted(map(str, found_there)) == sorted(map(str, expected))


# Branches


A = [(0, 0)]
B1 = make_history([*A, (1, 50)])
B2 = make_history([*A, (1, 40)])


def test_stale_state_of_one_rank_kills_nothing_of_a_branch_that_is_complete() -> None:
    versions = [*everywhere(9990, B2), *everywhere(10000, B2), make_version(0, 55, history=B1)]
    plans, rejected = plan_recovery(versions, NODES)
    assert iterations(plans) == [10000, 9990]
    assert reasons(rejected) == ["iteration 55: no state of rank 1 in any tier"]


def test_branch_with_more_starts_and_less_work_comes_after_one_that_it_knew_nothing_of() -> None:
    often = make_history([*A, (1, 50), (2, 51), (3, 51)])
    plans, _ = plan_recovery([*everywhere(52, often), *everywhere(10000, B2)], NODES)
    assert iterations(plans) == [10000, 52]


def test_start_that_knew_of_another_comes_first_with_less_work() -> None:
    # The user has gone back to iteration 40 for a reason.
    versions = [*everywhere(55, B1), *everywhere(45, B2, superseded=(B1[-1].name,))]
    assert iterations(plan_recovery(versions, NODES)[0]) == [45, 55]


def test_state_beyond_where_a_later_start_resumed_is_used_where_that_has_left_nothing_whole() -> (
    None
):
    versions = [*everywhere(4), *everywhere(6), make_version(0, 5, history=LATER)]
    assert iterations(plan_recovery(versions, NODES)[0]) == [6, 4]


def test_state_beyond_where_a_later_start_resumed_comes_after_the_work_of_that() -> None:
    versions = [*everywhere(4), *everywhere(6), *everywhere(5, LATER)]
    assert iterations(plan_recovery(versions, NODES)[0]) == [5, 6, 4]


def test_later_fresh_start_comes_before_the_run_that_it_knew_of() -> None:
    # Its clock may be behind: names say nothing of the order.
    new = (Start(7, 0, "new"),)
    versions = [
        *everywhere(1000, lineage="20260301T120000-aaaa"),
        *everywhere(3, new, lineage="20260301T110000-bbbb", superseded=(FIRST[-1].name,)),
    ]
    assert iterations(plan_recovery(versions, NODES)[0]) == [3, 1000]


def test_what_may_be_newer_than_the_plan_is_named_and_what_is_older_is_not() -> None:
    versions = [
        *everywhere(10, B2),
        make_version(0, 11, history=B2),
        make_version(0, 7, history=B1),
        make_version(0, 3, history=FIRST),
    ]
    plans, rejected = plan_recovery(versions, NODES)
    newer = newer_than(plans[0], rejected)
    assert sorted(each.iteration for each in newer) == [7, 11]


# By hand


def test_many_missing_ranks_are_named_up_to_a_limit() -> None:
    _, rejected = plan_recovery([make_version(0, 5)], ["a"] * 12)
    assert reasons(rejected) == [
        "iteration 5: no state of ranks 1, 2, 3, 4, 5, 6, 7, 8, ... (11 in all) in any tier"
    ]


def test_plan_goes_on_from_the_history_of_the_newest_start() -> None:
    versions = [*everywhere(4), make_version(0, 5, history=LATER)]
    assert plan_recovery(versions, NODES)[0][0].history == LATER


def test_sources_of_one_rank_are_in_the_order_worked_by_hand() -> None:
    own = make_version(0, 4, node="a")
    replica_here = make_version(0, 4, node="a", is_replica=True)
    elsewhere = make_version(0, 4, node="b")
    stored = make_version(0, 4)
    versions = [stored, elsewhere, replica_here, own]
    (plan,), _ = plan_recovery(versions, ["a"])
    found = [(source.tier, source.version) for source in plan.sources_of(0)]
    assert found == [
        (MEMORY, own),
        (MEMORY, replica_here),
        (PEER, elsewhere),
        (STORAGE, stored),
    ]


# Windows


@given(inventories())
def test_stages_divide_the_ranks_and_all_replay_the_same_window(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    stage_of = [rank % 2 for rank in range(len(node_of))]
    plans, rejected = plan_recovery(versions, node_of, stage_of)
    one_stage, rejected_again = plan_recovery(versions, node_of)
    assert rejected == rejected_again
    for plan, alone in zip(plans, one_stage, strict=True):
        assert sources_by_rank(plan) == sources_by_rank(alone)
        for stage, way in plan.stages.items():
            assert {stage_of[rank] for rank in way.sources} == {stage}
            assert (way.target, way.num_replays) == (plan.iteration, plan.version.window - 1)
