"""Recoveries of a job, read from its event logs: checked to be what they claim, and divided into phases.

"The loop" is where the first iteration after a recovery begins, "iteration" where the one that was broken off
has ended for the first time, each on the slowest rank. Seconds count from the kill. Phases of a restart:

    end      until the last survivor has said why it ends; of a wrapper in the process, until the last rank
             has called its function again
    start    processes, imports, model and optimizer
    recover  looking for state, choosing, reading and putting it back, on the rank that was killed
    enter    until the loop: replays, data iterators
    iterate  until the iteration

Those of a repair are of the event "repair": "notice" and "free" on the slowest survivor, and at the same time
"build" on the replacement; the others on the replacement. A restart after breakpoints is divided further, on
the rank that was killed; phases before its new process are of the survivors, the last of which counts:

    detect      until a survivor begins to end
    breakpoint  until it has written its state
    report      until it has said why it ends
    restart     until the new process begins to recover: processes, imports, model and optimizer
    inventory   looking for state
    plan        choosing the states
    fetch       reading and verifying them, with the boundary logs
    restore     agreeing and putting them back
    set-up      the rest until the loop runs: meeting, reserving memory, data iterators
    replay      running iterations again
    wait        for the stages that replay longer
    resume      the first new iteration
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any

RESTART_PHASES = ("end", "start", "recover", "enter", "iterate")
REPAIR_PHASES = ("notice", "free", "build", "meet", "swap", "recover", "catch_up")
PHASES = (
    *("detect", "breakpoint", "report", "restart", "inventory", "plan", "fetch", "restore"),
    *("set-up", "replay", "wait", "resume"),
)
OF_SURVIVORS = ("notice", "free")
_RECOVERING = ("inventory", "plan", "restore")
_TIMED = (*_RECOVERING, "replay", "wait")  # by the event "recovery"

Event = Mapping[str, Any]
Log = Sequence[Event]  # all events of a rank, in their order


def events_of(log: Log, kind: str) -> Iterator[Event]:
    """Yield the events of a kind."""
    return (each for each in log if each["event"] == kind)


def check_not_degraded(logs: Sequence[Log]) -> None:
    """Check that every background part has worked on every rank.

    Raises:
        AssertionError: if one has not.
    """
    for rank, log in enumerate(logs):
        degraded = next(events_of(log, "degraded"), None)
        assert degraded is None, f"rank {rank}: {degraded}"


def digests_of(logs: Sequence[Log]) -> list[tuple[str, str]]:
    """Return ``[rank]`` the digests of the last state.

    Raises:
        AssertionError: if a rank has written none.
    """
    found = [[*events_of(log, "state_digest")] for log in logs]
    for rank, own in enumerate(found):
        assert own, f"rank {rank} has written no digest"
    return [(own[-1]["sha256"], own[-1]["sha256_all"]) for own in found]


class Answer(StrEnum):
    """Answer to the death of a rank."""

    RESTART = "restart"  # all processes end, and start again
    REPAIR = "repair"  # the others stay in their iteration
    INPROCESS = "in process"  # the others call their function again


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Claim on every recovery of a job.

    Attributes:
        kills: ``[kill]`` the iteration that ran.
        killed: the rank, None if it was not the same each time.
        is_local: whether the stages of the others run no iterations again.
        num_replays: iterations that a rank runs again if it does, None if that differs.
        tier: where state is from.
        is_exact: whether no token may be lost.
    """

    answer: Answer
    kills: Sequence[int]
    killed: int | None = None
    is_local: bool = False
    num_replays: int | None = None
    tier: str = "memory"
    is_exact: bool = True

    def replays_of(self, rank: int) -> int:
        """Return the iterations that a rank runs again."""
        return (self.num_replays or 0) if rank == self.killed or not self.is_local else 0


def check_answers(logs: Sequence[Log], expected: Expected) -> None:
    """Check that every kill was answered as expected, and that the job has come to its end.

    Raises:
        AssertionError: if one was not, or something was degraded.
    """
    num_recovered = 0
    if expected.killed is not None:  # the loss of a node may degrade replicas
        check_not_degraded(logs)
    for rank, log in enumerate(logs):
        name = f"rank {rank}"
        ends = [each["reason"] for each in events_of(log, "end")]
        assert [each[:8] for each in ends] == ["finished"], f"{name} has ended with {ends}"
        if expected.killed is not None:
            starts = [each["pid"] for each in events_of(log, "start")]
            assert len(starts) == 1 + len(expected.kills), f"{name} has started {len(starts)} times"
            is_new = expected.answer is Answer.RESTART or rank == expected.killed
            for old, new in pairwise(starts):
                assert (old != new) is is_new, f"{name} was process {old} and then {new}"
        _check_repairs(name, list(events_of(log, "repair")), expected)
        recoveries = list(events_of(log, "recovery"))
        assert len(recoveries) == len(expected.kills), (
            f"{name} has recovered {len(recoveries)} times"
        )
        for each, kill in zip(recoveries, expected.kills, strict=True):
            _check_recovery(name, rank, each, kill, expected)
            num_recovered += expected.tier in each["sources"]
    assert num_recovered >= len(expected.kills), f"{num_recovered} recoveries from {expected.tier}"


def _check_repairs(name: str, repairs: Sequence[Event], expected: Expected) -> None:
    kills = expected.kills if expected.answer is Answer.REPAIR else ()
    given = [each["broken_iteration"] for each in repairs]
    dead = [each["dead_ranks"] for each in repairs]
    assert given == [*kills], f"{name}: the repairs are of {given}, not {[*kills]}"
    if expected.killed is not None:
        assert dead == [[expected.killed]] * len(kills), f"{name}: the repairs are of ranks {dead}"


def _check_recovery(name: str, rank: int, each: Event, kill: int, expected: Expected) -> None:
    claimed: dict[str, Any] = {"scope": "local" if expected.is_local else "global"}
    if expected.is_exact:
        claimed["lost_tokens"] = 0
    if expected.num_replays is not None:
        replays = expected.replays_of(rank)
        claimed |= {
            "stages": [expected.killed] if expected.is_local else [],
            "target_iteration": kill,
            "restored_iteration": kill - replays,
            "replayed_iterations": replays,
            "lossy": {},
        }
    given = {key: each[key] for key in claimed}
    assert given == claimed, f"{name}: the recovery is {given}, not {claimed}"
    target = each["target_iteration"]
    assert 0 < target <= kill, f"{name} has recovered {target} after a kill in {kill}"
    if rank == expected.killed or expected.num_replays is not None:
        assert set(each["sources"]) == {expected.tier}, f"{name}: from {each['sources']}"


def parts_of(logs: Sequence[Log], killed: int) -> list[tuple[float, list[Log]]]:
    """Return ``[kill]`` its time, and ``[rank]`` what each has logged between it and the next one."""
    kills_s = [each["time"] for each in events_of(logs[killed], "fault_injected")]
    ends_s = [*kills_s[1:], float("inf")]
    return [
        (killed_s, [[each for each in log if killed_s < each["time"] <= end_s] for log in logs])
        for killed_s, end_s in zip(kills_s, ends_s[: len(kills_s)], strict=True)
    ]


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
    assert expected.killed is not None
    parts = parts_of(logs, expected.killed)
    assert len(parts) == len(expected.kills), f"{len(parts)} faults were injected"
    return [
        _moments(part, killed_s, kill, expected, called_s[number] if called_s else None)
        for number, ((killed_s, part), kill) in enumerate(zip(parts, expected.kills, strict=True))
    ]


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
    assert expected.killed is not None
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
        if name in OF_SURVIVORS
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Seconds of one recovery.

    Attributes:
        replay_s: of the rank that replays longest.
        last_replay_s: the last of the iterations that are run again, on the rank where it takes longest. The
            first ones of a process are slower.
        wait_s: of the rank that waits longest for it.
        phases_s: by name, of `PHASES`. They add up to the time from the kill to the first new iteration.
    """

    replay_s: float
    last_replay_s: float
    wait_s: float
    phases_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """From the kill until the first new iteration has ended."""
        return sum(self.phases_s.values())


def read_recoveries(
    logs: Sequence[Log], notes: Sequence[Sequence[Event]], killed: int
) -> list[Recovery]:
    """Return the recoveries of a job whose ranks leave breakpoints.

    Args:
        logs: ``[rank]`` all events.
        notes: ``[rank][recovery]``, of benchmarks/slow_stages.py.
        killed: the rank that was killed in every start but the last.
    """
    found = []
    parts = zip(parts_of(logs, killed), zip(*notes, strict=True), strict=True)
    for number, ((killed_s, part), noted) in enumerate(parts, 1):
        timed = [_one(log, "recovery")["phases_s"] for log in part]
        assert {each["start"] for each in noted} == {number}
        found.append(
            Recovery(
                replay_s=max(each.get("replay", 0.0) for each in timed),
                last_replay_s=max(each["replays_s"][-1] for each in noted if each["replays_s"]),
                wait_s=max(each.get("wait", 0.0) for each in timed),
                phases_s=dict(_phases(part, noted[killed], killed, killed_s)),
            )
        )
    return found


def _phases(
    parts: Sequence[Log], notes: Event, killed: int, killed_s: float
) -> Iterator[tuple[str, float]]:
    """Yield the phases of a recovery, in their order."""
    own = parts[killed]
    survivors = [part for rank, part in enumerate(parts) if rank != killed]
    left = [_one(part, "breakpoint") for part in survivors]
    assert not any(each["problem"] for each in left), left
    reported = max(_one(part, "stopped")["time"] for part in survivors)
    written = max(each["time"] for each in left)
    detected = max(each["time"] - each["seconds"] for each in left)
    recovery = _one(own, "recovery")
    timed = {name: recovery["phases_s"].get(name, 0.0) for name in _TIMED}
    resumed = next(each for each in events_of(own, "iteration") if each["time"] > recovery["time"])
    yield "detect", detected - killed_s
    yield "breakpoint", written - detected
    yield "report", reported - written
    yield "restart", notes["begun"] - reported
    yield "inventory", timed["inventory"]
    yield "plan", timed["plan"]
    yield "fetch", notes["fetch_s"]
    yield "restore", timed["restore"] - notes["fetch_s"]
    yield "set-up", recovery["time"] - notes["begun"] - sum(timed.values())
    yield "replay", timed["replay"]
    yield "wait", timed["wait"]
    yield "resume", resumed["time"] - recovery["time"]


def _one(log: Log, kind: str) -> Event:
    """Return the only event of a kind."""
    found = list(events_of(log, kind))
    assert len(found) == 1, f"{len(found)} events {kind!r} between two kills, not one"
    return found[0]
