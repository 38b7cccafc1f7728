"""Schedules run every cell once, in an order that messages allow, in memory that there is."""

from collections import Counter, deque
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.errors import PlanError
from moe_ft.planning.schedules import (
    Cell,
    Operation,
    OpKind,
    Pipelines,
    Role,
    Schedule,
    choose_deputies,
    choose_runners,
    plan_schedule,
)


def pipelines(stages: int, groups: int, micro_batches: int) -> Pipelines:
    return Pipelines(num_stages=stages, num_pipelines=groups, num_micro_batches=micro_batches)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Pipelines, frozenset[Role]]:
    """Pipelines, and dead roles that leave a rank of every stage."""
    stages, groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    dead = set()
    for stage in range(stages):
        peers = draw(st.sets(st.integers(0, groups - 1), max_size=groups - 1))
        dead |= {(peer, stage) for peer in peers}
    return pipelines(stages, groups, draw(st.integers(1, 7))), frozenset(dead)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    job, dead = draw(jobs())
    return plan_schedule(
        job,
        dead,
        is_split=draw(st.booleans()),
        is_whole=draw(st.booleans()),
        most_more_held=draw(st.integers(0, 4)),
    )


def one_f_one_b(job: Pipelines, pipeline: int, stage: int) -> Iterator[tuple[str, int]]:
    """Yield Megatron's order of a stage, as it is published: warm-up, one of each in turn, cool-down."""
    warm = min(job.num_stages - stage - 1, job.num_micro_batches)
    yield from (("F", number) for number in range(warm))
    for number in range(warm, job.num_micro_batches):
        yield from (("F", number), ("B", number - warm))
    yield from (
        ("B", number) for number in range(job.num_micro_batches - warm, job.num_micro_batches)
    )


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_schedule_of_a_healthy_job_that_is_not_split_is_1f1b(
    stages: int, groups: int, micro_batches: int
) -> None:
    job = pipelines(stages, groups, micro_batches)
    found = plan_schedule(job)
    for (pipeline, stage), operations in found.operations.items():
        order = [(each.kind, each.cell.micro_batch) for each in operations]
        assert order == [*one_f_one_b(job, pipeline, stage)]
        assert {each.cell.pipeline for each in operations} == {pipeline}
    assert found.duration == (micro_batches + stages - 1) * 3
    assert found.most_held == {
        (pipeline, stage): min(stages - stage, micro_batches)
        for pipeline in range(groups)
        for stage in range(stages)
    }


@given(schedules())
def test_every_cell_is_run_once_at_every_stage_by_its_runner(schedule: Schedule) -> None:
    job = schedule.pipelines
    run: Counter[tuple[OpKind, Cell, int]] = Counter()
    for (pipeline, stage), operations in schedule.operations.items():
        for kind, cell in operations:
            run[kind, cell, stage] += 1
            assert schedule.runners[cell, stage] == pipeline
    kinds = {kind for kind, _, _ in run}
    assert kinds in ({*OpKind}, {OpKind.FORWARD, OpKind.BACKWARD})
    num_cells = job.num_pipelines * job.num_micro_batches * job.num_stages
    assert len(run) == len(kinds) * num_cells
    assert {*run.values()} == {1}


@given(schedules(), st.randoms())
def test_messages_in_the_senders_order_never_leave_a_rank_waiting(
    schedule: Schedule, random: Random
) -> None:
    links: dict[tuple[Role, Role], deque[Operation]] = {}
    expected = {pair: deque(sent) for pair, sent in schedule.messages().items()}
    left = {role: deque(operations) for role, operations in schedule.operations.items()}
    inbox: dict[Role, set[Operation]] = {role: set() for role in left}
    while any(left.values()):
        ready = [role for role in left if left[role] and _has_input(schedule, role, left, inbox)]
        full = [pair for pair, sent in links.items() if sent]
        assert ready or full, "every rank waits for a message that nobody will send"
        if full and (not ready or random.random() < 0.5):  # a message may arrive at any time
            pair = random.choice(full)
            message = links[pair].popleft()
            assert message == expected[pair].popleft()
            inbox[pair[1]].add(message)
            continue
        role = random.choice(ready)
        operation = left[role].popleft()
        if (receiver := _receiver(schedule, role, operation)) is not None:
            links.setdefault((role, receiver), deque()).append(operation)
    for pair, sent in links.items():
        assert list(sent) == list(expected[pair])


def _receiver(schedule: Schedule, role: Role, operation: Operation) -> Role | None:
    step = {OpKind.FORWARD: 1, OpKind.BACKWARD: -1, OpKind.WEIGHTS: 0}[operation.kind]
    stage = role[1] + step
    if not step or not 0 <= stage < schedule.pipelines.num_stages:
        return None
    return schedule.runners[operation.cell, stage], stage


def _has_input(
    schedule: Schedule,
    role: Role,
    left: dict[Role, deque[Operation]],
    inbox: dict[Role, set[Operation]],
) -> bool:
    """Return whether the next operation of a rank has what it needs: a message, or one before it."""
    operation, stage = left[role][0], role[1]
    done = schedule.operations[role][: -len(left[role])]
    kind, cell = operation
    if kind is OpKind.FORWARD:
        return stage == 0 or operation in inbox[role]
    if kind is OpKind.WEIGHTS:
        return Operation(OpKind.BACKWARD, cell) in done
    is_last = stage == schedule.pipelines.num_stages - 1
    return Operation(OpKind.FORWARD, cell) in done and (is_last or operation in inbox[role])


@given(jobs(), st.booleans(), st.integers(0, 4))
def test_ranks_hold_no_more_micro_batches_than_they_may(
    job: tuple[Pipelines, frozenset[Role]], is_split: bool, more: int
) -> None:
    found = plan_schedule(*job, is_split=is_split, most_more_held=more)
    for role, operations in found.operations.items():
        held = most = 0
        ends = OpKind.WEIGHTS if is_split else OpKind.BACKWARD
        for kind, _ in operations:
            held += (kind is OpKind.FORWARD) - (kind is ends)
            most = max(most, held)
        assert held == 0
        assert most == found.most_held[role] <= job[0].num_stages - role[1] + more


@given(schedules())
def test_weights_follow_in_the_order_of_the_backward_passes(schedule: Schedule) -> None:
    for operations in schedule.operations.values():
        backwards = [each.cell for each in operations if each.kind is OpKind.BACKWARD]
        weights = [each.cell for each in operations if each.kind is OpKind.WEIGHTS]
        assert weights in ([], backwards)


@given(jobs(), st.booleans(), st.integers(0, 4))
def test_whole_roles_have_one_runner_and_the_order_of_the_healthy_job(
    job: tuple[Pipelines, frozenset[Role]], is_split: bool, more: int
) -> None:
    found = plan_schedule(*job, is_split=is_split, is_whole=True, most_more_held=more)
    deputies = choose_deputies(*job)
    for (cell, stage), runner in found.runners.items():
        assert runner == deputies.get((cell.pipeline, stage), cell.pipeline)
    for operations in found.operations.values():
        for kind in OpKind:
            for pipeline in range(job[0].num_pipelines):
                numbers = [
                    cell.micro_batch
                    for each, cell in operations
                    if each is kind and cell.pipeline == pipeline
                ]
                assert numbers == sorted(numbers)


@given(jobs())
def test_cells_of_dead_ranks_are_spread_over_all_live_peers(
    job: tuple[Pipelines, frozenset[Role]],
) -> None:
    shape, dead = job
    runners = choose_runners(shape, dead, is_whole=False)
    for stage in range(shape.num_stages):
        load = Counter(runner for (_, at), runner in runners.items() if at == stage)
        assert not {(runner, stage) for runner in load} & dead
        assert max(load.values()) - min(load.values()) <= 1


def test_deputies_of_a_stage_take_one_role_each_before_a_second() -> None:
    dead = frozenset({(0, 1), (1, 1), (2, 0)})
    assert choose_deputies(pipelines(2, 4, 1), dead) == {(0, 1): 2, (1, 1): 3, (2, 0): 3}


def test_stage_without_a_live_rank_is_refused() -> None:
    with pytest.raises(PlanError, match="stage 1 has no live rank"):
        plan_schedule(pipelines(2, 2, 1), frozenset({(0, 1), (1, 1)}))


def spread(stages: int, groups: int, failures: int) -> list[frozenset[Role]]:
    """Return dead roles in different stages, the first stages first, and the last ones first."""
    orders = ([*range(stages)], [*reversed(range(stages))])
    return [
        frozenset((groups - 1 - each // stages, order[each % stages]) for each in range(failures))
        for order in orders
    ]


def same(stages: int, groups: int, failures: int) -> list[frozenset[Role]]:
    """Return dead roles in one stage: the first, or the last."""
    return [
        frozenset((groups - 1 - each, stage) for each in range(failures))
        for stage in (0, stages - 1)
    ]


# Stages, pipelines, micro-batches, deaths; an iteration as part of 1F1B's that an earlier planner needed,
# with up to as many more micro-batches held as there are stages: not split, and split.
KNOWN = [
    ((4, 3, 6), spread(4, 3, 0), 1.00, 0.81),
    ((4, 3, 6), spread(4, 3, 1), 1.11, 1.00),
    ((2, 2, 8), spread(2, 2, 1), 1.78, 1.78),
    ((4, 4, 8), spread(4, 4, 1), 1.15, 1.00),
    ((4, 8, 8), spread(4, 8, 1), 1.06, 0.91),
    ((4, 8, 8), spread(4, 8, 3), 1.09, 0.97),
    ((4, 8, 8), same(4, 8, 3), 1.30, 1.18),
    ((8, 4, 16), spread(8, 4, 1), 1.09, 0.96),
    ((8, 4, 16), spread(8, 4, 3), 1.12, 0.99),
    ((8, 8, 16), spread(8, 8, 6), 1.06, 0.93),
    ((4, 8, 32), spread(4, 8, 1), 1.11, 1.07),
    ((16, 4, 16), spread(16, 4, 6), 1.02, 0.85),
]


@pytest.mark.parametrize(("shape", "deaths", "unsplit", "split"), KNOWN)
def test_iterations_after_deaths_are_no_longer_than_those_known(
    shape: tuple[int, int, int], deaths: list[frozenset[Role]], unsplit: float, split: float
) -> None:
    job = pipelines(*shape)
    healthy = plan_schedule(job).duration
    for is_split, known in ((False, unsplit), (True, split)):
        found = min(
            plan_schedule(job, dead, is_split=is_split, most_more_held=shape[0]).duration
            for dead in deaths
        )
        assert round(found / healthy, 2) <= known
