"""Course of a job as one rank's events tell it: speed, losses, recoveries, repairs.

It takes the events one by one and keeps little of them. report_rank.py reads the file.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from moe_ft.event_lines import (
    AtRisk,
    Elastic,
    Iteration,
    Line,
    Recovery,
    Repair,
    Replicate,
    SkippedBatch,
    Start,
)

_NUM_AROUND_RECOVERY = 5
_NUM_KEPT = 50_000  # samples for a median, and losses for recoveries to go back to
_NUM_POINTS = 528  # of the curve of losses


def show(value: float | None, form: str = ".3f") -> str:
    """Return a number as text, a dash where the log does not say."""
    return "-" if value is None else format(value, form)


class Median:
    """Median of many numbers: of all, and beyond 50,000 of evenly chosen ones."""

    def __init__(self) -> None:
        self._kept, self._every, self._num = array("d"), 1, 0

    def add(self, value: float) -> None:
        """Take one more."""
        if self._num % self._every == 0:
            self._kept.append(value)
            if len(self._kept) > _NUM_KEPT:
                self._kept, self._every = self._kept[::2], 2 * self._every
        self._num += 1

    @property
    def value(self) -> float | None:
        """The median, None of nothing."""
        return median(self._kept) if self._kept else None


@dataclass(kw_only=True, slots=True)
class Point:
    """Losses of some consecutive iterations."""

    iteration: int
    total: float = 0.0
    num: int = 0
    low: float = float("inf")
    high: float = float("-inf")

    @property
    def mean(self) -> float:
        """Their mean."""
        return self.total / self.num


class Course:
    """Takes the events of the rank that has the losses."""

    def __init__(self, last_iteration: int) -> None:
        """Begin; the curve of losses is as fine as the number of iterations allows."""
        self.last_start: Start | None = None
        self.recoveries: list[Around] = []
        self.repairs: list[Repair] = []
        self.skipped: dict[str, str] = {}  # by iteration: what its batch has led to
        self.changes: list[Elastic] = []  # of the number of ranks
        self.points: dict[int, Point] = {}
        self._per_point = max(1, -(-last_iteration // _NUM_POINTS))
        self._open: list[Around] = []  # those that want more losses
        self._losses: dict[int, float] = {}  # the newest, as the last attempt had them
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._iteration_s, self._num_tokens = Median(), Median()
        self.state_bytes = self.gradient_bytes = 0  # to peers
        self._at_risk: dict[str, tuple[int, int]] = {}  # by target: tokens in all, and events
        self._is_steady = False  # the first iteration of a start pays for warming up
        self._takes: dict[type[Line], Callable[..., None]] = {
            Start: self._start,
            Iteration: self._iterate,
            Recovery: self._recover,
            Repair: self.repairs.append,
            SkippedBatch: self._skip,
            Elastic: self.changes.append,
            Replicate: self._replicate,
            AtRisk: self._risk,
        }

    def _skip(self, event: SkippedBatch) -> None:
        self.skipped[str(event.iteration)] = f"rank {event.failed_rank}: {event.what}"

    def take(self, event: Line) -> None:
        """Take the next event, of any kind."""
        if (take := self._takes.get(type(event))) is not None:
            take(event)

    @property
    def first_loss(self) -> float | None:
        """Loss of the first iteration, in its last attempt."""
        return None if self._first is None else self._first[1]

    @property
    def last_loss(self) -> float | None:
        """Loss of the last iteration, in its last attempt."""
        return None if self._last is None else self._last[1]

    @property
    def iteration_s(self) -> float | None:
        """Median of the seconds of an iteration."""
        return self._iteration_s.value

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole job in a second of training."""
        seconds, tokens = self._iteration_s.value, self._num_tokens.value
        return tokens / seconds if seconds and tokens else None

    @property
    def mean_tokens_at_risk(self) -> dict[str, float]:
        """Tokens that a failure would have lost, on average, by where copies are."""
        return {target: tokens / num for target, (tokens, num) in sorted(self._at_risk.items())}

    def _replicate(self, event: Replicate) -> None:
        self.state_bytes += event.state_bytes or 0
        self.gradient_bytes += event.gradient_bytes

    def _risk(self, event: AtRisk) -> None:
        for target, tokens in event.tokens.items():
            before, num = self._at_risk.get(target, (0, 0))
            self._at_risk[target] = before + tokens, num + 1

    def _start(self, event: Start) -> None:
        self.last_start = event
        self._is_steady = False

    def _iterate(self, event: Iteration) -> None:
        if self._is_steady:
            self._iteration_s.add(event.iteration_s)
            self._num_tokens.add(event.num_tokens)
        self._is_steady = True
        if event.loss is None:
            return
        iteration, loss = event.iteration, float(event.loss)  # JSON cannot write all as numbers
        if self._first is None or iteration <= self._first[0]:
            self._first = iteration, loss
        if self._last is None or iteration >= self._last[0]:
            self._last = iteration, loss
        self._losses[iteration] = loss
        if len(self._losses) > 2 * _NUM_KEPT:
            self._losses = dict(islice(self._losses.items(), _NUM_KEPT, None))
        self._open = [each for each in self._open if each.takes(event.incarnation, loss)]
        self._draw(iteration, loss)

    def _draw(self, iteration: int, loss: float) -> None:
        number = iteration // self._per_point
        point = self.points.setdefault(number, Point(iteration=number * self._per_point))
        point.total, point.num = point.total + loss, point.num + 1
        point.low, point.high = min(point.low, loss), max(point.high, loss)

    def _recover(self, event: Recovery) -> None:
        target = event.target_iteration
        self._losses = {each: loss for each, loss in self._losses.items() if each <= target}
        self.points = {n: point for n, point in self.points.items() if point.iteration <= target}
        before = [self._losses[each] for each in sorted(self._losses)[-_NUM_AROUND_RECOVERY:]]
        self.recoveries.append(Around(event=event, before=before))
        self._open.append(self.recoveries[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Around:
    """Recovery, and some losses before it and after it."""

    event: Recovery
    before: list[float]
    after: list[float] = field(default_factory=list)

    def takes(self, incarnation: int, loss: float) -> bool:
        """Take a loss if it is one of the next; return whether more are wanted."""
        if incarnation != self.event.incarnation:
            return False
        self.after.append(loss)
        return len(self.after) < _NUM_AROUND_RECOVERY
