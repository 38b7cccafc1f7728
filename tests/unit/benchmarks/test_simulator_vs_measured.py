"""A profile is read from event logs, and the simulation finds what the job did."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.measured_profile import Profile, read_profile
from benchmarks.recoveries import Event, Log, check_answers
from benchmarks.simulator_vs_measured import (
    LEAST_DISTANCE,
    Row,
    compare,
    draw_failures,
    expected_of,
)
from moe_ft.planning.time_shares import Spent

GEMINI = Row(preset="gemini", recovery="keep")


def lines(rank: int, *, tier: str = "peer") -> Iterator[Event]:
    """Yield the events of a rank: iterations of 1 s, a failure at 10.4 s that brings 9 back, 14 at last."""

    def event(time_s: float, name: str, iteration: int, **values: Any) -> Event:
        start = int(time_s > 10.4)
        return {
            "time": time_s,
            "event": name,
            "iteration": iteration,
            "incarnation": start,
        } | values

    def iterations(first: int, ends_s: list[float], first_s: float = 1.0) -> Iterator[Event]:
        for iteration, end_s in enumerate(ends_s, first):
            seconds = first_s if iteration == first else 1.0
            yield event(end_s, "iteration", iteration, iteration_s=seconds)
            yield event(end_s + 0.3, "snapshot", iteration, seconds=0.25)
            yield event(end_s + 0.9, "replicate", iteration, seconds=0.25 + 0.25 * rank)

    yield event(0.0, "start", 0)
    yield from iterations(1, [float(each) for each in range(1, 11)])
    if rank == 1:
        yield event(10.4, "fault_injected", 10)
    phases_s = {"inventory": 0.1, "plan": 0.1, "restore": 0.3}
    recovered = {"phases_s": phases_s, "replayed_iterations": 0, "lost_tokens": 0}
    more = {"scope": "global", "target_iteration": 9, "sources": {tier: 3}}
    yield event(12.9, "recovery", 9, **recovered, **more)
    yield event(13.0, "start", 9)
    yield from iterations(10, [14.5, 15.5, 16.5, 17.5, 18.5], 1.5)
    yield event(19.0, "end", 14, reason="finished")


def logs(**values: Any) -> list[Log]:
    return [sorted(lines(rank, **values), key=lambda each: each["time"]) for rank in range(2)]


def test_profile_is_what_happened_on_the_slowest_rank() -> None:
    profile = read_profile(logs())
    assert (profile.wall_s, profile.num_iterations, profile.step_s) == (15.5, 11, 1.0)
    assert (profile.interval, profile.window) == (1.0, 1)
    assert profile.lag == pytest.approx(
        0.75
    )  # committed after 0.25 s, with its peer after 0.5 more
    (failure,) = profile.failures
    assert failure.time_s == pytest.approx(7.4)
    assert failure.state_s == pytest.approx(0.5)
    assert failure.processes_s == pytest.approx(
        13.0 - 10.4 - 0.5 + 0.5
    )  # the first iteration's excess
    assert (failure.num_redone, failure.num_replayed) == (1, 0)
    assert Profile.of(json.loads(json.dumps(profile.as_object()))) == profile


def test_simulation_of_a_profile_comes_as_far_as_the_job() -> None:
    found = compare(GEMINI, read_profile(logs()), iteration_s=0.9)
    assert found.measured.productive == pytest.approx(11 * 0.9 / 15.5)
    assert found.measured.blocked == pytest.approx(11 * 0.1 / 15.5)
    assert found.measured.redone == pytest.approx(1.4 / 15.5)  # iteration 10, and what 11 had done
    assert sum(found.measured[use] for use in Spent) == pytest.approx(1)
    for use in Spent:
        assert found.simulated[use] == pytest.approx(found.measured[use], abs=1e-6)


def test_failures_strike_as_long_after_a_recovery_as_they_did_also_where_that_took_longer() -> None:
    profile = read_profile(logs())
    (first,) = profile.failures
    slow = replace(first, processes_s=first.processes_s + 20.0)
    second_s = slow.time_s + slow.processes_s + slow.state_s + 6.0
    second = replace(first, time_s=second_s, processes_s=first.processes_s)
    several = replace(profile, failures=(slow, second), wall_s=profile.wall_s + 40.0)
    mean_s = several.mean("processes_s") + several.mean("state_s")
    assert several.instants == pytest.approx([slow.time_s, slow.time_s + mean_s + 6.0])
    compare(GEMINI, several, iteration_s=0.9)


def test_answers_that_are_not_those_of_a_row_are_noticed() -> None:
    failures = [(10, 1)]
    check_answers(logs(), expected_of(GEMINI, failures))
    for row, tier, message in (
        (GEMINI, "memory", "0 recoveries from peer"),
        (Row(preset="gemini", recovery="repair"), "peer", r"repairs are of \[\], not \[10\]"),
        (Row(preset="moevement", recovery="restart"), "storage", "0 recoveries from peer"),
    ):
        with pytest.raises(AssertionError, match=message):
            check_answers(logs(tier=tier), expected_of(row, failures))
    with pytest.raises(AssertionError, match="has recovered 1 times"):
        check_answers(logs(), expected_of(GEMINI, [*failures, (20, 1)]))


def test_failures_leave_room_for_each_recovery_and_are_the_same_for_all_rows() -> None:
    drawn = draw_failures(50, 24)
    assert drawn == draw_failures(50, 24)
    distances = [after - before for (before, _), (after, _) in zip(drawn, drawn[1:], strict=False)]
    assert min(distances) > LEAST_DISTANCE
    assert sum(distances) / len(distances) == pytest.approx(24.5, rel=0.2)
