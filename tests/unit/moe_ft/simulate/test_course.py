"""Courses of runs, worked out by hand."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.costs import Costs, RecoveryCosts, RecoveryKind, StoredStates
from moe_ft.planning.time_shares import Spent
from moe_ft.simulate import course as course_module
from moe_ft.simulate.course import MachinePool, RunCourse, run_course
from moe_ft.simulate.failures import Change, Failures
from tests.unit.moe_ft.simulate.costs import costs


def course(found: Costs, *changes: Change, horizon_s: float = 1000.0, **pool: Any) -> RunCourse:
    values = {"num_nodes": 4, "num_spares": 9, **pool}
    return run_course(found, RecoveryKind.RESTART, MachinePool(**values), changes, horizon_s)


def strike(time_s: float, *places: int, **values: Any) -> Change:
    return Change(time_s=time_s, struck=places, **values)


def test_run_without_a_failure_is_productive_but_for_what_blocks() -> None:
    found = course(costs(blocked_s=0.25))
    assert found.seconds[Spent.PRODUCTIVE] == pytest.approx(800)
    assert found.seconds[Spent.BLOCKED] == pytest.approx(200)
    assert tuple(found.spans) == ((0, 1000, Spent.PRODUCTIVE),)


def test_periodic_failures_take_their_recovery_and_what_came_after_the_last_state() -> None:
    # At 105, 30 s of recovery, and 5 iterations again; 68 s later, at 173 iterations, 3.
    found = course(costs(), strike(105, 0), strike(208, 1))
    assert tuple(found.spans) == (
        (0, 105, Spent.PRODUCTIVE),
        (105, 135, Spent.RECOVERING),
        (135, 140, Spent.REDONE),
        (140, 208, Spent.PRODUCTIVE),
        (208, 238, Spent.RECOVERING),
        (238, 241, Spent.REDONE),
        (241, 1000, Spent.PRODUCTIVE),
    )
    assert (found.num_failures, found.num_recoveries, found.num_fallbacks) == (2, 2, 0)


def test_stage_that_computes_alone_takes_no_snapshots() -> None:
    recovery = RecoveryCosts(processes_s=1.0, replay_s=1.0, redo_share=0.5)
    found = costs(interval=3.0, window=3, recoveries={RecoveryKind.LOCAL: recovery})
    lost = strike(14.25, 0), strike(26.0, 1)
    done = run_course(found, RecoveryKind.LOCAL, MachinePool(num_nodes=4, num_spares=9), lost, 40.0)
    # At 14.25 the window that begins with 10 is complete, and from 12 on iterations take half as long, until
    # 17.375. The next window begins with 15. At 26, in iteration 22.875, that of 18 is the newest.
    assert done.seconds[Spent.REDONE] == pytest.approx(1 + 2.25 / 2 + 1 + 2.875 / 2)


def test_job_that_may_shrink_trains_slower_until_the_machine_is_back() -> None:
    found = course(costs(), strike(105, 0), num_spares=0, return_s=100.0, least_nodes=3)
    # Of 4 nodes 3 are left: 5 iterations again take 5 / 0.75 s, and at 205 the fourth stops them for 30 s.
    assert tuple(found.spans[:2]) == ((0, 105, Spent.PRODUCTIVE), (105, 135, Spent.RECOVERING))
    assert found.spans[2][1] == pytest.approx(135 + 5 / 0.75)
    assert tuple(found.spans[4:]) == ((205, 235, Spent.RECOVERING), (235, 1000, Spent.PRODUCTIVE))
    assert found.seconds[Spent.WAITING] == pytest.approx(70 / 4)
    assert found.seconds[Spent.REDONE] == pytest.approx(5)
    assert found.shares.productive == pytest.approx(1 - (60 + 5 + 70 / 4) / 1000)


def test_job_that_has_too_few_machines_to_shrink_waits() -> None:
    lost = strike(100, 0), strike(100, 1)
    found = course(costs(), *lost, num_spares=0, return_s=100.0, least_nodes=3)
    assert found.seconds[Spent.WAITING] == pytest.approx(100)


def test_state_counts_from_when_it_is_complete() -> None:
    # A state of iteration 100 is complete at 107: at 105 the newest one is that of 90.
    found = course(costs(lag=7.0), strike(105, 0))
    assert found.seconds[Spent.REDONE] == pytest.approx(15)


def test_window_is_replayed_to_its_end_and_the_rest_runs_again() -> None:
    recovery = RecoveryCosts(processes_s=30.0, replay_s=1.0, redo_share=0.5)
    # Windows of 3 begin at 1, 5, 9, ... and are complete 3 iterations later. At 20 that of 17 is: it is
    # replayed to 19, and one more iteration takes half of its time.
    found = course(costs(interval=4.0, window=3, lag=1.0, recovery=recovery), strike(20, 0))
    assert found.seconds[Spent.REDONE] == pytest.approx(1.0 + 0.5)


def test_failure_during_a_recovery_begins_it_again() -> None:
    found = course(costs(), strike(105, 0), strike(125, 2))
    assert found.seconds[Spent.RECOVERING] == pytest.approx(20 + 30)
    assert found.seconds[Spent.REDONE] == pytest.approx(5)
    assert (found.num_failures, found.num_recoveries) == (2, 1)


def test_failure_while_iterations_run_again_begins_with_what_is_complete_by_then() -> None:
    # State 100 is there at 135, and again 105 iterations at 138: three of five are lost again.
    found = course(costs(), strike(105, 0), strike(138, 2))
    assert found.seconds[Spent.REDONE] == pytest.approx(3 + 5)


def test_job_waits_for_a_machine_until_one_is_mended() -> None:
    pool = {"num_spares": 1, "replace_s": 5.0, "return_s": 200.0}
    found = course(costs(), strike(105, 0), strike(205, 1), **pool)
    # The spare takes 5 s. There is none for the second: the first machine is back at 305.
    assert found.seconds[Spent.WAITING] == pytest.approx(5 + 100 + 5)
    crashed = course(costs(), strike(105, 0, keeps_machines=True), num_spares=0)
    assert crashed.seconds[Spent.WAITING] == 0
    assert crashed.seconds[Spent.RECOVERING] == 30


@pytest.mark.parametrize(
    ("places", "redone_s"),
    [((0, 2), 5), ((0, 1), 105 - 40), ((3, 0), 105 - 40)],
    ids=["others keep copies", "neighbours", "neighbours on the ring"],
)
def test_loss_of_all_copies_goes_back_to_storage(places: tuple[int, ...], redone_s: float) -> None:
    stored = StoredStates(interval=40.0, lag=30.0, state_s=100.0)
    # That of 80 is not written yet.
    found = course(costs(nodes_lost=1, stored=stored), strike(105, *places))
    assert found.seconds[Spent.REDONE] == pytest.approx(redone_s)
    assert found.num_fallbacks == (redone_s > 5)
    assert found.seconds[Spent.RECOVERING] == 30 + 100 * (redone_s > 5)


def test_recovery_makes_new_copies_before_the_next_failure() -> None:
    # Neighbours, and each while the other has copies: no state is lost, unless the second comes too early.
    found = course(costs(nodes_lost=1), strike(105, 0), strike(136, 1))
    assert found.num_fallbacks == 0
    early = course(costs(nodes_lost=1), strike(105, 0), strike(134, 1), strike(150, 3))
    assert early.num_fallbacks == 1
    assert early.seconds[Spent.REDONE] == pytest.approx(105)  # a third failure finds no other state


def test_loss_of_all_copies_without_storage_begins_at_the_start() -> None:
    found = course(costs(nodes_lost=0), strike(105, 0))
    assert found.seconds[Spent.REDONE] == pytest.approx(105)


def test_tokens_are_lost_once_for_each_state_that_is_recovered() -> None:
    lossy = costs(lost_token_share=0.4)
    twice_the_same = (strike(105, 0), strike(138, 1))
    assert course(lossy, *twice_the_same).lost_iterations == pytest.approx(0.4 * 5)
    assert course(lossy, strike(105, 0), strike(205, 1)).lost_iterations == pytest.approx(4)


def test_trace_decides_who_is_there() -> None:
    changes = (
        Change(time_s=10, added=("a", "b")),
        Change(time_s=20, added=("c", "d", "e")),
        Change(time_s=125, removed=("a", "e")),
        Change(time_s=225, added=("f",)),
    )
    found = course(costs(), *changes, are_there=False)
    assert tuple(found.spans) == (
        (0, 20, Spent.WAITING),
        (20, 125, Spent.PRODUCTIVE),
        (125, 225, Spent.WAITING),
        (225, 255, Spent.RECOVERING),
        (255, 260, Spent.REDONE),
        (260, 1000, Spent.PRODUCTIVE),
    )


@given(
    times=st.lists(st.floats(0, 900), max_size=30),
    places=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    interval=st.floats(1, 200),
    window=st.integers(1, 5),
    spares=st.integers(0, 4),
)
def test_all_of_the_time_is_accounted_for(
    times: list[float], places: list[int], interval: float, window: int, spares: int
) -> None:
    changes = [strike(time, place) for time, place in zip(sorted(times), places, strict=False)]
    found = costs(blocked_s=0.1, interval=interval + window, window=window, nodes_lost=1)
    done = course(found, *changes, num_spares=spares, return_s=100.0, replace_s=3.0)
    assert sum(done.seconds.values()) == pytest.approx(1000)
    assert all(seconds >= 0 for seconds in done.seconds.values())
    assert done.spans[0][0] == 0 and done.spans[-1][1] == pytest.approx(1000)
    for before, after in zip(done.spans, done.spans[1:], strict=False):
        assert before[1] == after[0]


@pytest.mark.parametrize("num_nodes", [16, 16_384])
def test_work_of_a_course_is_that_of_its_failures_and_not_of_its_nodes(
    num_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[float] = []

    def advance(run: course_module.RunCourse, until_s: float) -> None:
        steps.append(until_s)
        original(run, until_s)

    original = course_module.RunCourse.advance
    monkeypatch.setattr(course_module.RunCourse, "advance", advance)
    pool = MachinePool(num_nodes=num_nodes, num_spares=5, return_s=3600.0, replace_s=10.0)
    drawn = Failures(mtbf_s=600.0).draw(num_nodes, Random(1))
    found = run_course(costs(), RecoveryKind.RESTART, pool, drawn, 12 * 3600.0)
    assert 40 < found.num_failures < 110
    assert len(steps) < 10 * found.num_failures
