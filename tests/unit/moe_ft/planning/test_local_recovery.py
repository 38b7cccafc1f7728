"""Local recoveries are planned from what was found, and taken only where they are better than global ones."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from moe_ft.format.identity import History
from moe_ft.format.records import numbers_of
from moe_ft.planning.local_recovery import plan_local
from moe_ft.planning.recovery import Plan, Version, plan_recovery, plan_to_keep
from moe_ft.planning.remains import FoundLog, Remains
from moe_ft.planning.scope import Place
from tests.unit.moe_ft.builders import make_history, make_record
from tests.unit.moe_ft.planning.failures import STARTS, make_failure, make_pipelines, make_version

PIPELINES = make_pipelines(3)
NEWEST, BEGIN, END = 6, 3, 4  # the newest state of all; first and last iteration of the window
SETTINGS = "{}"


def found_logs(
    remains: Remains, *, history: History = STARTS[:1], settings: str = SETTINGS
) -> list[FoundLog]:
    """Return the logs of a failure as they are found, one for each rank and iteration."""
    keys = sorted({(each.sender, each.iteration) for each in remains.logs})
    return [
        FoundLog(
            rank=rank,
            iteration=iteration,
            history=history,
            node=PIPELINES.node_of[rank],
            path=f"rank_{rank}/boundary_{iteration}.json",
            receivers=tuple(
                (each.receiver, each.direction)
                for each in remains.logs
                if (each.sender, each.iteration) == (rank, iteration)
            ),
            numbers=numbers_of(make_record(iteration)),
            replay_settings=settings,
            record_settings=SETTINGS,
        )
        for rank, iteration in keys
    ]


def failure(dead: Collection[int], window: tuple[int, int] = (END, END - BEGIN + 1)) -> Remains:
    """Return what is left when some ranks had no time for a breakpoint."""
    at = {rank: NEWEST for rank in range(3) if rank not in dead}
    remains = make_failure(PIPELINES, at, window=window)
    versions = [
        replace(each, is_breakpoint=each.iteration == NEWEST, replay_settings=SETTINGS)
        for each in remains.versions
    ]
    return replace(remains, versions=versions)


def plan_of(
    versions: Sequence[Version], logs: Sequence[FoundLog], settings: str = SETTINGS
) -> tuple[Plan | None, str, list[Plan]]:
    plans, _ = plan_recovery(versions, PIPELINES.node_of, [0, 1, 2])
    found, reason = plan_local(plans, versions, logs, PIPELINES, lambda given: given == settings)
    return found, reason, plans


@pytest.mark.parametrize("dead", range(3))
def test_dead_stage_recovers_alone_and_the_others_keep_their_breakpoints(dead: int) -> None:
    remains = failure({dead})
    found, reason, plans = plan_of(remains.versions, found_logs(remains))
    assert found is not None, reason
    assert (found.iteration, found.is_local, plans[0].iteration) == (NEWEST, True, END)
    assert found.replay_from == BEGIN
    assert {stage: each.num_replays for stage, each in found.stages.items()} == {
        stage: (NEWEST - BEGIN) * (stage == dead) for stage in range(3)
    }
    assert [found.scope_of(stage) is not None for stage in range(3)] == [
        stage == dead for stage in range(3)
    ]
    assert (found.history, found.lineage) == (plans[0].history, plans[0].lineage)


def test_states_that_a_local_recovery_rests_on_are_those_of_all_stages() -> None:
    remains = failure({1})
    found, _, plans = plan_of(remains.versions, found_logs(remains))
    assert found is not None
    assert found.basis.states == {(STARTS[0], END), (STARTS[0], NEWEST)}
    assert plan_to_keep(found, [found, *plans]) is plans[0]


def test_global_recovery_is_taken_where_nothing_has_to_be_run_again() -> None:
    remains = failure(())
    found, reason, plans = plan_of(remains.versions, found_logs(remains))
    assert (found, reason) == (None, "")
    assert (plans[0].iteration, plans[0].num_replays) == (NEWEST, 0)


def test_log_that_could_not_be_read_counts_as_lost_for_its_receiver_only() -> None:
    remains = failure({1})
    logs = found_logs(remains)
    plans, _ = plan_recovery(remains.versions, PIPELINES.node_of, [0, 1, 2])
    path = next(each.path for each in logs if (each.rank, each.iteration) == (0, 4))
    for receiver, stages in ((1, (0, 1)), (2, (1,))):
        unreadable = frozenset({(PIPELINES.node_of[0], path, 4, receiver)})
        found, reason = plan_local(
            plans, remains.versions, logs, PIPELINES, lambda given: True, unreadable=unreadable
        )
        assert found is not None, reason
        (scope,) = found.scopes
        assert scope.stages == stages
        assert all(each.place not in unreadable for each in scope.logs)


def test_record_that_could_not_be_read_is_taken_from_another_place() -> None:
    remains = failure({1})
    logs, read = found_logs(remains), []
    plans, _ = plan_recovery(remains.versions, PIPELINES.node_of, [0, 1, 2])
    unreadable: frozenset[Place] = frozenset()
    for _ in range(2):
        found, reason = plan_local(
            plans, remains.versions, logs, PIPELINES, lambda given: True, unreadable=unreadable
        )
        assert found is not None and found.iteration == NEWEST, reason
        (scope,) = found.scopes
        assert scope.stages == (1,)
        last = scope.records[1][-1]
        read.append((last.rank, last.iteration))
        unreadable |= {last.place}
    assert read == [(0, NEWEST), (2, NEWEST)]
    found, reason = plan_local(
        plans, remains.versions, logs, PIPELINES, lambda given: True, unreadable=unreadable
    )
    assert f"iteration {NEWEST}: stage 1 has no record of iteration {NEWEST}" in reason


def test_reason_is_given_also_where_an_older_state_of_all_stages_is_whole() -> None:
    """As with the dense strategy: a snapshot of iteration 4, breakpoints of 6, and no logs."""
    remains = failure({1}, window=(END, 1))
    found, reason, plans = plan_of(remains.versions, [])
    assert (found, plans[0].iteration, plans[0].num_replays) == (None, END, 0)
    assert reason == f"iteration {NEWEST}: stage 1 has no record of iteration 5"


def test_reason_is_given_also_where_some_stages_recover_alone_to_an_older_state() -> None:
    """Stage 0 was an iteration ahead, and evaluates that state, so that no record leads there."""
    remains = failure({1})
    ahead = make_version(0, NEWEST + 1, node=PIPELINES.node_of[0])
    versions, logs = [*remains.versions, ahead], found_logs(remains)
    plans, _ = plan_recovery(versions, PIPELINES.node_of, [0, 1, 2])
    found, reason = plan_local(
        plans, versions, logs, PIPELINES, lambda given: True, lambda each: each > NEWEST
    )
    assert found is not None and found.iteration == NEWEST
    assert (
        f"iteration {NEWEST + 1}: stage 1 has no record of its own of iteration {NEWEST + 1}"
        in reason
    )


def test_reason_is_given_also_where_only_a_part_of_a_stage_has_something_newer() -> None:
    pipelines = make_pipelines(2, 2)
    nodes = pipelines.node_of
    versions = [make_version(rank, NEWEST, node=node) for rank, node in enumerate(nodes)]
    versions.append(make_version(0, NEWEST + 1, node=nodes[0]))
    plans, _ = plan_recovery(versions, nodes, [0, 0, 1, 1])
    found, reason = plan_local(plans, versions, [], pipelines, lambda given: True)
    assert (found, plans[0].iteration) == (None, NEWEST)
    assert reason == f"iteration {NEWEST + 1}: no stage has the state of all its ranks"


def test_logs_with_other_settings_or_of_a_branch_that_was_left_are_not_used() -> None:
    remains = failure({1})
    found, reason, _ = plan_of(remains.versions, found_logs(remains, settings="others"))
    assert found is None and "no record of iteration 5" in reason
    left = make_history([(0, 0), (7, 1)])
    found, reason, _ = plan_of(remains.versions, found_logs(remains, history=left))
    assert found is None and "no record of iteration 5" in reason


@pytest.mark.parametrize("iteration", [4, 5])
def test_iteration_that_ran_with_another_learning_rate_is_only_run_again_from_its_own_record(
    iteration: int,
) -> None:
    """The window of the dead stage has the records up to 4; the log of 4 made state 5."""
    remains = failure({1})
    logs = [
        replace(each, record_settings="others" if each.iteration == iteration else SETTINGS)
        for each in found_logs(remains)
    ]
    plans, _ = plan_recovery(remains.versions, PIPELINES.node_of, [0, 1, 2])

    def plan(given: str) -> tuple[Plan | None, str]:
        return plan_local(
            plans,
            remains.versions,
            logs,
            PIPELINES,
            lambda settings: True,
            has_same_records=lambda settings: settings != given,
        )

    found, reason = plan("others")
    assert found is None
    assert f"no record of its own of iteration {iteration + 1}" in reason
    assert plan("nothing has these")[0] is not None


def test_window_with_other_settings_is_not_replayed() -> None:
    remains = failure({1})
    versions = [
        replace(each, replay_settings="others" if each.window > 1 else SETTINGS)
        for each in remains.versions
    ]
    found, reason, _ = plan_of(versions, found_logs(remains))
    assert found is None
    assert "stage 1 has no such or older state of all its ranks" in reason


def test_recovery_without_any_whole_state_of_all_stages_is_possible() -> None:
    """The first window was completed by one stage alone; the others have their breakpoints."""
    remains = failure({1})
    versions = [each for each in remains.versions if each.window == 1 or each.rank == 1]
    found, reason, plans = plan_of(versions, found_logs(remains))
    assert not plans
    assert found is not None, reason
    assert (found.iteration, found.lineage) == (NEWEST, "run-a")
    assert found.elsewhere[1]


def test_fresh_start_has_no_plan_and_no_reason() -> None:
    assert plan_local([], [], [], PIPELINES, lambda given: True) == (None, "")


def test_work_of_a_start_that_was_left_is_not_used() -> None:
    """The second start continued at 2: what the first one made after that is dead."""
    remains = failure({1})
    later = [make_version(rank, 2, node=PIPELINES.node_of[rank], start=1) for rank in range(3)]
    found, _, plans = plan_of([*remains.versions, *later], found_logs(remains))
    assert plans[0].start == STARTS[1]
    assert found is None
