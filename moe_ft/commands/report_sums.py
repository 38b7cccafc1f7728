"""Sinks of the fold for `moe_ft report`: a row of the page's timeline, and the history of the job.

Their size is bounded by what a page can show, whatever the length of the log: times go into the buckets of a
`Frame`, which is fixed from the ends of the files before, and of long logs some iterations are left out.
moe_ft/loop/event_fold.py has the fold and the sums; report_run.py reads the files.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from operator import add
from statistics import median
from typing import Any, override

from moe_ft.event_lines import (
    AtRiskLine,
    CorruptionLine,
    ElasticLine,
    IterationLine,
    Line,
    Mark,
    RecoveryLine,
    RepairLine,
    ReplicateLine,
    RouterLoadLine,
    SkippedBatchLine,
    SnapshotLine,
    SnapshotTier,
    StartLine,
    Tokens,
)
from moe_ft.loop.event_fold import Sink
from moe_ft.planning.time_shares import Spent

NUM_BUCKETS = 528
MOST_ENDS = 200  # of iterations, which a row shows one by one
_LAST_PLACE = math.nextafter(NUM_BUCKETS, 0)
_NUM_AROUND_RECOVERY = 5
_NUM_KEPT = 50_000  # samples for a median, and losses for recoveries to go back to
_HEAD_BYTES = 200  # of a line; its kind and iteration are in there
_KIND = b'"event": "'
_WHOLE = (b"}\n", b"}")
Cells = array[float]  # [bucket]


def sampled(lines: Iterable[bytes], every: int, loads_every: int) -> Iterator[bytes]:
    """Yield lines without the times and loads of most iterations: all but every n-th one.

    These are told by the beginning of their lines, in a tenth of the time of decoding them. Of each start the
    first and the last iteration are kept, where the division of the time needs them.
    """
    left_out, is_first = b"", True
    for line in lines:
        at = line.find(_KIND, 0, _HEAD_BYTES) + len(_KIND)
        kind = line[at : at + 10]
        if kind == b'iteration"':
            if every > 1 and line.endswith(_WHOLE):
                if not is_first and not _is_multiple(line, at + 10, every):
                    left_out = line
                    continue
                left_out, is_first = b"", False
        elif kind == b"router_loa":
            if not _is_multiple(line, at + 12, loads_every) and line.endswith(_WHOLE):
                continue
        elif every > 1 and kind.startswith((b'start"', b'end"')):
            if left_out:  # training ended with it
                yield left_out
                left_out = b""
            is_first = is_first or kind.startswith(b"start")
        yield line


def _is_multiple(line: bytes, at: int, every: int) -> bool:
    """Return whether the iteration of a line is one to read, the field behind the name of the event."""
    if every == 1 or not line.startswith(b', "iteration": ', at):
        return True
    digits = line[at + 15 : line.find(b",", at + 15)]
    return not digits.isdigit() or int(digits) % every == 0


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Time and iterations that the pictures of a run span.

    Attributes:
        every, loads_every: of the times and loads of iterations every n-th is read.
    """

    first_s: float
    last_s: float
    last_iteration: int
    every: int = 1
    loads_every: int = 1

    @cached_property
    def bucket_s(self) -> float:
        """Seconds of a bucket of time."""
        return max(self.last_s - self.first_s, 1e-3) / NUM_BUCKETS

    def place(self, time_s: float) -> float:
        """Return where a time is, in buckets; what is outside is at the edge."""
        # In this order also a time that is no number is inside.
        return min(_LAST_PLACE, max(0.0, (time_s - self.first_s) / self.bucket_s))

    def spread(self, cells: Cells, begin_s: float, end_s: float) -> int:
        """Add a span to the buckets that it covers, 1 to one that it fills; return the bucket of its end."""
        first = (begin_s - self.first_s) / self.bucket_s
        last = (end_s - self.first_s) / self.bucket_s
        if not 0.0 <= first <= last <= _LAST_PLACE:
            last = self.place(end_s)
            first = min(last, self.place(begin_s))
        begin, end = int(first), int(last)
        if begin == end:
            cells[begin] += last - first
            return end
        cells[begin] += begin + 1 - first
        for bucket in range(begin + 1, end):
            cells[bucket] += 1.0
        cells[end] += last - end
        return end


def new_cells() -> Cells:
    """Return a bucket of nothing for each part of the time."""
    return array("d", bytes(8 * NUM_BUCKETS))


def _cells_of() -> dict[Any, Cells]:
    return defaultdict(new_cells)


@dataclass(kw_only=True, slots=True)
class TimelineRow(Sink):
    """Row of the timeline: of one rank, whose events it takes, or of several, whose rows it adds up.

    Attributes:
        name: that stands before it.
        ranks: whose row it is.
        busy: the share of each bucket of time, by use, and by tier that bytes were on the way to.
        moved: bytes that arrived in a bucket, by tier.
        ends: where iterations end, in buckets; empty if there are too many to show.
        marks: how many of a kind there are in a bucket, and the words for the first.
        loads: ``[iteration][layer]`` tokens by expert of some iterations, as its last attempt had them.
        saved: ``[iteration][layer]`` experts in full in the snapshot of such an iteration.
        memory: most bytes of it in a bucket, resident and of the device.
        corruptions: findings, each as iteration, check and ranks that may be corrupt.
    """

    kinds = frozenset((IterationLine, RouterLoadLine, SnapshotLine, CorruptionLine))

    frame: Frame
    name: str = ""
    ranks: tuple[int, ...] = ()
    busy: dict[Spent | SnapshotTier, Cells] = field(default_factory=_cells_of)
    moved: dict[Spent | SnapshotTier, Cells] = field(default_factory=_cells_of)
    ends: list[float] = field(default_factory=list)
    marks: dict[tuple[int, Mark], tuple[int, str]] = field(default_factory=dict)
    loads: dict[int, Tokens] = field(default_factory=dict)
    saved: dict[int, Tokens] = field(default_factory=dict)
    memory: dict[str, Cells] = field(default_factory=_cells_of)
    corruptions: set[tuple[int, str, tuple[int, ...]]] = field(default_factory=set)

    @override
    def span(
        self,
        kind: Spent | SnapshotTier,
        begin_s: float,
        end_s: float,
        event: Line,
        num_bytes: int = 0,
    ) -> None:
        bucket = self.frame.spread(self.busy[kind], begin_s, end_s)
        if num_bytes:
            self.moved[kind][bucket] += num_bytes

    @override
    def moment(self, mark: Mark, time_s: float, text: str) -> None:
        key = int(self.frame.place(time_s)), mark
        num, first = self.marks.get(key, (0, f"rank {self.ranks[0]} {text}"))
        self.marks[key] = num + 1, first

    @override
    def take(self, event: Line) -> None:
        if isinstance(event, IterationLine):
            self._iterate(event)
        elif isinstance(event, CorruptionLine):
            self.corruptions.add((event.iteration, event.check, event.ranks))
        elif event.iteration % self.frame.loads_every == 0:
            if isinstance(event, RouterLoadLine):
                self.loads[event.iteration] = event.tokens
            elif isinstance(event, SnapshotLine) and event.experts:
                self.saved[event.iteration] = event.experts

    def _iterate(self, event: IterationLine) -> None:
        at = self.frame.place(event.time)
        if len(self.ends) <= MOST_ENDS:
            self.ends.append(at)
        bucket = int(at)
        if (num_bytes := event.resident_bytes) is not None:
            cells = self.memory["resident"]
            if num_bytes > cells[bucket]:
                cells[bucket] = num_bytes
        if (num_bytes := event.device_bytes) is not None:
            cells = self.memory["device"]
            if num_bytes > cells[bucket]:
                cells[bucket] = num_bytes

    def add(self, other: "TimelineRow") -> None:
        """Add the row of other ranks."""
        self.ends = [] if self.ranks else other.ends  # a row of several ranks has none
        self.ranks += other.ranks
        _combine(self.busy, other.busy, add)
        _combine(self.moved, other.moved, add)
        _combine(self.memory, other.memory, max)
        for place, (num, text) in other.marks.items():
            known, first = self.marks.get(place, (0, text))
            self.marks[place] = known + num, first
        self.corruptions |= other.corruptions
        for iteration, layers in other.loads.items():
            mine = self.loads.setdefault(iteration, {})
            for layer, tokens in layers.items():
                both = zip_longest(mine.get(layer, []), tokens, fillvalue=0)
                mine[layer] = [a + b for a, b in both]
        for iteration, layers in other.saved.items():
            own = self.saved.setdefault(iteration, {})
            for layer, experts in layers.items():
                own[layer] = sorted({*own.get(layer, ()), *experts})


def _combine(
    mine: dict[Any, Cells], theirs: Mapping[Any, Cells], how: Callable[[Any, Any], Any]
) -> None:
    for key, cells in theirs.items():
        mine[key] = array("d", map(how, mine[key], cells))


class Median:
    """Median of many numbers: of all, and beyond 50,000 of evenly chosen ones."""

    def __init__(self) -> None:
        self._kept = array("d")
        self._every = 1
        self._num = 0

    def add(self, value: float) -> None:
        """Take one more."""
        if self._num % self._every == 0:
            self._kept.append(value)
            if len(self._kept) > _NUM_KEPT:
                self._kept = self._kept[::2]
                self._every = 2 * self._every
        self._num += 1

    @property
    def value(self) -> float | None:
        """The median, None of nothing."""
        return median(self._kept) if self._kept else None


@dataclass(kw_only=True, slots=True)
class LossPoint:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LossesAround:
    """Recovery, and some losses before it and after it."""

    event: RecoveryLine
    before: list[float]
    after: list[float] = field(default_factory=list)

    def takes(self, incarnation: int, loss: float) -> bool:
        """Take a loss if it is one of the next; return whether more are wanted."""
        if incarnation != self.event.incarnation:
            return False
        self.after.append(loss)
        return len(self.after) < _NUM_AROUND_RECOVERY


class JobHistory(Sink):
    """History of the job: speed, losses, recoveries, repairs; of the rank that has the losses."""

    kinds = frozenset(
        (
            *(IterationLine, ReplicateLine, AtRiskLine, StartLine, RecoveryLine, RepairLine),
            *(SkippedBatchLine, ElasticLine),
        )
    )

    def __init__(self, last_iteration: int) -> None:
        """Begin; the curve of losses is as fine as the number of iterations allows."""
        self.recoveries: list[LossesAround] = []
        self.repairs: list[RepairLine] = []
        self.skipped: dict[str, str] = {}  # by iteration: what its batch has led to
        self.changes: list[ElasticLine] = []  # of the number of ranks
        self.points: dict[int, LossPoint] = {}
        self.first_loss: float | None = None  # of the first iteration, in its last attempt
        self.last_loss: float | None = None
        self.iteration_s = Median()
        self.num_tokens = Median()
        self.state_bytes = 0  # to peers
        self.gradient_bytes = 0
        self._per_point = max(1, -(-last_iteration // NUM_BUCKETS))
        self._open: list[LossesAround] = []  # those that want more losses
        self._losses: dict[int, float] = {}  # the newest, as the last attempt had them
        self._first = math.inf  # iteration of the first loss
        self._last = 0
        self._at_risk: dict[str, tuple[int, int]] = {}  # by target: tokens in all, and events
        self._is_steady = False  # the first iteration of a start pays for warming up

    @override
    def take(self, event: Line) -> None:
        match event:
            case IterationLine():
                self._iterate(event)
            case ReplicateLine():
                self.state_bytes += event.state_bytes or 0
                self.gradient_bytes += event.gradient_bytes
            case AtRiskLine():
                for target, tokens in event.tokens.items():
                    before, num = self._at_risk.get(target, (0, 0))
                    self._at_risk[target] = before + tokens, num + 1
            case StartLine():
                self._is_steady = False
            case RecoveryLine():
                self._recover(event)
            case RepairLine():
                self.repairs.append(event)
            case SkippedBatchLine():
                self.skipped[str(event.iteration)] = f"rank {event.failed_rank}: {event.what}"
            case ElasticLine():
                self.changes.append(event)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole job in a second of training."""
        seconds, tokens = self.iteration_s.value, self.num_tokens.value
        return tokens / seconds if seconds and tokens else None

    @property
    def mean_tokens_at_risk(self) -> dict[str, float]:
        """Tokens that a failure would have lost, on average, by where copies are."""
        return {target: tokens / num for target, (tokens, num) in sorted(self._at_risk.items())}

    def _iterate(self, event: IterationLine) -> None:
        if self._is_steady:
            self.iteration_s.add(event.iteration_s)
            self.num_tokens.add(event.num_tokens)
        self._is_steady = True
        if event.loss is None:
            return
        iteration, loss = event.iteration, float(event.loss)  # JSON cannot write all as numbers
        if iteration <= self._first:
            self._first = iteration
            self.first_loss = loss
        if iteration >= self._last:
            self._last = iteration
            self.last_loss = loss
        self._losses[iteration] = loss
        if len(self._losses) > 2 * _NUM_KEPT:
            self._losses = dict(islice(self._losses.items(), _NUM_KEPT, None))
        self._open = [each for each in self._open if each.takes(event.incarnation, loss)]
        number = iteration // self._per_point
        point = self.points.get(number)
        if point is None:
            point = self.points[number] = LossPoint(iteration=number * self._per_point)
        point.total, point.num = point.total + loss, point.num + 1
        point.low, point.high = min(point.low, loss), max(point.high, loss)

    def _recover(self, event: RecoveryLine) -> None:
        target = event.target_iteration
        self._losses = {each: loss for each, loss in self._losses.items() if each <= target}
        self.points = {n: point for n, point in self.points.items() if point.iteration <= target}
        before = [self._losses[each] for each in sorted(self._losses)[-_NUM_AROUND_RECOVERY:]]
        self.recoveries.append(LossesAround(event=event, before=before))
        self._open.append(self.recoveries[-1])
