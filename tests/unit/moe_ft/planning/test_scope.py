"""Scopes of recoveries, worked out by hand. test_scope_search.py compares others with a search."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from moe_ft.planning.local_recovery import LocalWay, search_way
from moe_ft.planning.remains import PipelineLayout, Remains
from tests.unit.moe_ft.planning.failures import make_failure, make_pipelines, make_version

NEWEST, BEGIN, END = 6, 3, 4  # the newest state of all; first and last iteration of the window


def plan(remains: Remains, pipelines: PipelineLayout) -> LocalWay:
    found, why_not = search_way(remains, pipelines)
    assert found is not None, why_not
    return found


def reason(remains: Remains, pipelines: PipelineLayout) -> str:
    found, why_not = search_way(remains, pipelines)
    assert found is None
    return why_not


def healthy(
    pipelines: PipelineLayout, dead: Collection[int], iteration: int = NEWEST
) -> dict[int, int]:
    """Return the breakpoints of all ranks but the dead ones."""
    return {rank: iteration for rank in range(len(pipelines.node_of)) if rank not in dead}


def begins(found: LocalWay) -> list[int]:
    return [found.stages[stage].replay_from for stage in sorted(found.stages)]


def without_logs(
    remains: Remains, *, sender: int, iterations: Iterable[int], receiver: int | None = None
) -> Remains:
    """Return remains without the logs of a rank, of some iterations, for one neighbour or all."""
    lost = set(iterations)
    kept = [
        each
        for each in remains.logs
        if each.sender != sender
        or each.iteration not in lost
        or (receiver is not None and each.receiver != receiver)
    ]
    return replace(remains, logs=kept)


def test_peers_of_a_dead_rank_go_back_to_its_window_although_they_have_breakpoints() -> None:
    pipelines = make_pipelines(3, 2)
    found = plan(make_failure(pipelines, healthy(pipelines, {2})), pipelines)
    assert begins(found) == [NEWEST, BEGIN, NEWEST]
    windows = {
        rank: {each.version.window for each in sources}
        for rank, sources in found.stages[1].sources.items()
    }
    assert windows == {2: {2}, 3: {2}}, "no rank of the stage restores its breakpoint"


def test_peers_restore_breakpoints_beside_a_whole_replica_of_the_dead_rank_and_nothing_is_run() -> (
    None
):
    pipelines = make_pipelines(3, 2)
    remains = make_failure(pipelines, healthy(pipelines, {2}))
    replica = make_version(2, NEWEST, node="node-2")
    found = plan(replace(remains, versions=[*remains.versions, replica]), pipelines)
    assert found.worth == (NEWEST, 0)
    assert [each.version for each in found.stages[1].sources[2]] == [replica]
    assert [each.version.path for each in found.stages[1].sources[3]] == ["rank_3/6_1_0.json"]


def test_lost_node_without_replicas_leaves_no_local_recovery() -> None:
    pipelines = make_pipelines(4)
    remains = make_failure(
        pipelines, healthy(pipelines, {1}), lost_nodes={"node-1"}, is_replicated=False
    )
    assert "stage 1 has no such or older state of all its ranks" in reason(remains, pipelines)


def test_neighbour_without_log_and_without_old_state_leaves_no_local_recovery() -> None:
    pipelines = make_pipelines(4)
    remains = make_failure(pipelines, healthy(pipelines, {1}))
    remains = without_logs(remains, sender=2, iterations=[4])
    versions = [each for each in remains.versions if each.rank != 2 or each.window == 1]
    assert reason(replace(remains, versions=versions), pipelines).startswith(
        "iteration 6: the log of rank 2 for rank 1 of iteration 4 is missing, and stage 2 has no state of "
        "iteration 4 or older"
    )


def test_recovery_is_global_if_the_logs_of_all_stages_are_lost() -> None:
    pipelines = make_pipelines(3)
    remains = replace(make_failure(pipelines, healthy(pipelines, {1})), logs=())
    assert reason(remains, pipelines) == (
        "iteration 6: all stages would run the iterations from 3 again; "
        "iteration 4: all stages would run the iterations from 3 again"
    )


def test_missing_record_between_window_and_target_leaves_no_local_recovery() -> None:
    pipelines = make_pipelines(3)
    remains = make_failure(pipelines, healthy(pipelines, {1}))
    records = [each for each in remains.records if each.iteration != 5]
    assert reason(replace(remains, records=records), pipelines).startswith(
        "iteration 6: stage 1 has no record of iteration 5"
    )


def test_record_of_another_stage_does_not_answer_where_optimizers_have_other_parts() -> None:
    pipelines = make_pipelines(3, has_common_records=False)
    remains = make_failure(pipelines, healthy(pipelines, {1}))
    assert "stage 1 has no record of iteration 5" in reason(remains, pipelines)
    wide = make_pipelines(3, 2, has_common_records=False)
    (scope,) = plan(make_failure(wide, healthy(wide, {2})), wide).scopes
    assert {each.rank for each in scope.records[1]} == {3}, "the peer's"


def test_newest_window_that_all_stages_have_is_not_given_up_for_an_older_target() -> None:
    pipelines = make_pipelines(2)
    versions = [make_version(rank, END, 2) for rank in (0, 1)]
    versions += [make_version(0, 3), make_version(1, 3)]
    remains = replace(make_failure(pipelines, {}), versions=versions)
    assert reason(remains, pipelines) == (
        "iteration 4: all stages would run the iterations from 3 again"
    )


def test_fresh_start_has_nothing_to_plan() -> None:
    assert (
        reason(Remains(versions=()), make_pipelines(3)) == "no stage has the state of all its ranks"
    )
