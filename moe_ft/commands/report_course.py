"""Course of a job as one rank's events tell it: speed, losses, recoveries, repairs.

It takes the events one by one and keeps little of them. report_rank.py reads the file.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from moe_ft.config.fields import size_text
from moe_ft.event_lines import AtRisk, Elastic, Iteration, Line, Recovery, Repair, Replicate, Start

Row = dict[str, object]  # of a table for people
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
        self.recoveries: list[Recovery] = []
        self.repairs: list[Repair] = []
        self.changes: list[Elastic] = []  # of the number of ranks
        self.points: dict[int, Point] = {}
        self._per_point = max(1, -(-last_iteration // _NUM_POINTS))
        self._around: list[_Around] = []
        self._open: list[_Around] = []  # those that want more losses
        self._losses: dict[int, float] = {}  # the newest, as the last attempt had them
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None
        self._iteration_s, self._num_tokens = Median(), Median()
        self._state_bytes = self._gradient_bytes = 0  # to peers
        self._at_risk: dict[str, tuple[int, int]] = {}  # by target: tokens in all, and events
        self._is_steady = False  # the first iteration of a start pays for warming up
        self._takes: dict[type[Line], Callable[..., None]] = {
            Start: self._start,
            Iteration: self._iterate,
            Recovery: self._recover,
            Repair: self.repairs.append,
            Elastic: self.changes.append,
            Replicate: self._replicate,
            AtRisk: self._risk,
        }

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

    def recovery_rows(self) -> Iterator[Row]:
        """Yield a row for each recovery: what it cost, and the loss around it."""
        return map(_summarize_recovery, self.recoveries, self._around)

    def repair_rows(self) -> Iterator[Row]:
        """Yield a row for each repair."""
        return map(_summarize_repair, self.repairs)

    def snapshot_rows(self) -> Iterator[tuple[str, str]]:
        """Yield the numbers of ranks, what this one has sent to peers, what failures would have lost."""
        if self.changes:
            parts = [str(self.changes[0].from_)]
            for each in self.changes:
                waiting = f" ({len(each.waiting)} wait)" if each.waiting else ""
                parts.append(f"{each.to} from iteration {each.iteration}{waiting}")
            yield "ranks", ", ".join(parts)
        if self._state_bytes:
            sent = f"{size_text(self._state_bytes)}, {size_text(self._gradient_bytes)}"
            yield "state, gradients to peers", f"{sent} (last rank)"
        for target, (tokens, num) in sorted(self._at_risk.items()):
            yield f"tokens not in {target} (mean)", f"{tokens / num:,.0f}"

    def _replicate(self, event: Replicate) -> None:
        self._state_bytes += event.state_bytes or 0
        self._gradient_bytes += event.gradient_bytes

    def _risk(self, event: AtRisk) -> None:
        for target, tokens in event.tokens.items():
            before, num = self._at_risk.get(target, (0, 0))
            self._at_risk[target] = before + tokens, num + 1

    def _start(self, _: Start) -> None:
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
        self.recoveries.append(event)
        self._around.append(_Around(incarnation=event.incarnation, before=before))
        self._open.append(self._around[-1])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Around:
    """Losses before a recovery and after it."""

    incarnation: int
    before: list[float]
    after: list[float] = field(default_factory=list)

    def takes(self, incarnation: int, loss: float) -> bool:
        """Take a loss if it is one of the next; return whether more are wanted."""
        if incarnation != self.incarnation:
            return False
        self.after.append(loss)
        return len(self.after) < _NUM_AROUND_RECOVERY


def _summarize_recovery(event: Recovery, around: _Around) -> Row:
    before, after = around.before, around.after
    return {
        "start": event.incarnation,
        "continued from": event.target_iteration,
        "replayed": event.replayed_iterations,
        "units from": ", ".join(f"{tier} {count}" for tier, count in event.sources.items()),
        "kept": ", ".join(f"{key} {as_}" for key, as_ in event.lossy.items()) or "exact",
        "lost tokens": event.lost_tokens,
        "PLT %": f"{100 * event.plt:.3f}",
        "MTL %": f"{100 * event.mtl:.3f}",
        "in all %": f"{100 * event.total_plt:.3f}",
        f"loss of {_NUM_AROUND_RECOVERY} before": show(median(before) if before else None),
        "after": show(median(after) if after else None),
        "highest": show(max(after, default=None)),
    }


def _summarize_repair(repair: Repair) -> Row:
    """Return the row of a repair. Iterations are counted from 1, as log lines do."""
    return {
        "start": repair.incarnation,
        "replaced ranks": ", ".join(map(str, repair.dead_ranks)),
        "that hung": ", ".join(repair.hung_s) or "-",
        "nodes": ", ".join(f"{by} for {lost}" for lost, by in repair.taken_over.items()) or "-",
        "played": ", ".join(f"{dead} by {by}" for dead, by in repair.played.items()) or "-",
        "in iteration": repair.broken_iteration + 1,
        "seconds": f"{repair.seconds:.1f}",
    }
