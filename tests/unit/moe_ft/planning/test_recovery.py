"""Recovery plans: newest common state of one lineage, dead branches left alone, best tier first."""

import itertools
import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.recovery import History, RecoveryPlan, Tier, Version, plan_recovery

NODES = ("a", "b")


def make_version(
    rank: int,
    iteration: int,
    *,
    history: History = ((0, 0),),
    node: str | None = None,
    lineage: str = "run-a",
    is_replica: bool = False,
    window: int = 1,
) -> Version:
    start = f"{len(history)}_{lineage}_{window}"
    where = f"{'replica_' if is_replica else ''}{rank}_{iteration}_{start}.json"
    return Version(
        rank=rank,
        iteration=iteration,
        lineage=lineage,
        history=history,
        node=node,
        path=where,
        is_replica=is_replica,
        window=window,
    )


def everywhere(iteration: int, history: History = ((0, 0),), window: int = 1) -> list[Version]:
    """Return one version of each of two ranks, each in the memory of its node."""
    return [
        make_version(rank, iteration, history=history, node=NODES[rank], window=window)
        for rank in range(len(NODES))
    ]


def iterations(plans: Iterable[RecoveryPlan]) -> list[int]:
    return [plan.iteration for plan in plans]


@st.composite
def histories(draw: st.DrawFn) -> list[History]:
    """Every incarnation's history of a run that was started several times, each from what it had."""
    history: History = ((0, 0),)
    found = [history]
    newest = draw(st.integers(0, 8))
    for incarnation in range(1, draw(st.integers(1, 4))):
        resumed_at = draw(st.integers(0, newest))
        history = (*history, (incarnation, resumed_at))
        newest = resumed_at + draw(st.integers(0, 8))
        found.append(history)
    return found


@st.composite
def inventories(draw: st.DrawFn) -> tuple[list[Version], tuple[str, ...]]:
    """Versions of several ranks, lineages and incarnations in random places."""
    num_ranks = draw(st.integers(1, 3))
    runs = {lineage: draw(histories()) for lineage in ("run-a", "run-b")}
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


def all_sources(plan: RecoveryPlan) -> list[Version]:
    return [source.version for sources in plan.sources.values() for source in sources]


def group_of(version: Version) -> tuple[str, int, int, int]:
    """Say what versions that go together have in common: windows also who cut them, and into how many."""
    start = len(version.history) if version.window > 1 else 0
    return version.lineage, version.iteration, version.window, start


def belongs_to_the_run(version: Version, versions: Sequence[Version]) -> bool:
    """Say the rule in other words: every later start went on from at least this iteration."""
    newest = max(
        (each.history for each in versions if each.lineage == version.lineage),
        key=lambda history: (len(history), history),
    )
    prefix, later = newest[: len(version.history)], newest[len(version.history) :]
    return prefix == version.history and all(version.iteration <= at for _, at in later)


@given(inventories())
def test_plan_of_any_inventory_has_a_source_for_every_rank(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    for plan in plan_recovery(versions, node_of)[0]:
        assert sorted(plan.sources) == list(range(len(node_of)))
        assert all(plan.sources.values())


@given(inventories())
def test_plan_of_any_inventory_combines_one_iteration_of_one_lineage(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    for plan in plan_recovery(*found)[0]:
        assert {version.lineage for version in all_sources(plan)} == {plan.lineage}
        assert {version.iteration for version in all_sources(plan)} == {plan.iteration}


@given(inventories())
def test_plan_of_any_inventory_never_combines_windows_of_other_lengths_or_starts(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    for plan in plan_recovery(*found)[0]:
        assert len({group_of(version) for version in all_sources(plan)}) == 1


@given(inventories())
def test_plan_of_any_inventory_reads_each_rank_from_its_own_state(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    for plan in plan_recovery(*found)[0]:
        for rank, sources in plan.sources.items():
            assert {source.version.rank for source in sources} == {rank}


@given(inventories())
def test_plans_of_any_inventory_are_those_that_every_rank_has_alive(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    alive = [version for version in versions if belongs_to_the_run(version, versions)]
    expected = {
        group_of(version)
        for version in alive
        if {other.rank for other in alive if group_of(other) == group_of(version)}
        == set(range(len(node_of)))
    }
    plans = plan_recovery(versions, node_of)[0]
    assert len(plans) == len(expected)
    assert {group_of(plan.sources[0][0].version) for plan in plans} == expected


@given(inventories())
def test_sources_of_any_inventory_are_all_that_are_alive(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    for plan in plan_recovery(versions, node_of)[0]:
        expected = [
            version
            for version in versions
            if group_of(version) == group_of(plan.sources[0][0].version)
            and belongs_to_the_run(version, versions)
        ]
        assert sorted(map(str, all_sources(plan))) == sorted(map(str, expected))


@given(inventories())
def test_plans_of_any_inventory_are_newest_first(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    order = [(plan.lineage, plan.iteration) for plan in plan_recovery(*found)[0]]
    assert order == sorted(order, reverse=True)


@given(inventories(), st.randoms(use_true_random=False))
def test_plans_of_any_inventory_do_not_depend_on_the_order_of_what_was_found(
    found: tuple[list[Version], tuple[str, ...]], randomness: random.Random
) -> None:
    versions, node_of = found
    shuffled = randomness.sample(versions, len(versions))
    plans, rejected = plan_recovery(versions, node_of)
    plans_again, rejected_again = plan_recovery(shuffled, node_of)
    assert plans == plans_again
    assert sorted(rejected) == sorted(rejected_again)


@given(inventories())
def test_sources_of_any_inventory_go_from_memory_over_peers_to_storage(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    order = [Tier.MEMORY, Tier.PEER, Tier.STORAGE]
    for plan in plan_recovery(versions, node_of)[0]:
        for rank, sources in plan.sources.items():
            tiers = [source.tier for source in sources]
            assert tiers == sorted(tiers, key=order.index)
            for source in sources:
                is_here = source.version.node == node_of[rank]
                assert (source.tier is Tier.MEMORY) == is_here


@given(inventories(), st.integers(0, 10))
def test_only_iteration_leaves_no_other(
    found: tuple[list[Version], tuple[str, ...]], only: int
) -> None:
    without = [plan for plan in plan_recovery(*found)[0] if plan.iteration == only]
    assert plan_recovery(*found, only_iteration=only)[0] == without


@given(inventories())
def test_plans_of_one_iteration_are_ordered_by_the_length_of_their_windows(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    plans = plan_recovery(*found)[0]
    for earlier, later in itertools.pairwise(plans):
        if (earlier.lineage, earlier.iteration) == (later.lineage, later.iteration):
            first, second = (plan.sources[0][0].version for plan in (earlier, later))
            assert first.window <= second.window
            if first.window == second.window:
                assert first.incarnation > second.incarnation


@given(inventories())
def test_elsewhere_is_all_that_a_rank_has_left_of_the_run_in_any_window(
    found: tuple[list[Version], tuple[str, ...]],
) -> None:
    versions, node_of = found
    for plan in plan_recovery(versions, node_of)[0]:
        for rank, sources in plan.elsewhere.items():
            expected = [
                version
                for version in versions
                if (version.lineage, version.rank) == (plan.lineage, rank)
                and belongs_to_the_run(version, versions)
            ]
            assert sorted(map(str, (each.version for each in sources))) == sorted(
                map(str, expected)
            )


def test_newest_iteration_that_all_ranks_have_comes_first() -> None:
    versions = [*everywhere(3), *everywhere(4), make_version(0, 5, node="a")]
    assert iterations(plan_recovery(versions, NODES)[0]) == [4, 3]


def test_newer_iteration_that_a_rank_lacks_is_rejected_with_its_name() -> None:
    versions = [*everywhere(3), make_version(0, 5, node="a")]
    assert plan_recovery(versions, NODES)[1] == ["iteration 5: no state of rank 1 in any tier"]


def test_many_missing_ranks_are_named_up_to_a_limit() -> None:
    _, rejected = plan_recovery([make_version(0, 5)], ["a"] * 12)
    assert rejected == [
        "iteration 5: no state of ranks 1, 2, 3, 4, 5, 6, 7, 8, ... (11 in all) in any tier"
    ]


def test_state_beyond_the_point_where_a_later_start_resumed_is_dead() -> None:
    later: History = ((0, 0), (1, 4))
    versions = [*everywhere(4), *everywhere(6), make_version(0, 5, history=later)]
    plans, rejected = plan_recovery(versions, NODES)
    assert iterations(plans) == [4]
    assert "iteration 6 of rank 0: incarnation 1 went on from iteration 4" in rejected


def test_state_at_the_point_where_a_later_start_resumed_is_alive() -> None:
    versions = [*everywhere(4), make_version(0, 9, history=((0, 0), (1, 4)))]
    assert iterations(plan_recovery(versions, NODES)[0]) == [4]


def test_state_that_only_a_start_after_the_next_went_back_behind_is_dead() -> None:
    history: History = ((0, 0), (1, 8), (2, 5))
    versions = [*everywhere(7), make_version(0, 6, history=history)]
    plans, rejected = plan_recovery(versions, NODES)
    assert plans == []
    assert "iteration 7 of rank 0: incarnation 2 went on from iteration 5" in rejected


def test_state_of_before_and_after_a_restart_is_combined_where_both_are_alive() -> None:
    later: History = ((0, 0), (1, 4))
    versions = [make_version(0, 4, node="a"), make_version(1, 4, history=later)]
    assert iterations(plan_recovery(versions, NODES)[0]) == [4]


def test_state_of_another_branch_is_rejected_and_said_to_be_one() -> None:
    ours: History = ((0, 0), (1, 7), (2, 9))
    other: History = ((0, 0), (1, 5))
    versions = [*everywhere(10, ours), *everywhere(6, other)]
    plans, rejected = plan_recovery(versions, NODES)
    assert iterations(plans) == [10]
    assert "iteration 6 of rank 1: incarnation 1 is of another branch of the run" in rejected


def test_ranks_of_different_lineages_are_never_combined() -> None:
    versions = [make_version(0, 4, lineage="run-a"), make_version(1, 4, lineage="run-b")]
    assert plan_recovery(versions, NODES)[0] == []


def test_newer_lineage_comes_before_a_higher_iteration_of_an_older_one() -> None:
    old = [make_version(rank, 100, lineage="20250101") for rank in (0, 1)]
    new = [make_version(rank, 3, lineage="20250102") for rank in (0, 1)]
    assert iterations(plan_recovery(old + new, NODES)[0]) == [3, 100]


def test_plan_goes_on_from_the_history_of_the_newest_start() -> None:
    later: History = ((0, 0), (1, 4))
    versions = [*everywhere(4), make_version(0, 5, history=later)]
    assert plan_recovery(versions, NODES)[0][0].history == later


def test_sources_of_one_rank_are_in_the_order_worked_by_hand() -> None:
    later: History = ((0, 0), (1, 4))
    own = make_version(0, 4, node="a")
    replica_here = make_version(0, 4, node="a", is_replica=True)
    newer_elsewhere = make_version(0, 4, node="c", history=later)
    elsewhere = make_version(0, 4, node="b")
    stored = make_version(0, 4)
    versions = [stored, elsewhere, newer_elsewhere, replica_here, own]
    (plan,), _ = plan_recovery(versions, ["a"])
    found = [(source.tier, source.version) for source in plan.sources[0]]
    assert found == [
        (Tier.MEMORY, own),
        (Tier.MEMORY, replica_here),
        (Tier.PEER, newer_elsewhere),
        (Tier.PEER, elsewhere),
        (Tier.STORAGE, stored),
    ]


def test_rank_that_moved_reads_its_former_node_as_a_peer() -> None:
    versions = [make_version(0, 4, node="a")]
    (plan,), _ = plan_recovery(versions, ["b"])
    assert plan.sources[0][0].tier is Tier.PEER


def test_iteration_that_was_not_asked_for_is_rejected_with_the_flag() -> None:
    _, rejected = plan_recovery(everywhere(4), NODES, only_iteration=3)
    assert rejected == ["iteration 4: not the one that --moe-ft-recover-from names"]


@pytest.mark.parametrize("only", [None, 4])
def test_nothing_found_gives_no_plan_and_no_complaint(only: int | None) -> None:
    assert plan_recovery([], NODES, only) == ([], [])


# Windows

LATER: History = ((0, 0), (1, 4))


def test_windows_of_different_starts_are_not_combined() -> None:
    # Each start orders the units by what it has counted: others are FULL in the same snapshot.
    versions = [
        make_version(0, 4, node="a", window=3),
        make_version(1, 4, node="b", window=3, history=LATER),
    ]
    plans, rejected = plan_recovery(versions, NODES)
    assert plans == []
    assert sorted(rejected) == [
        "iteration 4: no state of rank 0 in any tier",
        "iteration 4: no state of rank 1 in any tier",
    ]


def test_windows_of_different_lengths_are_not_combined() -> None:
    versions = [make_version(0, 4, window=3), make_version(1, 4, window=4)]
    assert plan_recovery(versions, NODES)[0] == []


def test_window_and_single_snapshot_of_one_iteration_are_not_combined() -> None:
    versions = [make_version(0, 4, window=3), make_version(1, 4)]
    assert plan_recovery(versions, NODES)[0] == []


def test_window_is_read_from_several_tiers() -> None:
    versions = [
        make_version(0, 4, window=3),
        make_version(0, 4, window=3, node="b", is_replica=True),
        make_version(1, 4, window=3, node="b"),
    ]
    (plan,), _ = plan_recovery(versions, NODES)
    tiers = [[source.tier for source in plan.sources[rank]] for rank in (0, 1)]
    assert tiers == [[Tier.PEER, Tier.STORAGE], [Tier.MEMORY]]


def test_newer_window_comes_before_an_older_single_snapshot() -> None:
    plans, _ = plan_recovery([*everywhere(4), *everywhere(6, window=3)], NODES)
    assert iterations(plans) == [6, 4]


def test_single_snapshot_comes_before_a_window_of_the_same_iteration() -> None:
    # The state at the end of training is saved at once, and needs no replay.
    plans, _ = plan_recovery([*everywhere(6, window=3), *everywhere(6)], NODES)
    assert [plan.sources[0][0].version.window for plan in plans] == [1, 3]


def test_shorter_window_comes_before_a_longer_one_of_the_same_iteration() -> None:
    plans, _ = plan_recovery([*everywhere(6, window=4), *everywhere(6, window=2)], NODES)
    assert [plan.sources[0][0].version.window for plan in plans] == [2, 4]


def test_window_of_a_newer_start_comes_before_that_of_an_older_one() -> None:
    versions = [*everywhere(4, window=3), *everywhere(4, LATER, window=3)]
    plans, _ = plan_recovery(versions, NODES)
    assert [plan.sources[0][0].version.history for plan in plans] == [LATER, ((0, 0),)]


def test_older_window_is_a_plan_where_a_rank_lacks_the_newer_one() -> None:
    versions = [*everywhere(4, window=3), make_version(0, 7, node="a", window=3)]
    plans, rejected = plan_recovery(versions, NODES)
    assert iterations(plans) == [4]
    assert rejected == ["iteration 7: no state of rank 1 in any tier"]


def test_window_that_ends_beyond_where_a_later_start_resumed_is_dead() -> None:
    versions = [*everywhere(4, window=3), *everywhere(7, window=3)]
    versions.append(make_version(0, 6, history=LATER, window=3))
    plans, _ = plan_recovery(versions, NODES)
    assert iterations(plans) == [4]
