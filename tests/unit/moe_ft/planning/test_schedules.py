"""Schedules run every cell once, in an order that messages allow, in memory that there is."""

from collections import Counter, deque
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.schedules import (
    SHARED,
    Cell,
    Operation,
    OpKind,
    Pipelines,
    Role,
    Schedule,
    Way,
    plan_schedule,
    share_cells,
)

Hosts = dict[Role, Role]


def pipelines(stages: int, lanes: int, micro_batches: int, group_size: int = 1) -> Pipelines:
    return Pipelines(
        num_stages=stages,
        num_pipelines=lanes,
        num_micro_batches=micro_batches,
        group_size=group_size,
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Pipelines, Hosts]:
    """Pipelines, and guests whose hosts are no guests."""
    stages, groups, size = (draw(st.integers(1, most)) for most in (4, 3, 3))
    roles = [(lane, stage) for lane in range(groups * size) for stage in range(stages)]
    guests = draw(st.sets(st.sampled_from(roles), max_size=len(roles) // 2))
    others = sorted({*roles} - guests)
    hosts = {each: draw(st.sampled_from(others)) for each in sorted(guests)}
    return pipelines(stages, groups * size, draw(st.integers(1, 6)), size), hosts


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    return plan_schedule(
        *draw(jobs()),
        ways=draw(st.sampled_from([SHARED, [Way.CROWD], *([each] for each in SHARED)])),
        expert_part=draw(st.sampled_from([0.0, 0.3, 0.7])),
        is_split=draw(st.booleans()),
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
        cells = [each.cell for each in operations if each.cell is not None]
        order = [
            (each.kind, cell.micro_batch) for each, cell in zip(operations, cells, strict=True)
        ]
        assert order == [*one_f_one_b(job, pipeline, stage)]
        assert {cell.pipeline for cell in cells} == {pipeline}
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
        for kind, _, cell in operations:
            if cell is not None:
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
    expected = {pair: deque(sent) for pair, sent in schedule.messages.items()}
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
    if operation.cell is None or not step or not 0 <= stage < schedule.pipelines.num_stages:
        return None
    return schedule.runners[operation.cell, stage], stage


def _has_input(
    schedule: Schedule,
    role: Role,
    left: dict[Role, deque[Operation]],
    inbox: dict[Role, set[Operation]],
) -> bool:
    """Return whether the next operation of a rank has what it needs: a message, and others before it.

    All roles of a group run a turn together: one that waits for a message has the others wait.
    """
    next_one = left[role][0]
    for other in schedule.pipelines.roles_of(schedule.pipelines.group_of(role)):
        done = schedule.operations[other][: len(schedule.operations[role]) - len(left[role])]
        operation = schedule.operations[other][len(done)]
        assert operation[:2] == next_one[:2], "roles of a group run the same turns"
        kind, turn, cell = operation
        steps = [each[:2] for each in done]
        if kind is OpKind.WEIGHTS and (OpKind.BACKWARD, turn) not in steps:
            return False
        if kind is OpKind.BACKWARD and (OpKind.FORWARD, turn) not in steps:
            return False
        ends = {OpKind.FORWARD: 0, OpKind.BACKWARD: schedule.pipelines.num_stages - 1}
        if cell is None or role[1] == ends.get(kind, role[1]):
            continue
        got = {(each.kind, each.cell) for each in inbox[other]}
        if (kind, cell) not in got:
            return False
    return True


@given(jobs(), st.booleans(), st.integers(0, 4))
def test_ranks_hold_no_more_micro_batches_than_they_may(
    job: tuple[Pipelines, Hosts], is_split: bool, more: int
) -> None:
    found = plan_schedule(*job, is_split=is_split, most_more_held=more)
    is_whole = found.shares.way is Way.PEERS and job[0].group_size == 1
    for role, operations in found.operations.items():
        held = most = 0
        ends = OpKind.WEIGHTS if is_split else OpKind.BACKWARD
        for kind, _, _ in operations:
            held += (kind is OpKind.FORWARD) - (kind is ends)
            most = max(most, held)
        assert held == 0
        assert most == found.most_held[role]
        assert not is_whole or most <= job[0].num_stages - role[1] + more


@given(schedules())
def test_weights_follow_in_the_order_of_the_backward_passes(schedule: Schedule) -> None:
    for operations in schedule.operations.values():
        backwards = [each.turn for each in operations if each.kind is OpKind.BACKWARD]
        weights = [each.turn for each in operations if each.kind is OpKind.WEIGHTS]
        assert weights in ([], backwards)


@given(jobs())
def test_guests_run_nothing_where_another_group_can(job: tuple[Pipelines, Hosts]) -> None:
    shape, hosts = job
    shares = share_cells(shape, hosts, Way.PEERS)
    for stage, turns in enumerate(shares.turns):
        groups = {shape.group_of(each)[0] for each in hosts if each[1] == stage}
        load = Counter(turn.group for turn in turns)
        if len(groups) * shape.group_size < shape.num_pipelines:
            assert not load.keys() & groups
            assert shares.pace or max(load.values()) - min(load.values()) <= 1


def test_guest_and_host_of_two_stages_run_as_many_together_as_a_peer_alone() -> None:
    turns = share_cells(pipelines(2, 2, 6), {(1, 1): (0, 0)}, Way.GUESTS).turns
    assert [Counter(turn.group for turn in of_stage) for of_stage in turns] == [
        {0: 4, 1: 8},
        {0: 8, 1: 4},
    ]


def test_experts_of_one_group_are_computed_by_guests_for_empty_micro_batches() -> None:
    shape, hosts = pipelines(1, 4, 3, 4), {(3, 0): (2, 0)}
    (turns,) = share_cells(shape, hosts, Way.EXPERTS, 0.25).turns
    assert [*turns.values()][0] == (Cell(0, 0), Cell(0, 1), Cell(0, 2), None)
    assert len(turns) == 4, "those of three micro-batches of four roles"
    # Three quarters of the tokens, for the experts of two ranks on one device.
    (pace,) = share_cells(shape, hosts, Way.EXPERTS, 0.5).pace.values()
    assert pace == 0.5 + 2 * 0.5 * 3 / 4


def test_way_is_the_one_whose_iteration_is_shortest() -> None:
    shape, hosts = pipelines(2, 8, 8, 8), {(7, 1): (0, 1)}
    few, many = (
        plan_schedule(shape, hosts, expert_part=each, most_more_held=1) for each in (0.3, 0.9)
    )
    assert (few.shares.way, many.shares.way) == (Way.EXPERTS, Way.PEERS)
    crowd = plan_schedule(shape, hosts, ways=[Way.CROWD])
    assert few.duration < crowd.duration == many.duration


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
            plan_schedule(
                job,
                {each: (0, each[1]) for each in dead},
                is_split=is_split,
                most_more_held=shape[0],
            ).duration
            for dead in deaths
        )
        assert round(found / healthy, 2) <= known
