"""Answers to kills, read from the event logs of a job: checked to be what they claim, divided into phases.

"The loop" is where the first iteration after a recovery begins, "iteration" where the one that was broken off
has ended for the first time, each on the slowest rank. Seconds count from the kill. Phases of a restart:

    end      until the last survivor has said why it ends; of a wrapper in the process, until the last rank
             has called its function again
    start    processes, imports, model and optimizer
    recover  looking for state, choosing, reading and putting it back, on the rank that was killed
    enter    until the loop: replays, data iterators
    iterate  until the iteration

Those of a repair are of the event "repair": "notice" and "free" on the slowest survivor, and at the same time
"build" on the replacement; the others on the replacement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median

from benchmarks.event_logs import Event, Log, check_not_degraded, events_of

RESTART_PHASES = ("end", "start", "recover", "enter", "iterate")
REPAIR_PHASES = ("notice", "free", "build", "meet", "swap", "recover", "catch_up")
_OF_SURVIVORS = ("notice", "free")
_RECOVERING = ("inventory", "plan", "restore")


class Answer(StrEnum):
    """Answer to the death of a rank."""

    RESTART = "restart"  # all processes end, and start again
    REPAIR = "repair"  # the others stay in their iteration
    INPROCESS = "in process"  # the others call their function again


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Claim on every answer of a job.

    Attributes:
        killed: the rank.
        kills: ``[kill]`` the iteration that ran.
        is_local: whether the stages of the others run no iterations again.
    """

    answer: Answer
    killed: int
    kills: Sequence[int]
    is_local: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Moments:
    """Seconds from one kill.

    Attributes:
        num_redone: finished iterations that the killed rank ran again.
        phases_s: by name, of `RESTART_PHASES` or `REPAIR_PHASES`.
    """

    loop_s: float
    iteration_s: float
    num_redone: int
    phases_s: Mapping[str, float]


def check_answers(logs: Sequence[Log], expected: Expected) -> None:
    """Check that every kill was answered as expected, and that the job has come to its end.

    Raises:
        AssertionError: if one was not, or something was degraded.
    """
    check_not_degraded(logs)
    for rank, log in enumerate(logs):
        name = f"rank {rank}"
        ends = [each["reason"] for each in events_of(log, "end")]
        assert ends == ["finished"], f"{name} has ended with {ends}"
        starts = [each["pid"] for each in events_of(log, "start")]
        assert len(starts) == 1 + len(expected.kills), f"{name} has started {len(starts)} times"
        is_new = expected.answer is Answer.RESTART or rank == expected.killed
        for old, new in pairwise(starts):
            assert (old != new) is is_new, f"{name} was process {old} and then {new}"
        _check_repairs(name, list(events_of(log, "repair")), expected)
        _check_recoveries(name, rank, list(events_of(log, "recovery")), expected)


def _check_repairs(name: str, repairs: Sequence[Event], expected: Expected) -> None:
    claimed = [
        {"dead_ranks": [expected.killed], "broken_iteration": kill} for kill in expected.kills
    ]
    if expected.answer is not Answer.REPAIR:
        claimed = []
    given = [{key: each[key] for key in ("dead_ranks", "broken_iteration")} for each in repairs]
    assert given == claimed, f"{name}: the repairs are {given}, not {claimed}"


def _check_recoveries(
    name: str, rank: int, recoveries: Sequence[Event], expected: Expected
) -> None:
    assert len(recoveries) == len(expected.kills), f"{name} has recovered {len(recoveries)} times"
    scope = "local" if expected.is_local else "global"
    for each, kill in zip(recoveries, expected.kills, strict=True):
        assert each["scope"] == scope, f"{name}: a recovery was {each['scope']}, not {scope}"
        assert each["lost_tokens"] == 0, f"{name} has lost {each['lost_tokens']} tokens"
        target = each["target_iteration"]
        assert 0 < target <= kill, f"{name} has recovered {target} after a kill in {kill}"
        if rank == expected.killed:
            assert set(each["sources"]) == {"memory"}, f"{name}: from {each['sources']}"


def read_moments(
    logs: Sequence[Log], expected: Expected, called_s: Sequence[float] = ()
) -> list[Moments]:
    """Return the seconds of each kill.

    Args:
        logs: ``[rank]`` all events.
        expected: what they were checked for.
        called_s: ``[kill]`` the time since 1970 when the last rank has called its function again; for
            answers in the process.
    """
    kills_s = [each["time"] for each in events_of(logs[expected.killed], "fault_injected")]
    assert len(kills_s) == len(expected.kills), f"{len(kills_s)} faults were injected"
    found = []
    for number, (killed_s, kill) in enumerate(zip(kills_s, expected.kills, strict=True)):
        until_s = kills_s[number + 1] if number + 1 < len(kills_s) else float("inf")
        parts = [[each for each in log if killed_s < each["time"] <= until_s] for log in logs]
        ended_s = called_s[number] if called_s else None
        found.append(_moments(parts, killed_s, kill, expected, ended_s))
    return found


def _moments(
    parts: Sequence[Log], killed_s: float, kill: int, expected: Expected, ended_s: float | None
) -> Moments:
    """Return the seconds of a kill from what each rank has logged between it and the next one."""
    # A rank may write of the iteration before only after the kill.
    iterations = [
        [
            each
            for each in events_of(part, "iteration")
            if each["time"] > _one(part, "start")["time"]
        ]
        for part in parts
    ]
    assert all(iterations), "a rank has finished no iteration after the kill"
    loop_s = max(each[0]["time"] - each[0]["iteration_s"] for each in iterations)
    first_new = [
        next((one for one in each if one["iteration"] > kill), None) for each in iterations
    ]
    assert None not in first_new, "a rank has not finished the iteration of the kill"
    iteration_s = max(each["time"] for each in first_new if each is not None)
    own = parts[expected.killed]
    redone = [each for each in iterations[expected.killed] if each["iteration"] <= kill]
    if expected.answer is Answer.REPAIR:
        phases_s = _repair_phases(parts, expected.killed)
    else:
        if ended_s is None:
            survivors = [part for rank, part in enumerate(parts) if rank != expected.killed]
            ended_s = max(_one(part, "stopped")["time"] for part in survivors)
        started_s = max(_one(part, "start")["time"] for part in parts)
        timed = _one(own, "recovery")["phases_s"]
        recover_s = sum(timed.get(name, 0.0) for name in _RECOVERING)
        phases_s = {
            "end": ended_s - killed_s,
            "start": started_s - recover_s - ended_s,
            "recover": recover_s,
            "enter": loop_s - started_s,
            "iterate": iteration_s - loop_s,
        }
    return Moments(
        loop_s=loop_s - killed_s,
        iteration_s=iteration_s - killed_s,
        num_redone=len(redone) + _one(own, "recovery")["replayed_iterations"],
        phases_s=phases_s,
    )


def _repair_phases(parts: Sequence[Log], killed: int) -> dict[str, float]:
    timed = [_one(part, "repair")["phases_s"] for part in parts]
    survivors = [each for rank, each in enumerate(timed) if rank != killed]
    return {
        name: max(each.get(name, 0.0) for each in survivors)
        if name in _OF_SURVIVORS
        else timed[killed].get(name, 0.0)
        for name in REPAIR_PHASES
    }


def iteration_times(log: Log) -> list[float]:
    """Return the seconds between the ends of iterations that follow each other without a recovery."""
    found = []
    for before, after in pairwise(each for each in log if each["event"] in ("iteration", "start")):
        if before["event"] == after["event"] == "iteration":
            found.append(after["time"] - before["time"])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Share of a job's time that was useful (ETTR).

    Attributes:
        wall_s: from the beginning of the first iteration to the end of the last.
        iteration_s: of the median iteration.
    """

    num_iterations: int
    wall_s: float
    iteration_s: float

    @property
    def ettr(self) -> float:
        """Time of all iterations, each once and as long as the median one, of the wall time."""
        return self.num_iterations * self.iteration_s / self.wall_s


def efficiency_of(log: Log) -> Efficiency:
    """Return the efficiency of a job whose iterations begin with the first, from the log of a rank."""
    iterations = list(events_of(log, "iteration"))
    first, last = iterations[0], iterations[-1]
    return Efficiency(
        num_iterations=last["iteration"],
        wall_s=last["time"] - first["time"] + first["iteration_s"],
        iteration_s=median(iteration_times(log)),
    )


def _one(log: Log, kind: str) -> Event:
    """Return the only event of a kind."""
    found = list(events_of(log, kind))
    assert len(found) == 1, f"{len(found)} events {kind!r} between two kills, not one"
    return found[0]
