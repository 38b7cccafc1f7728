"""One pass over the events of one rank: sums of bounded size, whatever the length of the log.

Times go into buckets: a `Frame` is fixed from the ends of the files before. report_events.py decodes lines,
report_run.py reads all ranks and adds them up, report_course.py has what one rank tells of the whole job.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from operator import add
from typing import Any

from moe_ft.commands.report_course import Course
from moe_ft.commands.report_events import Sampling
from moe_ft.event_lines import (
    Corruption,
    Degraded,
    End,
    Fault,
    Hang,
    Iteration,
    Line,
    Persist,
    Recovery,
    Repair,
    Replicate,
    RouterLoad,
    Skipped,
    SlotTables,
    Snapshot,
    Start,
    Stopped,
    Tokens,
    Verdict,
    decode,
)
from moe_ft.loop.course import TIERS, Tier
from moe_ft.planning.time_shares import Spent, TimeSpent

NUM_BUCKETS = 528
MOST_ENDS = 200  # of iterations, which a row shows one by one
_LAST_PLACE = math.nextafter(NUM_BUCKETS, 0)
Cells = array[float]  # [bucket]


class Mark(StrEnum):
    """Moments that a timeline marks, the first ones above the others."""

    FAULT = "fault"
    REPAIR = "repair"
    RECOVERY = "recovery"
    TROUBLE = "trouble"


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Time and iterations that the pictures of a run span."""

    first_s: float
    last_s: float
    last_iteration: int
    sampling: Sampling = Sampling()

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


@dataclass(kw_only=True, slots=True)
class Traffic:
    """Bytes that went to one tier.

    Attributes:
        busy: the share of each bucket of time in which some were on the way.
        moved: bytes that arrived in a bucket.
    """

    num: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0
    busy: Cells = field(default_factory=new_cells)
    moved: Cells = field(default_factory=new_cells)

    def add(self, other: "Traffic") -> None:
        """Add that of other ranks."""
        self.busy = array("d", map(add, self.busy, other.busy))
        self.moved = array("d", map(add, self.moved, other.moved))
        self.num += other.num
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds
        self.longest_s = max(self.longest_s, other.longest_s)


@dataclass(kw_only=True, slots=True)
class SlotSums:
    """New tables of slots.

    Attributes:
        layers: that have got one.
        most, mean: tokens of the busiest rank, and of a rank, before each and with it.
        sent_bytes: of gradients and weights, by the rank that has sent most.
    """

    layers: set[str] = field(default_factory=set)
    num: int = 0
    num_moved: int = 0
    most: tuple[int, int] = (0, 0)
    mean: float = 0.0
    sent_bytes: int = 0

    def take(self, event: SlotTables) -> None:
        """Add the tables of an event."""
        self.sent_bytes += event.sent_bytes
        for layer, change in event.layers.items():
            before, after = change.tokens_before, change.tokens_after
            more = (max(before, default=0), max(after, default=0))
            mean = sum(before) / max(1, len(before))
            self.add(
                SlotSums(
                    layers={layer}, num=1, num_moved=change.moved_replicas, most=more, mean=mean
                )
            )

    def add(self, other: "SlotSums") -> None:
        """Add those of another stage."""
        self.layers |= other.layers
        self.num += other.num
        self.num_moved += other.num_moved
        self.most = self.most[0] + other.most[0], self.most[1] + other.most[1]
        self.mean += other.mean
        self.sent_bytes = max(self.sent_bytes, other.sent_bytes)


@dataclass(kw_only=True, slots=True)
class RankSums:
    """Sums of one rank's events, or of several ranks.

    Attributes:
        seconds: in all, by use.
        spent: the share of each bucket of time, by use.
        ends: where iterations end, in buckets; empty if there are too many to show.
        marks: how many of a kind there are in a bucket, and the words for the first.
        read_bytes: that recoveries read, by memory or storage.
        loads: ``[iteration][layer]`` tokens by expert of some iterations, as its last attempt had them.
        saved: ``[iteration][layer]`` experts in full in the snapshot of such an iteration.
        resident, device: most bytes of memory in a bucket.
        peak_bytes: of device memory at the end.
        hangs: for which ranks have ended themselves, by section of the loop.
        corruptions: findings, each as iteration, check and ranks that may be corrupt.
        slots: new tables, which one rank of each stage has written.
        hosts: where it ran, in all starts.
    """

    num_ranks: int = 1
    seconds: dict[Spent, float] = field(default_factory=lambda: defaultdict(float))
    spent: dict[Spent, Cells] = field(default_factory=lambda: defaultdict(new_cells))
    ends: list[float] = field(default_factory=list)
    marks: dict[tuple[int, Mark], tuple[int, str]] = field(default_factory=dict)
    traffic: dict[Tier, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    read_bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    loads: dict[int, Tokens] = field(default_factory=dict)
    saved: dict[int, Tokens] = field(default_factory=dict)
    resident: Cells = field(default_factory=new_cells)
    device: Cells = field(default_factory=new_cells)
    peak_bytes: int = 0
    hangs: Counter[str] = field(default_factory=Counter)
    corruptions: set[tuple[int, str, tuple[int, ...]]] = field(default_factory=set)
    slots: SlotSums = field(default_factory=SlotSums)
    hosts: set[str] = field(default_factory=set)

    def add(self, other: "RankSums") -> None:
        """Add those of other ranks."""
        self.ends = [] if self.num_ranks else other.ends  # a row of several ranks has none
        self.num_ranks += other.num_ranks
        for use, cells in other.spent.items():
            self.spent[use] = array("d", map(add, self.spent[use], cells))
        for use, seconds in other.seconds.items():
            self.seconds[use] += seconds
        for place, (num, text) in other.marks.items():
            known, first = self.marks.get(place, (0, text))
            self.marks[place] = known + num, first
        for tier, traffic in other.traffic.items():
            self.traffic[tier].add(traffic)
        for source, num_bytes in other.read_bytes.items():
            self.read_bytes[source] += num_bytes
        self.resident = array("d", map(max, self.resident, other.resident))
        self.device = array("d", map(max, self.device, other.device))
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.hangs += other.hangs
        self.corruptions |= other.corruptions
        self.slots.add(other.slots)
        self.hosts |= other.hosts
        for iteration, layers in other.loads.items():
            _add_loads(self.loads.setdefault(iteration, {}), layers)
        for iteration, layers in other.saved.items():
            own = self.saved.setdefault(iteration, {})
            for layer, experts in layers.items():
                own[layer] = sorted({*own.get(layer, ()), *experts})


def _add_loads(mine: Tokens, theirs: Tokens) -> None:
    for layer, tokens in theirs.items():
        own = mine.get(layer, [])
        mine[layer] = [a + b for a, b in zip_longest(own, tokens, fillvalue=0)]


class RankReader:
    """Handles the events of one rank in their order; a course gets those that concern the whole job."""

    def __init__(self, rank: int, frame: Frame, course: Course | None) -> None:
        """Begin, with a course if this rank is to tell how the job went."""
        self.sums, self.num_others = RankSums(), 0
        self._rank, self._frame, self._course = rank, frame, course
        self._time = TimeSpent()
        self._traffic: dict[type[Line], Traffic] = {}  # hashing a tier would take half of the time
        self._pid, self._last_s, self._has_told = 0, frame.first_s, True
        self._handlers: dict[type[Line], Callable[[Any], None]] = {
            Start: self._start,
            Iteration: self._iterate,
            RouterLoad: self._load,
            Snapshot: self._snapshot,
            Replicate: self._move,
            Persist: self._move,
            Recovery: self._recover,
            Repair: self._repair,
            Fault: self._fail,
            Stopped: self._fail,
            Verdict: self._judge,
            Hang: self._hang,
            Corruption: self._find,
            Degraded: self._degrade,
            Skipped: self._degrade,
            End: self._end,
            SlotTables: self.sums.slots.take,
        }

    def read(self, lines: Iterable[bytes]) -> None:
        """Read the lines of a file; `num_others` are no events."""
        sampling, time, course = self._frame.sampling, self._time, self._course
        handlers, left_out = self._handlers, b""
        for line in lines:
            kind = sampling.leaves_out(line)
            if kind is RouterLoad:
                continue
            if kind is Iteration and not time.is_first:
                left_out = line
                continue
            event = decode(line)
            if event is None:
                self.num_others += 1
                continue
            kind = type(event)
            if kind is Iteration:
                left_out = b""
            elif left_out and (kind is Start or kind is End):
                if isinstance(last := decode(left_out), Iteration):
                    self._iterate(last)  # training ended with it
                left_out = b""
            if (handle := handlers.get(kind)) is not None:
                handle(event)
            if course is not None:
                course.take(event)
            self._last_s = event.time

    def _spend(self, use: Spent, begin_s: float, end_s: float) -> None:
        if begin_s < end_s:
            sums = self.sums
            sums.seconds[use] += end_s - begin_s
            self._frame.spread(sums.spent[use], begin_s, end_s)

    def _mark(self, time_s: float, mark: Mark, text: str) -> None:
        key = int(self._frame.place(time_s)), mark
        num, first = self.sums.marks.get(key, (0, f"rank {self._rank} {text}"))
        self.sums.marks[key] = num + 1, first

    def _start(self, event: Start) -> None:
        if event.pid != self._pid and not self._has_told:
            self._mark(self._last_s, Mark.FAULT, "fell silent")
        self._pid, self._has_told = event.pid, False
        if event.host:
            self.sums.hosts.add(event.host)
        self._time.start()

    def _iterate(self, event: Iteration) -> None:
        step = self._time.add(event.iteration, event.time, event.iteration_s, event.stall_s)
        for span in step:
            self._spend(*span)
        sums, at = self.sums, self._frame.place(event.time)
        if len(sums.ends) <= MOST_ENDS:
            sums.ends.append(at)
        bucket, resident, device = int(at), event.resident_bytes, event.device_bytes
        if resident is not None and resident > sums.resident[bucket]:
            sums.resident[bucket] = resident
        if device is not None and device > sums.device[bucket]:
            sums.device[bucket] = device

    def _load(self, event: RouterLoad) -> None:
        if event.iteration % self._frame.sampling.loads_every == 0:
            self.sums.loads[event.iteration] = event.tokens

    def _snapshot(self, event: Snapshot) -> None:
        self._move(event)
        if event.experts and event.iteration % self._frame.sampling.loads_every == 0:
            self.sums.saved[event.iteration] = event.experts

    def _move(self, event: Snapshot | Replicate | Persist) -> None:
        traffic = self._traffic.get(type(event))
        if traffic is None:
            traffic = self._traffic[type(event)] = self.sums.traffic[TIERS[type(event)]]
        num_bytes, seconds = event.moved_bytes, event.seconds
        bucket = self._frame.spread(traffic.busy, event.time - seconds, event.time)
        traffic.moved[bucket] += num_bytes
        traffic.num += 1
        traffic.num_bytes += num_bytes
        traffic.seconds += seconds
        if seconds > traffic.longest_s:
            traffic.longest_s = seconds

    def _recover(self, event: Recovery) -> None:
        self._time.recover(event.phases_s.get("replay", 0.0))
        for source, num_bytes in event.read_bytes.items():
            self.sums.read_bytes["storage" if source == "storage" else "memory"] += num_bytes
        self._mark(event.time, Mark.RECOVERY, f"continues from iteration {event.target_iteration}")

    def _repair(self, event: Repair) -> None:
        self._has_told = True
        if event.is_replacement:
            text = f"died in iteration {event.broken_iteration + 1} and was replaced"
            self._mark(event.time - event.seconds, Mark.FAULT, text)
        self._mark(event.time, Mark.REPAIR, f"is repaired after {event.seconds:.1f} s")

    def _fail(self, event: Fault | Stopped) -> None:
        self._has_told = True
        text = (
            f"injected {event.kind}"
            if isinstance(event, Fault)
            else f"stopped: {event.reason[:80]}"
        )
        self._mark(event.time, Mark.FAULT, text)

    def _judge(self, event: Verdict) -> None:
        self._mark(event.time, Mark.FAULT, f"tells the verdict: {event.words}")

    def _hang(self, event: Hang) -> None:
        self._has_told = True
        self.sums.hangs[event.section] += 1
        self._mark(
            event.time, Mark.FAULT, f"hung in its {event.section} for {event.silent_s:.0f} s"
        )

    def _find(self, event: Corruption) -> None:
        self.sums.corruptions.add((event.iteration, event.check, event.ranks))
        accused = " or ".join(map(str, event.ranks))
        self._mark(event.time, Mark.FAULT, f"corruption of rank {accused}: {event.check}")

    def _degrade(self, event: Degraded) -> None:
        self._mark(event.time, Mark.TROUBLE, f"{event.part}: {event.reason[:80]}")

    def _end(self, event: End) -> None:
        self._has_told = True
        self.sums.peak_bytes = max(self.sums.peak_bytes, event.peak_device_memory_bytes or 0)
