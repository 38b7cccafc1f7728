"""Answers to kills read from event logs: other answers are noticed, and moments are as counted by hand."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.recoveries import (
    REPAIR_PHASES,
    RESTART_PHASES,
    Answer,
    Efficiency,
    Expected,
    check_answers,
    efficiency_of,
    iteration_times,
    read_moments,
)

RESTART = Expected(answer=Answer.RESTART, killed=1, kills=[4, 10])
REPAIR = replace(RESTART, answer=Answer.REPAIR)
INPROCESS = replace(RESTART, answer=Answer.INPROCESS)
ALL = [RESTART, REPAIR, INPROCESS]
FIRST_PID = 1
KILLED_S = (100.0, 200.0)
SURVIVOR_S = {"notice": 0.125, "free": 0.25, "meet": 0.5, "swap": 0.125, "recover": 0.25}
REPLACEMENT_S = {"notice": 0.0, "build": 0.625, "meet": 0.0, "swap": 0.125, "recover": 0.5}


def event(kind: str, time: float, iteration: int = 0, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, "iteration": iteration, **fields}


def answer_to(expected: Expected, number: int, rank: int) -> list[dict[str, Any]]:
    """Return the events of a rank after a kill: state 3 is recovered, and iteration 3 runs again."""
    at, kill = KILLED_S[number], expected.kills[number]
    is_killed = rank == expected.killed
    is_new = expected.answer is Answer.RESTART or is_killed
    pid = FIRST_PID + 100 * (number + 1) if is_new else FIRST_PID
    phases_s = {"inventory": 0.25, "plan": 0.125, "restore": 0.125, "replay": 9.0}
    found = [
        # A rank may be late with the iteration before.
        event("iteration", at + 0.5, kill, iteration_s=1.0),
        event("stopped", at + 1.0 + rank, kill),
        event("start", at + 4.0 + rank / 2, kill - 1, pid=pid),
        event(
            *("recovery", at + 4.75, kill - 1),
            scope="global",
            lost_tokens=0,
            replayed_iterations=2,
            target_iteration=kill - 1,
            sources={"memory": 5},
            phases_s=phases_s,
        ),
        event("iteration", at + 7.0, kill, iteration_s=2.0 - rank),
        event("iteration", at + 8.0 + rank / 4, kill + 1, iteration_s=0.5),
        event("iteration", at + 9.0, kill + 2, iteration_s=0.5),
    ]
    if expected.answer is Answer.REPAIR:
        repair_s = {**(REPLACEMENT_S if is_killed else SURVIVOR_S), "catch_up": 2.0 + rank}
        given = {"dead_ranks": [expected.killed], "broken_iteration": kill, "phases_s": repair_s}
        found.append(event("repair", at + 9.5, kill + 1, **given))
    if is_killed or expected.answer is not Answer.RESTART:
        found.pop(1)
    return found[1:] if is_killed else found


def logs_of(expected: Expected) -> list[list[dict[str, Any]]]:
    """Return the events of two ranks, of which the second is killed twice."""
    logs = []
    for rank in range(2):
        log = [event("start", 90.0, pid=FIRST_PID)]
        for number, kill in enumerate(expected.kills):
            if rank == expected.killed:
                log.append(event("fault_injected", KILLED_S[number], kill))
            log += answer_to(expected, number, rank)
        logs.append([*log, event("end", 300.0, reason="finished")])
    return logs


@pytest.mark.parametrize("expected", ALL)
def test_answers_that_are_what_they_must_be_pass(expected: Expected) -> None:
    check_answers(logs_of(expected), expected)


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        ("recovery", "scope", "local", "scope': 'local'"),
        ("recovery", "lost_tokens", 64, "lost_tokens': 64"),
        ("recovery", "target_iteration", 0, "has recovered 0 after a kill in 4"),
        ("recovery", "target_iteration", 5, "has recovered 5 after a kill in 4"),
        ("recovery", "sources", {"storage": 1}, "from {'storage': 1}"),
        ("repair", "dead_ranks", [0], "the repairs are"),
        ("repair", "broken_iteration", 5, "the repairs are"),
        ("end", "reason", "exit flag", r"rank 1 has ended with \['exit flag'\]"),
    ],
)
def test_answer_that_is_not_as_claimed_is_refused(
    kind: str, field: str, value: Any, message: str
) -> None:
    logs = logs_of(REPAIR)
    next(each for each in logs[1] if each["event"] == kind)[field] = value
    with pytest.raises(AssertionError, match=message):
        check_answers(logs, REPAIR)


@pytest.mark.parametrize("expected", ALL)
def test_moments_of_each_kill_are_those_of_the_slowest_rank(expected: Expected) -> None:
    found = read_moments(logs_of(expected), expected, (102.0, 202.0))
    # The loop begins 7 - 1 s after the kill on rank 1; there iteration 5 ends after 8.25 s.
    assert [(each.loop_s, each.iteration_s) for each in found] == [(6.0, 8.25)] * 2
    assert [each.num_redone for each in found] == [1 + 2] * 2


def test_phases_of_a_restart_are_as_counted_by_hand() -> None:
    (found, _) = read_moments(logs_of(RESTART), RESTART)
    assert tuple(found.phases_s) == RESTART_PHASES
    assert found.phases_s == {
        "end": 1.0,
        "start": 3.0,
        "recover": 0.5,
        "enter": 1.5,
        "iterate": 2.25,
    }
    assert sum(found.phases_s.values()) == found.iteration_s


def test_phases_of_a_repair_are_those_of_survivors_and_then_of_the_replacement() -> None:
    (found, _) = read_moments(logs_of(REPAIR), REPAIR)
    assert tuple(found.phases_s) == REPAIR_PHASES
    assert found.phases_s == {
        "notice": 0.125,
        "free": 0.25,
        "build": 0.625,
        "meet": 0.0,
        "swap": 0.125,
        "recover": 0.5,
        "catch_up": 3.0,
    }


def test_times_of_iterations_leave_recoveries_out() -> None:
    log = [
        event("start", 0.0),
        event("iteration", 1.0, 1, iteration_s=1.0),
        event("snapshot", 1.25),
        event("iteration", 1.5, 2, iteration_s=0.5),
        event("start", 7.0),
        event("iteration", 9.0, 2, iteration_s=2.0),
        event("iteration", 9.75, 3, iteration_s=0.5),
    ]
    assert iteration_times(log) == [0.5, 0.75]


def test_useful_time_is_that_of_all_iterations_once_at_the_median() -> None:
    log = [
        event("iteration", 12.0, 1, iteration_s=2.0),
        event("iteration", 13.0, 2, iteration_s=1.0),
        event("start", 25.0),
        event("iteration", 28.0, 2, iteration_s=3.0),
        event("iteration", 29.0, 3, iteration_s=1.0),
        event("iteration", 30.0, 4, iteration_s=1.0),
    ]
    found = efficiency_of(log)
    assert found == Efficiency(num_iterations=4, wall_s=20.0, iteration_s=1.0)
    assert found.ettr == 0.2
