"""Scopes of any remains of small jobs: as good as the best of all choices, and made of what is there only."""

import random

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.local_recovery import LocalWay, search_way
from moe_ft.planning.remains import PipelineLayout, Remains
from moe_ft.planning.scope import KeptRecord, SentLog
from tests.unit.moe_ft.planning.failures import make_pipelines, make_version
from tests.unit.moe_ft.planning.replays import best_choices, logs_needed, states_of

NEWEST = 5
SAVED = [(end, window) for end in range(NEWEST + 1) for window in (1, 2, 3) if window <= end + 1]
NODES = st.sampled_from([None, "node-0", "node-1", "node-2"])


@st.composite
def layouts(draw: st.DrawFn) -> PipelineLayout:
    num_stages = draw(st.integers(1, 4))
    couplings = []
    if num_stages > 1 and draw(st.integers(0, 3)) == 0:
        stages = st.sets(st.integers(0, num_stages - 1), min_size=2)
        couplings.append(tuple(sorted(draw(stages))))
    return make_pipelines(
        num_stages,
        draw(st.integers(1, 2)),
        is_ring=draw(st.booleans()),
        couplings=couplings,
        stages_per_node=draw(st.integers(1, 2)),
        has_common_records=draw(st.integers(0, 3)) > 0,
    )


@st.composite
def failures(draw: st.DrawFn) -> tuple[PipelineLayout, Remains]:
    """A layout, and states, logs and records, of which few are missing: else nothing can be planned."""
    pipelines = draw(layouts())
    ranks = st.integers(0, len(pipelines.node_of) - 1)
    common = draw(st.sets(st.sampled_from(SAVED), max_size=2))
    lost_states = draw(st.sets(st.tuples(ranks, st.sampled_from(SAVED)), max_size=3))
    versions = []
    for stage in pipelines.stages:
        saved = common | draw(st.sets(st.sampled_from(SAVED), min_size=1, max_size=3))
        for rank in stage:
            for end, window in sorted(saved):
                if (rank, (end, window)) not in lost_states:
                    version = make_version(
                        rank, end, window, node=draw(NODES), start=draw(st.integers(0, 5)) // 5
                    )
                    versions.append(version)
    wires = [
        (*wire, link.direction, iteration)
        for link in pipelines.links
        for wire in pipelines.wires(link)
        for iteration in range(NEWEST)
    ]
    lost_logs = draw(st.sets(st.sampled_from(wires), max_size=8)) if wires else set()
    logs = [
        SentLog(
            sender=wire[0],
            receiver=wire[1],
            direction=wire[2],
            iteration=wire[3],
            node=draw(NODES) if index % 7 == 0 else "node-0",
            path=f"log-{index}",
        )
        for index, wire in enumerate(wires)
        if wire not in lost_logs
    ]
    lost_records = draw(st.sets(st.tuples(ranks, st.integers(0, NEWEST)), max_size=4))
    records = [
        KeptRecord(rank=rank, iteration=iteration, node="node-0", path=f"records-{rank}")
        for rank in range(0, len(pipelines.node_of), draw(st.integers(1, 2)))
        for iteration in range(NEWEST + 1)
        if (rank, iteration) not in lost_records
    ]
    return pipelines, Remains(versions=versions, logs=logs, records=records)


def begins(plan: LocalWay) -> tuple[int, ...]:
    return tuple(plan.stages[stage].replay_from for stage in sorted(plan.stages))


@given(failures())
def test_plan_of_any_remains_is_the_best_of_all_choices(
    failure: tuple[PipelineLayout, Remains],
) -> None:
    pipelines, remains = failure
    found, reason = search_way(remains, pipelines)
    best = best_choices(remains, pipelines)
    if best is None:
        assert found is None
        assert reason
    else:
        target, choices = best
        assert found is not None, reason
        assert found.target == target
        assert choices == [begins(found)], "there are no ties"


@given(failures(), st.randoms(use_true_random=False))
def test_plan_of_the_same_remains_in_any_order_is_the_same(
    failure: tuple[PipelineLayout, Remains], dice: random.Random
) -> None:
    pipelines, remains = failure

    def shuffled[Item](items: list[Item]) -> list[Item]:
        return dice.sample(items, len(items))

    other = Remains(
        versions=shuffled(list(remains.versions)),
        logs=shuffled(list(remains.logs)),
        records=shuffled(list(remains.records)),
    )
    assert search_way(remains, pipelines) == search_way(other, pipelines)


@given(failures())
def test_plan_names_only_states_logs_and_records_that_are_there(
    failure: tuple[PipelineLayout, Remains],
) -> None:
    pipelines, remains = failure
    plan, _ = search_way(remains, pipelines)
    if plan is None:
        return
    for stage, way in plan.stages.items():
        assert set(way.sources) == set(pipelines.stages[stage])
        for rank, sources in way.sources.items():
            assert sources
            for each in sources:
                assert each.version in remains.versions
                assert each.version.rank == rank
                assert each.version.iteration - each.version.window + 1 == way.replay_from
                assert each.version.iteration <= plan.target
        assert len({each.version.window for own in way.sources.values() for each in own}) == 1
    files = {(each.rank, each.node, each.path) for each in remains.records}
    files |= {(each.rank, each.node, each.path) for each in remains.versions}
    for scope in plan.scopes:
        assert set(scope.logs) <= set(remains.logs)
        for records in scope.records.values():
            assert {(each.rank, each.node, each.path) for each in records} <= files


@given(failures())
def test_plan_names_every_log_and_record_that_its_replays_read(
    failure: tuple[PipelineLayout, Remains],
) -> None:
    pipelines, remains = failure
    plan, _ = search_way(remains, pipelines)
    if plan is None:
        return
    logs = [log for scope in plan.scopes for log in scope.logs]
    named = {(each.sender, each.receiver, each.direction, each.iteration) for each in logs}
    assert named == logs_needed(pipelines, begins(plan), plan.target)
    assert len(named) == len(logs)
    for scope in plan.scopes:
        order = [(log.iteration, log.receiver, log.sender, log.direction) for log in scope.logs]
        assert order == sorted(order)
        assert set(scope.records) == set(scope.stages)
        for stage, records in scope.records.items():
            whole = next(iter(plan.stages[stage].sources.values()))[0].version.iteration
            assert [each.iteration for each in records] == [*range(whole + 1, plan.target + 1)]


@given(failures())
def test_stages_outside_of_every_scope_have_the_target_and_all_others_are_in_one_scope(
    failure: tuple[PipelineLayout, Remains],
) -> None:
    pipelines, remains = failure
    plan, _ = search_way(remains, pipelines)
    if plan is None:
        return
    inside = [stage for scope in plan.scopes for stage in scope.stages]
    assert len(set(inside)) == len(inside)
    for stage, way in plan.stages.items():
        has_target = (plan.target, plan.target) in states_of(remains, pipelines, stage)
        assert (way.num_replays == 0) == (stage not in inside)
        assert has_target or stage in inside
        if has_target and not pipelines.couplings and stage in inside:
            sent = [log for log in remains.logs if log.sender in pipelines.stages[stage]]
            has_all_logs = len(sent) == NEWEST * sum(
                link.sender == stage for link in pipelines.links
            ) * len(pipelines.stages[stage])
            assert not has_all_logs, "a stage with all its logs and the target keeps its state"


@given(failures())
def test_scopes_have_no_link_and_no_coupling_with_each_other(
    failure: tuple[PipelineLayout, Remains],
) -> None:
    pipelines, remains = failure
    plan, _ = search_way(remains, pipelines)
    if plan is None:
        return
    scope_of = {stage: number for number, scope in enumerate(plan.scopes) for stage in scope.stages}
    joined = [(link.sender, link.receiver) for link in pipelines.links]
    joined += [
        (first, other)
        for each in pipelines.couplings
        for first, *rest in [each.stages]
        for other in rest
    ]
    for first, second in joined:
        if first in scope_of and second in scope_of:
            assert scope_of[first] == scope_of[second]
