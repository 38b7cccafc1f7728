"""Course of a run, followed in its event log while it grows: what `moe_ft watch` shows and metrics serve.

It takes the events one by one and keeps sums. Nothing here needs torch, or acts in the training loop:
metrics.py does. `moe_ft report` reads a log as a whole.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import median

from moe_ft.event_lines import (
    Corruption,
    Degraded,
    End,
    Iteration,
    Line,
    Moved,
    Persist,
    Protects,
    ReadBack,
    Recovery,
    Repair,
    Replicate,
    Skipped,
    Snapshot,
    Start,
    Stopped,
    decode,
)
from moe_ft.events import EventTail, event_path
from moe_ft.loop.stragglers import MOST_TIMES, OwnTimes
from moe_ft.planning.time_shares import TimeSpent

_NUM_RECENT = 20  # iterations, for medians
_NUM_SHOWN = 60  # iterations, for a picture of their times


class Tier(StrEnum):
    """Places that a checkpoint's bytes go to."""

    MEMORY = "memory"
    PEERS = "peers"
    STORAGE = "storage"


TIERS: dict[type[Moved], Tier] = {
    Snapshot: Tier.MEMORY,
    Replicate: Tier.PEERS,
    Persist: Tier.STORAGE,
}


@dataclass(kw_only=True, slots=True)
class TierCourse:
    """Snapshots of one rank that have reached a tier; `iteration` is that of the newest."""

    iteration: int = 0
    num: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, event: Moved) -> None:
        """Take one more."""
        self.iteration, self.num = event.iteration, self.num + 1
        self.num_bytes += event.moved_bytes
        self.seconds += event.seconds


@dataclass(kw_only=True, slots=True)
class RankCourse:
    """Course of one rank.

    Attributes:
        start: of the last incarnation whose beginning was seen.
        incarnation: the last one.
        iteration: the last one that is complete.
        read_back: iteration of the newest state that the rank has read back from storage; None without one.
        time_s: of the last event, in seconds since 1970; 0 if there is none.
        ending: how the last incarnation ended; empty while it runs, or if nothing says so.
        lost_rank: what follows the death of a rank: repair, restart, end; empty if nothing says so.
        recent: iterations of this incarnation, without the first, which pays for warming up.
        own_s: by iteration, its own times in this incarnation, without the first.
        history: seconds of the last iterations, of all incarnations.
        loss: the last one of a rank that knows it; NaN and infinities as such.
        num_iterations, num_tokens, stall_s, idle_s: sums over all iterations, those that ran again too.
        spent: uses of the time from the first iteration on.
        num_not_read: lines that are no events.
        is_finished: the last incarnation has written its end.
    """

    rank: int
    start: Start | None = None
    incarnation: int = 0
    iteration: int = 0
    time_s: float = 0.0
    ending: str = ""
    lost_rank: str = ""
    recent: deque[Iteration] = field(default_factory=lambda: deque(maxlen=_NUM_RECENT))
    own_s: dict[int, float] = field(default_factory=dict)
    stage: int = 0
    history: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_SHOWN))
    loss: float | None = None
    num_iterations: int = 0
    num_tokens: float = 0.0
    stall_s: float = 0.0
    idle_s: float = 0.0
    spent: TimeSpent = field(default_factory=TimeSpent)
    tiers: dict[Tier, TierCourse] = field(
        default_factory=lambda: {each: TierCourse() for each in Tier}
    )
    recovery: Recovery | None = None
    num_recoveries: int = 0
    lost_tokens: int = 0
    repair: Repair | None = None
    num_repairs: int = 0
    repair_s: float = 0.0
    degraded: Counter[str] = field(default_factory=Counter)
    last_degraded: Degraded | None = None
    num_skipped: int = 0
    corruptions: Counter[str] = field(default_factory=Counter)  # findings, by check
    read_back: int | None = None
    num_not_read: int = 0
    is_finished: bool = False
    _is_warm: bool = False

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
        known = [each.idle_s for each in self.recent if each.idle_s is not None]
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

    def take(self, line: bytes) -> None:
        """Take the next line of its file."""
        event = decode(line)
        if event is None:
            self.num_not_read += 1
            return
        if event.incarnation != self.incarnation:
            self.incarnation, self.ending, self.is_finished = event.incarnation, "", False
        self.time_s = max(self.time_s, event.time)  # snapshots end before they are told
        match event:
            case Start():
                self._begin(event)
            case Iteration():
                self._iterate(event)
            case Protects():
                self.lost_rank = event.lost_rank
            case Moved() | ReadBack():
                self._move(event)
            case Recovery() | Repair():
                self._recover(event)
            case Stopped():
                self.ending = f"stopped: {event.reason}"
            case End():
                self.ending, self.is_finished = event.reason, True
            case _:
                self._note_trouble(event)

    def _move(self, event: Moved | ReadBack) -> None:
        if isinstance(event, ReadBack):
            self.read_back = event.iteration
        else:
            self.tiers[TIERS[type(event)]].add(event)

    def _note_trouble(self, event: Line) -> None:
        if isinstance(event, Skipped):
            self.num_skipped += 1
        elif isinstance(event, Corruption):
            self.corruptions[event.check] += 1
        elif isinstance(event, Degraded):
            self.degraded[event.part] += 1
            self.last_degraded = event

    def _begin(self, event: Start) -> None:
        self.start, self.iteration, self._is_warm = event, event.iteration, False
        self.ending, self.is_finished = "", False
        self.recent.clear()
        self.own_s.clear()
        self.spent.start()

    def _iterate(self, event: Iteration) -> None:
        self.iteration = event.iteration
        self.num_iterations += 1
        self.num_tokens += event.num_tokens
        self.stall_s += event.stall_s
        self.idle_s += event.idle_s or 0.0
        if event.loss is not None:
            self.loss = float(event.loss)
        self.stage = event.stage
        if self._is_warm:
            self.recent.append(event)
            if event.own_s is not None:
                self.own_s[event.iteration] = event.own_s
                if len(self.own_s) > MOST_TIMES:
                    del self.own_s[next(iter(self.own_s))]
        self._is_warm = True
        self.history.append(event.iteration_s)
        self.spent.add(event.iteration, event.time, event.iteration_s, event.stall_s)

    def _recover(self, event: Recovery | Repair) -> None:
        if isinstance(event, Repair):  # a recovery of its own came before it
            self.repair, self.num_repairs = event, self.num_repairs + 1
            self.repair_s += event.seconds
            return
        self.recovery, self.num_recoveries = event, self.num_recoveries + 1
        # A strategy that loses updates says the sum, which belongs to the state; others lose none.
        total = event.total_lost_tokens
        self.lost_tokens = event.lost_tokens if total is None else total
        self.spent.recover(event.phases_s.get("replay", 0.0))


class FollowedRun:
    """Course of the ranks of a run. Owned by one thread at a time."""

    def __init__(
        self, directory: Path, ranks: Iterable[int] = (), *, is_from_end: bool = False
    ) -> None:
        """Begin with some ranks.

        Args:
            is_from_end: leave out what their files hold now; of ranks that are added later, nothing.
        """
        self.directory = directory
        self._tails: dict[int, EventTail] = {}
        self._courses: dict[int, RankCourse] = {}
        self.problems: dict[int, str] = {}  # by rank, why its file cannot be read
        self._add(ranks, is_from_end=is_from_end)

    @property
    def ranks(self) -> Sequence[RankCourse]:
        """The courses of all ranks, ascending."""
        return [self._courses[rank] for rank in sorted(self._courses)]

    @property
    def unread_bytes(self) -> int:
        """Bytes of the log that were there at the last look, and are still to be read."""
        return sum(each.unread_bytes for each in self._tails.values())

    def unread_bytes_of(self, rank: int) -> int:
        """Return the same of one rank's file."""
        return self._tails[rank].unread_bytes

    def add(self, ranks: Iterable[int]) -> None:
        """Follow further ranks, from the beginning of their files."""
        self._add(ranks, is_from_end=False)

    def _add(self, ranks: Iterable[int], *, is_from_end: bool) -> None:
        for rank in ranks:
            if rank not in self._tails:
                path = event_path(self.directory, rank)
                self._tails[rank] = EventTail(path, is_from_end=is_from_end)
                self._courses[rank] = RankCourse(rank=rank)

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
            for line in lines:
                self._courses[rank].take(line)
