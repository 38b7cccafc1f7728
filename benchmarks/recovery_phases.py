"""Recoveries of a job, read from its event log: checked to be what they claim, and divided into phases.

The phases follow each other on the rank that was killed. Those before its new process are of the survivors,
the last of which counts:

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
from typing import Any

from benchmarks.event_logs import Event, Log, check_not_degraded, events_of

PHASES = (
    *("detect", "breakpoint", "report", "restart", "inventory", "plan", "fetch", "restore"),
    *("set-up", "replay", "wait", "resume"),
)
_TIMED = ("inventory", "plan", "restore", "replay", "wait")  # by the event "recovery"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Claim on every recovery of a job.

    Attributes:
        is_local: whether only the stage of the rank that was killed runs iterations again.
        killed: the rank; each stage has one, so it is the stage too.
        kills: ``[recovery]`` the iteration in which it was killed, which is the target.
        num_replays: iterations that a rank runs again, if it does.
    """

    is_local: bool
    killed: int
    kills: Sequence[int]
    num_replays: int

    def replays_of(self, rank: int) -> int:
        """Return the iterations that a rank runs again."""
        return self.num_replays if rank == self.killed or not self.is_local else 0


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


def check_recoveries(logs: Sequence[Log], expected: Expected) -> None:
    """Check that every start but the first has recovered as expected.

    Args:
        logs: ``[rank]`` all events.

    Raises:
        AssertionError: if a recovery is another one, or something was degraded.
    """
    check_not_degraded(logs)
    for rank, log in enumerate(logs):
        found = list(events_of(log, "recovery"))
        assert len(found) == len(expected.kills), f"rank {rank} has recovered {len(found)} times"
        for each, kill in zip(found, expected.kills, strict=True):
            claimed: dict[str, Any] = {
                "scope": "local" if expected.is_local else "global",
                "stages": [expected.killed] if expected.is_local else [],
                "target_iteration": kill,
                "restored_iteration": kill - expected.replays_of(rank),
                "replayed_iterations": expected.replays_of(rank),
                "lost_tokens": 0,
                "lossy": {},
            }
            given = {name: each[name] for name in claimed}
            assert given == claimed, f"rank {rank}: the recovery is {given}, not {claimed}"
            assert set(each["sources"]) == {"memory"}, f"rank {rank}: from {each['sources']}"


def read_recoveries(
    logs: Sequence[Log], notes: Sequence[Sequence[Event]], killed: int
) -> list[Recovery]:
    """Return the recoveries of a job.

    Args:
        logs: ``[rank]`` all events.
        notes: ``[rank][recovery]``, of benchmarks/slow_stages.py.
        killed: the rank that was killed in every start but the last.
    """
    found = []
    for number, noted in enumerate(zip(*notes, strict=True), 1):
        timed = [_event(log, "recovery", number)["phases_s"] for log in logs]
        assert {each["start"] for each in noted} == {number}
        found.append(
            Recovery(
                replay_s=max(each.get("replay", 0.0) for each in timed),
                last_replay_s=max(each["replays_s"][-1] for each in noted if each["replays_s"]),
                wait_s=max(each.get("wait", 0.0) for each in timed),
                phases_s=dict(_phases(logs, noted[killed], killed, number)),
            )
        )
    return found


def _event(log: Log, kind: str, incarnation: int) -> Event:
    """Return the first event of a kind in a start; fail if there is none."""
    found = (each for each in events_of(log, kind) if each["incarnation"] == incarnation)
    first = next(found, None)
    assert first is not None, f"no event {kind!r} in start {incarnation}"
    return first


def _phases(
    logs: Sequence[Log], notes: Event, killed: int, number: int
) -> Iterator[tuple[str, float]]:
    """Yield the phases of the recovery in a start, in their order."""
    own = logs[killed]
    survivors = [log for rank, log in enumerate(logs) if rank != killed]
    left = [_event(log, "breakpoint", number - 1) for log in survivors]
    assert not any(each["problem"] for each in left), left
    reported = max(_event(log, "stopped", number - 1)["time"] for log in survivors)
    written = max(each["time"] for each in left)
    detected = max(each["time"] - each["seconds"] for each in left)
    recovery = _event(own, "recovery", number)
    timed = {name: recovery["phases_s"].get(name, 0.0) for name in _TIMED}
    fetch_s = notes["fetch_s"]
    yield "detect", detected - _event(own, "fault_injected", number - 1)["time"]
    yield "breakpoint", written - detected
    yield "report", reported - written
    yield "restart", notes["begun"] - reported
    yield "inventory", timed["inventory"]
    yield "plan", timed["plan"]
    yield "fetch", fetch_s
    yield "restore", timed["restore"] - fetch_s
    yield "set-up", recovery["time"] - notes["begun"] - sum(timed.values())
    yield "replay", timed["replay"]
    yield "wait", timed["wait"]
    yield "resume", _event(own, "iteration", number)["time"] - recovery["time"]
