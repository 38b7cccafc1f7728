"""The fold of an event log: one rank's state after each event. `watch`, metrics and `report` show it.

What it keeps is bounded, so that it can follow a job for weeks. What grows with a log goes to sinks: the
spans of time that the fold finds, the moments that it marks, and the events themselves.
moe_ft/commands/report_sums.py has the sinks of the page and of the job's history. Nothing here needs torch,
or acts in the training loop: metrics.py does.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from moe_ft.event_lines import (
    DegradedLine,
    EndLine,
    FaultInjectedLine,
    HangLine,
    IterationLine,
    Line,
    Mark,
    MovedLine,
    PersistLine,
    ProtectsLine,
    ReadBackLine,
    RecoveryLine,
    RepairLine,
    ReplicateLine,
    SlotTableLine,
    SnapshotLine,
    SnapshotTier,
    StartLine,
    StoppedLine,
    VerdictLine,
    decode,
)
from moe_ft.events import EventTail, event_path
from moe_ft.loop.stragglers import MOST_TIMES, OwnTimes
from moe_ft.planning.time_shares import Spent, TimeSpent

NUM_RECENT = 20  # iterations, for medians
_NUM_SHOWN = 60  # iterations, for a picture of their times


class Sink:
    """Part that keeps what grows with a log. This one keeps nothing.

    Attributes:
        kinds: of events that it takes.
    """

    kinds: ClassVar[frozenset[type[Line]]] = frozenset()

    def span(
        self,
        kind: Spent | SnapshotTier,
        begin_s: float,
        end_s: float,
        event: Line,
        num_bytes: int = 0,
    ) -> None:
        """Take a span, in seconds since 1970: a use of the rank's time, or bytes on the way to a tier."""

    def moment(self, mark: Mark, time_s: float, text: str) -> None:
        """Take a moment, and what happened to the rank in it."""

    def take(self, event: Line) -> None:
        """Take an event of one of its kinds, after its spans and moments."""


@dataclass(kw_only=True, slots=True)
class TierMoves:
    """Snapshots of one rank that have reached a tier; `iteration` is that of the newest."""

    iteration: int = 0
    num: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class SlotSums:
    """New tables of slots of one rank.

    Attributes:
        layers: that have got one.
        most_before, most_after, mean: tokens of the busiest rank before each and with it, and of a rank.
        sent_bytes: of gradients and weights.
    """

    layers: set[str] = field(default_factory=set)
    num: int = 0
    num_moved: int = 0
    most_before: int = 0
    most_after: int = 0
    mean: float = 0.0
    sent_bytes: int = 0


@dataclass(kw_only=True, slots=True)
class RankFold:
    """State of one rank after the events that it has taken.

    Attributes:
        start: of the last incarnation whose beginning was seen.
        incarnation: the last one.
        iteration: the last one that is complete.
        read_back: iteration of the newest state that the rank has read back from storage; None without one.
        time_s: of the last event, in seconds since 1970; 0 if there is none.
        last: the last event.
        last_word: of the last incarnation: its end; None while it runs, or if it fell silent.
        verdict: on the end of the last incarnation, if this rank has told it.
        lost_rank: what follows the death of a rank: repair, restart, end; empty if nothing says so.
        recent: iterations of this incarnation, without the first, which pays for warming up.
        idle_s: of the last iterations of this incarnation, where the log says it.
        own_s: by iteration, its own times in this incarnation, without the first.
        history: seconds of the last iterations, of all incarnations.
        loss: the last one of a rank that knows it; NaN and infinities as such.
        num_iterations, num_tokens, total_stall_s, total_idle_s: over all iterations, repeated ones too.
        spent: uses of the time from the first iteration on.
        counts: of events that have a mark, by kind and label.
        lost_tokens: that the state lacks; of the whole job.
        read_bytes: that recoveries read, by memory or storage.
        hosts: where it ran, in all starts.
        num_not_read: lines that are no events.
        sinks: that take what grows with the log.
    """

    rank: int
    start: StartLine | None = None
    incarnation: int = 0
    iteration: int = 0
    time_s: float = 0.0
    last: Line | None = None
    last_word: Line | None = None
    verdict: str = ""
    lost_rank: str = ""
    recent: deque[IterationLine] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    idle_s: deque[float | None] = field(default_factory=lambda: deque(maxlen=NUM_RECENT))
    own_s: dict[int, float] = field(default_factory=dict)
    stage: int = 0
    history: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SHOWN))
    loss: float | None = None
    num_iterations: int = 0
    num_tokens: float = 0.0
    total_stall_s: float = 0.0
    total_idle_s: float = 0.0
    spent: TimeSpent = field(default_factory=TimeSpent)
    tiers: dict[SnapshotTier, TierMoves] = field(
        default_factory=lambda: {each: TierMoves() for each in SnapshotTier}
    )
    read_back: int | None = None
    counts: Counter[tuple[type[Line], str]] = field(default_factory=Counter)
    recovery: RecoveryLine | None = None
    lost_tokens: int = 0
    read_bytes: Counter[str] = field(default_factory=Counter)
    repair: RepairLine | None = None
    repair_s: float = 0.0
    degraded: DegradedLine | None = None
    slots: SlotSums = field(default_factory=SlotSums)
    peak_bytes: int = 0
    hosts: set[str] = field(default_factory=set)
    num_not_read: int = 0
    sinks: tuple[Sink, ...] = ()
    _is_warm: bool = False
    _pid: int = 0
    _has_told: bool = True  # what became of the process that wrote

    @property
    def iteration_s(self) -> float | None:
        """Median of the seconds of its recent iterations."""
        return median(each.iteration_s for each in self.recent) if self.recent else None

    @property
    def recent_stall_s(self) -> float | None:
        """Median of how long its recent iterations waited for checkpoints."""
        return median(each.stall_s for each in self.recent) if self.recent else None

    @property
    def recent_idle_s(self) -> float | None:
        """Median of how long its recent iterations waited for other ranks, where the log says so."""
        known = [each for each in self.idle_s if each is not None]
        return median(known) if known else None

    @property
    def own_times(self) -> OwnTimes:
        """Its own times, for a comparison with other ranks."""
        has_experts = bool(self.start and self.start.num_experts)
        return OwnTimes(
            rank=self.rank, stage=self.stage, has_experts=has_experts, seconds=self.own_s
        )

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the whole job in a second of its recent iterations."""
        seconds = self.iteration_s
        return self.recent[-1].num_tokens / seconds if seconds else None

    @property
    def ending(self) -> str:
        """End of the last incarnation in words; empty while it runs, or if nothing says so."""
        return "" if self.last_word is None else self.last_word.ending()

    @property
    def is_finished(self) -> bool:
        """True if the last incarnation has written its end."""
        return isinstance(self.last_word, EndLine)

    def num(self, kind: type[Line]) -> int:
        """Return how many events of a kind there were."""
        return sum(num for (each, _), num in self.counts.items() if each is kind)

    def read(self, lines: Iterable[bytes]) -> None:
        """Take the next lines of its file."""
        for line in lines:
            event = decode(line)
            if event is None:
                self.num_not_read += 1
            else:
                self.take(event)

    def take(self, event: Line) -> None:
        """Take the next event."""
        if event.incarnation != self.incarnation:
            self.incarnation = event.incarnation
            self.last_word = None
            self.verdict = ""
        kind = type(event)
        if (handle := _HANDLERS.get(kind)) is not None:
            handle(self, event)
        if event.mark is not None:
            self.counts[kind, event.label] += 1
            self._mark(event.mark, event.time, event.text)
        for sink in self.sinks:
            if kind in sink.kinds:
                sink.take(event)
        self.last = event
        if event.time > self.time_s:  # snapshots end before they are told
            self.time_s = event.time

    def _mark(self, mark: Mark, time_s: float, text: str) -> None:
        for sink in self.sinks:
            sink.moment(mark, time_s, text)

    def _begin(self, event: StartLine) -> None:
        if event.pid != self._pid and not self._has_told and self.last is not None:
            self._mark(Mark.FAULT, self.last.time, "fell silent")
        self._pid = event.pid
        self._has_told = False
        self.start = event
        self.iteration = event.iteration
        self._is_warm = False
        self.last_word = None
        self.verdict = ""
        if event.host:
            self.hosts.add(event.host)
        self.recent.clear()
        self.idle_s.clear()
        self.own_s.clear()
        self.spent.start()

    def _protect(self, event: ProtectsLine) -> None:
        self.lost_rank = event.lost_rank

    def _iterate(self, event: IterationLine) -> None:
        self.iteration = event.iteration
        self.stage = event.stage
        self.num_iterations += 1
        self.num_tokens += event.num_tokens
        self.total_stall_s += event.stall_s
        self.total_idle_s += event.idle_s or 0.0
        self.idle_s.append(event.idle_s)
        if event.loss is not None:
            self.loss = float(event.loss)
        if self._is_warm:
            self.recent.append(event)
            if (own_s := event.own_s) is not None:
                self.own_s[event.iteration] = own_s
                if len(self.own_s) > MOST_TIMES:
                    del self.own_s[next(iter(self.own_s))]
        self._is_warm = True
        self.history.append(event.iteration_s)
        spans = self.spent.add(event.iteration, event.time, event.iteration_s, event.stall_s)
        for sink in self.sinks:
            for use, begin_s, end_s in spans:
                if begin_s < end_s:
                    sink.span(use, begin_s, end_s, event)

    def _move(self, event: MovedLine) -> None:
        moves, seconds, num_bytes = self.tiers[event.tier], event.seconds, event.moved_bytes
        moves.iteration = event.iteration
        moves.num += 1
        moves.num_bytes += num_bytes
        moves.seconds += seconds
        if seconds > moves.longest_s:
            moves.longest_s = seconds
        for sink in self.sinks:
            sink.span(event.tier, event.time - seconds, event.time, event, num_bytes)

    def _read_back(self, event: ReadBackLine) -> None:
        self.read_back = event.iteration

    def _recover(self, event: RecoveryLine) -> None:
        self.recovery = event
        # A strategy that loses updates says the sum, which belongs to the state; others lose none.
        total = event.total_lost_tokens
        self.lost_tokens = event.lost_tokens if total is None else total
        self.spent.recover(event.phases_s.get("replay", 0.0))
        for source, num_bytes in event.read_bytes.items():
            self.read_bytes["storage" if source == "storage" else "memory"] += num_bytes

    def _repair(self, event: RepairLine) -> None:  # a recovery of its own came before it
        self.repair = event
        self.repair_s += event.seconds
        self._has_told = True
        if event.is_replacement:
            text = f"died in iteration {event.broken_iteration + 1} and was replaced"
            self._mark(Mark.FAULT, event.time - event.seconds, text)

    def _change_slots(self, event: SlotTableLine) -> None:
        slots = self.slots
        slots.sent_bytes += event.sent_bytes
        for layer, change in event.layers.items():
            before = change.tokens_before
            slots.layers.add(layer)
            slots.num += 1
            slots.num_moved += change.moved_replicas
            slots.most_before += max(before, default=0)
            slots.most_after += max(change.tokens_after, default=0)
            slots.mean += sum(before) / max(1, len(before))

    def _note_failure(self, event: DegradedLine) -> None:
        self.degraded = event

    def _note_fault(self, event: FaultInjectedLine) -> None:
        self._has_told = True

    def _note_verdict(self, event: VerdictLine) -> None:
        self.verdict = event.words

    def _end(self, event: StoppedLine | HangLine | EndLine) -> None:
        self._has_told = True
        self.last_word = event
        if isinstance(event, EndLine):
            self.peak_bytes = max(self.peak_bytes, event.peak_device_memory_bytes or 0)


_HANDLERS: Mapping[type[Line], Callable[[RankFold, Any], None]] = {
    StartLine: RankFold._begin,
    ProtectsLine: RankFold._protect,
    IterationLine: RankFold._iterate,
    SnapshotLine: RankFold._move,
    ReplicateLine: RankFold._move,
    PersistLine: RankFold._move,
    ReadBackLine: RankFold._read_back,
    RecoveryLine: RankFold._recover,
    RepairLine: RankFold._repair,
    SlotTableLine: RankFold._change_slots,
    DegradedLine: RankFold._note_failure,
    FaultInjectedLine: RankFold._note_fault,
    VerdictLine: RankFold._note_verdict,
    StoppedLine: RankFold._end,
    HangLine: RankFold._end,
    EndLine: RankFold._end,
}


class FollowedRun:
    """Folds of the ranks of a run while their files grow. Owned by one thread at a time."""

    def __init__(
        self, directory: Path, ranks: Iterable[int] = (), *, is_from_end: bool = False
    ) -> None:
        """Begin with some ranks.

        Args:
            is_from_end: leave out what their files hold now; of ranks that are added later, nothing.
        """
        self.directory = directory
        self._tails: dict[int, EventTail] = {}
        self._folds: dict[int, RankFold] = {}
        self.problems: dict[int, str] = {}  # by rank, why its file cannot be read
        self.add(ranks, is_from_end=is_from_end)

    @property
    def ranks(self) -> Sequence[RankFold]:
        """The folds of all ranks, ascending."""
        return [self._folds[rank] for rank in sorted(self._folds)]

    @property
    def unread_bytes(self) -> int:
        """Bytes of the log that were there at the last look, and are still to be read."""
        return sum(each.unread_bytes for each in self._tails.values())

    def unread_bytes_of(self, rank: int) -> int:
        """Return the same of one rank's file."""
        return self._tails[rank].unread_bytes

    def add(self, ranks: Iterable[int], *, is_from_end: bool = False) -> None:
        """Follow further ranks, from the beginning of their files or from their ends."""
        for rank in ranks:
            if rank not in self._tails:
                path = event_path(self.directory, rank)
                self._tails[rank] = EventTail(path, is_from_end=is_from_end)
                self._folds[rank] = RankFold(rank=rank)

    def read(self, most_bytes: int) -> None:
        """Take the new events of all ranks, from at most so many bytes of each file."""
        self.problems = {}
        for rank, tail in self._tails.items():
            try:
                lines = tail.read(most_bytes)
            except FileNotFoundError:  # the rank has not begun to write
                continue
            except OSError as error:
                self.problems[rank] = error.strerror or str(error)
                continue
            self._folds[rank].read(lines)
