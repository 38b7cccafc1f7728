"""Profile of a job with failures, read from its event logs: what the simulation takes, and what it must find.

Only numbers of the logs go in: moe_ft/planning/costs.py has the formulas that this leaves out. An iteration
counts from the end of the one before. Of the first iterations of new processes, which are slower, the excess
belongs to the recovery before them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from benchmarks.recoveries import Event, Log, events_of
from moe_ft.planning.costs import Costs, RecoveryCosts, RecoveryKind
from moe_ft.planning.time_shares import Spent, TimeShares

WARM_ITERATIONS = 3  # of each start
_STATE_PHASES = ("inventory", "plan", "restore")


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A failure and its recovery, on the slowest rank.

    Attributes:
        time_s: since the measurement began.
        processes_s: until all processes run and have met, with the excess of their first iterations.
        state_s: until state is read and put back.
        replay_s, num_replayed: iterations that run again before the loop does.
        num_redone: those that the loop runs again.
        lost_tokens: whose training is lost.
    """

    time_s: float
    processes_s: float
    state_s: float
    replay_s: float
    num_replayed: int
    num_redone: int
    lost_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A job as it went, from the end of a first iteration to that of the last.

    Attributes:
        step_s: of an iteration with checkpoints and without failures, on average.
        interval, window, lag: of its states, as `Costs` has them, on average.
        num_iterations: that it has trained, each once.
    """

    wall_s: float
    num_iterations: int
    step_s: float
    interval: float
    window: int
    lag: float
    failures: tuple[Failure, ...]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> "Profile":
        """Return a profile from what `as_object` made of it."""
        failures = tuple(Failure(**each) for each in value["failures"])
        return cls(**{**value, "failures": failures})

    def as_object(self) -> dict[str, Any]:
        """Return the profile for a JSON file."""
        return asdict(self)

    def mean(self, name: str) -> float:
        """Return the mean of a number over the failures; 0 without any."""
        return fmean(getattr(each, name) for each in self.failures) if self.failures else 0.0

    @property
    def instants(self) -> list[float]:
        """Seconds at which failures strike if state is back after the mean time each time, then as measured.

        No failure of the job has struck a recovery, and none of the simulated ones may.
        """
        mean_s = self.mean("processes_s") + self.mean("state_s")
        found: list[float] = []
        resumed_s = measured_s = 0.0
        for each in self.failures:
            found.append(resumed_s + each.time_s - measured_s)
            resumed_s = found[-1] + mean_s
            measured_s = each.time_s + each.processes_s + each.state_s
        return found

    def costs(self, name: str, kind: RecoveryKind, iteration_s: float, replicas: int) -> Costs:
        """Return the costs that the simulation takes.

        Args:
            iteration_s: without fault tolerance; the rest of an iteration counts as blocked.
            replicas: nodes that keep a copy; 0 if states are on storage.
        """
        iteration_s = min(iteration_s, self.step_s)
        num_replayed = sum(each.num_replayed for each in self.failures)
        again_s = sum(each.replay_s for each in self.failures) / num_replayed if num_replayed else 0
        is_local = kind is RecoveryKind.LOCAL
        recovery = RecoveryCosts(
            processes_s=self.mean("processes_s"),
            state_s=self.mean("state_s"),
            replay_s=(self.window - 1) * again_s,
            redo_share=again_s / self.step_s if is_local and again_s else 1.0,
        )
        return Costs(
            strategy=name,
            iteration_s=iteration_s,
            blocked_s=self.step_s - iteration_s,
            interval=self.interval,
            window=self.window,
            lag=self.lag,
            snapshot_bytes=0,
            peer_bytes=0,
            storage_bytes=0,
            host_bytes=0,
            lost_token_share=0,
            recoveries={kind: recovery},
            nodes_lost=replicas or None,
        )

    def shares(self, iteration_s: float) -> TimeShares:
        """Return what the time went into; what is left after all that was measured ran again."""
        iteration_s = min(iteration_s, self.step_s)
        seconds = {
            Spent.PRODUCTIVE: self.num_iterations * iteration_s,
            Spent.BLOCKED: self.num_iterations * (self.step_s - iteration_s),
            Spent.RECOVERING: sum(each.processes_s + each.state_s for each in self.failures),
        }
        return TimeShares.of({**seconds, Spent.REDONE: self.wall_s - sum(seconds.values())})


def iteration_s_of(logs: Sequence[Log]) -> float:
    """Return the mean time of an iteration without those of `WARM_ITERATIONS`."""
    return fmean(elapsed_s for _, elapsed_s in _steady(logs[-1]))


def read_profile(logs: Sequence[Log]) -> Profile:
    """Read the profile of a job that has come to its end.

    Args:
        logs: ``[rank]`` all events. Iterations are those of the last rank, as in `moe_ft report`.

    Raises:
        AssertionError: if it has trained an iteration twice without a failure, or left one out.
    """
    course = logs[-1]
    first = list(events_of(course, "iteration"))[WARM_ITERATIONS - 1]
    last = list(events_of(course, "iteration"))[-1]
    step_s = iteration_s_of(logs)
    faults = sorted(
        (each["time"], each["iteration"])
        for log in logs
        for each in events_of(log, "fault_injected")
    )
    ends = [time_s for time_s, _ in faults[1:]] + [float("inf")]
    failures = tuple(
        _failure(logs, time_s, until_s, reached, first["time"], step_s)
        for (time_s, reached), until_s in zip(faults, ends, strict=True)
    )
    interval, window, lag = _states(logs, step_s)
    return Profile(
        wall_s=last["time"] - first["time"],
        num_iterations=last["iteration"] - first["iteration"],
        step_s=step_s,
        interval=interval,
        window=window,
        lag=lag,
        failures=failures,
    )


def _steady(course: Log) -> Iterator[tuple[Event, float]]:
    """Yield iterations that follow another of the same start, but for the first ones, and their seconds."""
    steps = [each for each in course if each["event"] in ("start", "iteration")]
    num_since = 0
    for before, after in pairwise(steps):
        num_since = 0 if after["event"] == "start" else num_since + 1
        if num_since > WARM_ITERATIONS and before["event"] == "iteration":
            yield after, after["time"] - before["time"]


def _failure(
    logs: Sequence[Log], time_s: float, until_s: float, reached: int, start_s: float, step_s: float
) -> Failure:
    """Return a failure from what each rank has logged between it and the next one."""
    parts = [[each for each in log if time_s < each["time"] <= until_s] for log in logs]
    recoveries = [next(events_of(part, "recovery")) for part in parts]
    # A rank may write of the iteration before only after the failure.
    begun = [next(events_of(part, "start"))["time"] for part in parts]
    iterations = [
        [each for each in events_of(part, "iteration") if each["time"] > begun_s]
        for part, begun_s in zip(parts, begun, strict=True)
    ]
    loop_s = max(each[0]["time"] - each[0]["iteration_s"] for each in iterations)
    state_s, replay_s = (
        max(sum(each["phases_s"].get(name, 0.0) for name in names) for each in recoveries)
        for names in (_STATE_PHASES, ("replay",))
    )
    course = iterations[-1]
    warm = course[:WARM_ITERATIONS]
    excess_s = warm[-1]["time"] - loop_s - len(warm) * step_s
    return Failure(
        time_s=time_s - start_s,
        processes_s=loop_s - time_s - state_s - replay_s + excess_s,
        state_s=state_s,
        replay_s=replay_s,
        num_replayed=max(each["replayed_iterations"] for each in recoveries),
        num_redone=sum(each["iteration"] <= reached for each in course),
        lost_tokens=max(each["lost_tokens"] for each in recoveries),
    )


def _states(logs: Sequence[Log], step_s: float) -> tuple[float, int, float]:
    """Return the iterations between complete states, the window, and the lag, as they were."""
    has_replicas = any(True for log in logs for _ in events_of(log, "replicate"))
    windows = [each for log in logs for each in events_of(log, "window")]
    window = max((each["length"] for each in windows), default=1)
    lasts = {_key(each) for each in windows}
    ended = {_key(each): each["time"] for each in events_of(logs[-1], "iteration")}
    complete: dict[_Key, list[float]] = {}
    # Rank 0 writes the manifest of a checkpoint last.
    for log in logs if has_replicas else logs[:1]:
        for key, lag_s in _sent(log) if has_replicas else _stored(log, ended):
            if not windows or key in lasts:  # a window is complete with its last snapshot
                complete.setdefault(key, []).append(lag_s)
    found = {key: max(lags_s) for key, lags_s in complete.items() if key in ended}
    distances = [
        after - before
        for (start, before), (other, after) in pairwise(sorted(found))
        if start == other
    ]
    return fmean(distances), window, fmean(found.values()) / step_s


_Key = tuple[int, int]  # incarnation and iteration


def _key(event: Event) -> _Key:
    return event["incarnation"], event["iteration"]


def _sent(log: Log) -> Iterator[tuple[_Key, float]]:
    """Yield the seconds from the end of each iteration until peers have its state.

    Events are written at the end of an iteration, and have the seconds that passed before.
    """
    committed_s = {_key(each): each["seconds"] for each in events_of(log, "snapshot")}
    for each in events_of(log, "replicate"):
        if _key(each) in committed_s:
            yield _key(each), committed_s[_key(each)] + each["seconds"]


def _stored(log: Log, ended: Mapping[_Key, float]) -> Iterator[tuple[_Key, float]]:
    """Yield the seconds from the end of each iteration until its state is on storage.

    A write begins at the end of an iteration: at the latest that is early enough for its event.
    """
    for each in events_of(log, "persist"):
        if (begun_s := ended.get(_key(each))) is None:
            continue
        starts_s = [
            time_s
            for (incarnation, _), time_s in ended.items()
            if incarnation == each["incarnation"]
            and begun_s <= time_s <= each["time"] - each["seconds"]
        ]
        yield _key(each), max(starts_s, default=begun_s) + each["seconds"] - begun_s
