"""Failures of a job's machines: drawn at random, or as a recorded trace has them.

Pure: who calls this reads the files. course.py says what a failure does to a run.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from random import Random

from moe_ft.errors import ConfigError

Machine = int | str


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that happens to machines at an instant.

    Attributes:
        time_s: since the job began.
        struck: places in the job (0 to the number of nodes) whose processes die.
        keeps_machines: whether the machines there go on: only the processes died.
        removed, added: machines by name, wherever they are.
    """

    time_s: float
    struck: tuple[int, ...] = ()
    keeps_machines: bool = False
    removed: tuple[Machine, ...] = ()
    added: tuple[Machine, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Failures that come at random.

    Attributes:
        mtbf_s: mean time between failures of the job, whichever node they strike.
        weibull_shape: of the time from one to the next; 1 for Poisson. Below 1 they come in bursts: 0.7 to
            0.8 in the logs of clusters (Schroeder and Gibson, "A large-scale study of failures", 2006).
        crash_share: of them, failures of processes, whose machines go on.
        rack_nodes: neighbours that share a rack.
        rack_share: of the failures of machines, those that strike the whole rack.
    """

    mtbf_s: float
    weibull_shape: float = 1.0
    crash_share: float = 0.0
    rack_nodes: int = 1
    rack_share: float = 0.0

    def draw(self, num_nodes: int, random: Random) -> Iterator[Change]:
        """Yield failures without an end. They are those of a cluster that has run for long."""
        shape = self.weibull_shape
        scale = self.mtbf_s / math.gamma(1 + 1 / shape)
        # The rest of an interval that began before the job did: longer ones are met more often.
        time_s = scale * random.random() * random.gammavariate(1 + 1 / shape, 1) ** (1 / shape)
        while True:
            place, is_crash = random.randrange(num_nodes), random.random() < self.crash_share
            struck: Sequence[int] = (place,)
            if random.random() < self.rack_share and not is_crash:
                first = place - place % self.rack_nodes
                struck = range(first, min(first + self.rack_nodes, num_nodes))
            yield Change(time_s=time_s, struck=tuple(struck), keeps_machines=is_crash)
            time_s += random.weibullvariate(scale, shape)


def read_trace(name: str, lines: Iterable[str], seed: int = 0) -> list[Change]:
    """Read a recorded trace of spot machines, of either format.

    ``MILLISECONDS,add|remove,MACHINE`` names machines (Amazon's P3 trace of Bamboo, Oobleck and Lazarus).
    ``DATE, TIME, NUMBER`` has the number of machines that are there (Google's traces of Bamboo); its lines
    need not be in order, of those with one time the last one counts, and who leaves is drawn.

    Args:
        name: of the file, for messages.

    Raises:
        ConfigError: if a line is malformed, or none is there.
    """
    changes: list[Change] = []
    counts: list[tuple[float, int]] = []
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.split(",")]
        try:
            match cells:
                case [""]:
                    continue
                case [time, "add", machine] if machine:
                    changes.append(Change(time_s=_count(time) / 1e3, added=(machine,)))
                case [time, "remove", machine] if machine:
                    changes.append(Change(time_s=_count(time) / 1e3, removed=(machine,)))
                case [date, time, count]:
                    when = datetime.fromisoformat(f"{date}T{time}+00:00").timestamp()
                    counts.append((when, _count(count, 10**6)))
                case _:
                    raise ValueError
        except ValueError:
            raise ConfigError(
                f"{name}, line {number}: {line.strip()!r} must be MILLISECONDS,add|remove,MACHINE or "
                "DATE, TIME, NUMBER, with at most a million machines. Correct the line, or leave it out."
            ) from None
    if bool(changes) == bool(counts):
        raise ConfigError(
            f"{name} must hold lines MILLISECONDS,add|remove,MACHINE, or lines DATE, TIME, NUMBER, of one of "
            f"the two formats; it has {len(changes)} and {len(counts)}. Give another file."
        )
    return _merged(changes or _changes_of(counts, Random(seed)))


def _count(text: str, most: int = 10**15) -> int:
    """Return a number of something; raise ValueError for what is none."""
    number = int(text)
    if not 0 <= number <= most:
        raise ValueError
    return number


def _changes_of(counts: Sequence[tuple[float, int]], random: Random) -> list[Change]:
    """Return who comes and goes, so that as many are there as were counted."""
    by_time = dict(
        sorted(counts, key=lambda each: each[0])
    )  # sorting keeps the order of equal times
    start, alive, num_seen = min(by_time), list[Machine](), 0
    changes = []
    for time, count in by_time.items():
        added = tuple(range(num_seen, num_seen + max(0, count - len(alive))))
        removed = tuple(random.sample(alive, max(0, len(alive) - count)))
        num_seen += len(added)
        alive = [each for each in (*alive, *added) if each not in removed]
        changes.append(Change(time_s=time - start, added=added, removed=removed))
    return changes


def _merged(changes: Sequence[Change]) -> list[Change]:
    """Return changes by time, those of one instant as one; who leaves and comes back at once has failed."""
    ordered = sorted(changes, key=attrgetter("time_s"))
    return [
        Change(
            time_s=time_s,
            removed=tuple(machine for each in same for machine in each.removed),
            added=tuple(machine for each in same for machine in each.added),
        )
        for time_s, group in groupby(ordered, attrgetter("time_s"))
        for same in [list(group)]
        if any(each.removed or each.added for each in same)
    ]


def mean_time_between(trace: Sequence[Change], horizon_s: float) -> float:
    """Return the mean time between the losses of machines that a trace has; infinite without any."""
    losses = sum(bool(each.removed) for each in trace if each.time_s <= horizon_s)
    return horizon_s / losses if losses else math.inf
