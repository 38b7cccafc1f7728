"""Recoveries read from event logs: wrong ones are noticed, and phases add up to the time that was lost."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.recoveries import PHASES, Answer, Expected, check_answers, read_recoveries

GLOBAL = Expected(answer=Answer.RESTART, killed=1, kills=[3], num_replays=2)
LOCAL = replace(GLOBAL, is_local=True)
KILLED_AT, FIRST_NEW = 100.0, 112.5
OWN = {"start": 1, "begun": 108.0, "fetch_s": 0.25, "replays_s": [1.0, 0.5]}
FASTER = {**OWN, "fetch_s": 0.5, "replays_s": [1.0, 0.25]}
IDLE = {**OWN, "replays_s": []}
NOTES = [[IDLE], [OWN], [FASTER]]


def event(kind: str, time: float, incarnation: int, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, "incarnation": incarnation, **fields}


def recovery(expected: Expected, rank: int, phases_s: dict[str, float]) -> dict[str, Any]:
    replays = expected.replays_of(rank)
    return event(
        *("recovery", 111.5, 1),
        scope="local" if expected.is_local else "global",
        stages=[expected.killed] if expected.is_local else [],
        target_iteration=3,
        restored_iteration=3 - replays,
        replayed_iterations=replays,
        lost_tokens=0,
        lossy={},
        sources={"memory": 20},
        phases_s={"inventory": 0.5, "plan": 0.125, "restore": 0.75, **phases_s},
    )


def logs_of(expected: Expected) -> list[list[dict[str, Any]]]:
    """Return the events of three stages, the middle one of which is killed."""
    survivor = [
        event("breakpoint", 101.0, 0, seconds=0.5, problem=""),
        event("stopped", 101.5, 0),
    ]
    late = [event("breakpoint", 102.0, 0, seconds=0.25, problem=""), event("stopped", 102.5, 0)]
    after = [
        event("iteration", FIRST_NEW, 1),
        event("iteration", 113.0, 1),
        event("state_digest", 113.5, 1, sha256="a", sha256_all="b"),
    ]
    idle = {"wait": 1.0} if expected.is_local else {"replay": 1.0}
    own = {"wait": 0.0625, "replay": 1.5} if expected.is_local else {"replay": 1.5}
    begun = event("start", 90.0, 0, pid=1)
    again = event("start", 108.0, 1, pid=2)
    after.append(event("end", 114.0, 1, reason="finished"))
    return [
        [begun, *survivor, again, recovery(expected, 0, idle), *after],
        [
            begun,
            event("fault_injected", KILLED_AT, 0),
            again,
            recovery(expected, 1, own),
            *after,
        ],
        [begun, *late, again, recovery(expected, 2, idle), *after],
    ]


@pytest.mark.parametrize("expected", [LOCAL, GLOBAL])
def test_recoveries_that_are_what_they_must_be_pass(expected: Expected) -> None:
    check_answers(logs_of(expected), expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scope", "global"),
        ("stages", [0, 1]),
        ("target_iteration", 2),
        ("restored_iteration", 0),
        ("replayed_iterations", 3),
        ("lost_tokens", 64),
        ("sources", {"memory": 19, "storage": 1}),
    ],
)
def test_recovery_that_is_another_one_is_refused(name: str, value: Any) -> None:
    logs = logs_of(LOCAL)
    next(each for each in logs[2] if each["event"] == "recovery")[name] = value
    with pytest.raises(AssertionError, match="rank 2"):
        check_answers(logs, LOCAL)


def test_phases_of_a_local_recovery_are_as_counted_by_hand() -> None:
    (found,) = read_recoveries(logs_of(LOCAL), NOTES, 1)
    assert tuple(found.phases_s) == PHASES
    assert found.total_s == FIRST_NEW - KILLED_AT
    assert found.phases_s == {
        "detect": 1.75,
        "breakpoint": 0.25,
        "report": 0.5,
        "restart": 5.5,
        "inventory": 0.5,
        "plan": 0.125,
        "fetch": 0.25,
        "restore": 0.5,
        "set-up": 0.5625,
        "replay": 1.5,
        "wait": 0.0625,
        "resume": 1.0,
    }
    assert (found.replay_s, found.last_replay_s, found.wait_s) == (1.5, 0.5, 1.0)
