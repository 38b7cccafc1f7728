"""The event log of a run, read once: a fold of each rank, and the sinks that a report wants.

Files are read by several processes, each line once. moe_ft/loop/event_fold.py has the fold, report_sums.py
the sinks. How much of it is kept does not depend on the length of the log: rows are added up by node where
there are many ranks.
"""

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import islice
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from operator import attrgetter
from pathlib import Path

from moe_ft.bars import progress_bar
from moe_ft.commands.report_sums import Frame, JobHistory, TimelineRow, sampled
from moe_ft.commands.report_trace import Part, TraceSink
from moe_ft.errors import ConfigError
from moe_ft.event_lines import IterationLine, Line, RouterLoadLine, SnapshotTier, StartLine, decode
from moe_ft.events import (
    event_path,
    ranks_with_events,
    read_lines,
    read_lines_backwards,
    read_progress,
)
from moe_ft.loop.event_fold import RankFold, TierMoves
from moe_ft.loop.stragglers import MOST_TIMES, Straggler, find_stragglers
from moe_ft.planning.time_shares import TimeShares
from moe_ft.verdicts import named_ranks

_MOST_READ = (
    8 * MOST_TIMES
)  # iterations that are read for own times, which a GPU tells in one of eight
_LONGEST_REASON = 60  # letters of it, of a rank that has stopped
_MOST_ROWS = 64
_MOST_ITERATIONS = 3_000_000  # of all ranks, whose lines are decoded
_MOST_LOADS = 88  # iterations whose loads are decoded
_FEW_BYTES = 32 << 20  # that one process reads as fast as several
_MAX_FILES_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnds:
    """Beginning and end of a rank's file.

    Attributes:
        fold: of the last events of the last incarnation: its end, and the times of its last iterations.
        phase: the last one; empty if it is not known.
        host: where the rank was first.
        first_s: time of the first event.
    """

    fold: RankFold
    phase: str
    host: str
    first_s: float
    num_bytes: int

    @property
    def ending(self) -> str:
        """End of the rank, in words."""
        last = self.fold.last_word or self.fold.last
        assert last is not None
        return last.ending(_LONGEST_REASON)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedRun:
    """A run over all its incarnations.

    Attributes:
        ends: of the files of ranks that left events, ascending.
        folds: of the ranks that were read as a whole: the first and the last one, or all of them.
        history: of the job, as the last rank of each start tells it.
        first: the first rank, which every start has.
        last: the last rank of the last start.
        rows: of the timeline, of the ranks that were read.
        left_out: a line on each part of the log that could not be read.
    """

    frame: Frame
    ends: dict[int, RankEnds]
    folds: dict[int, RankFold]
    history: JobHistory
    first: int
    last: int
    rows: Sequence[TimelineRow]
    left_out: tuple[str, ...]

    @property
    def newest(self) -> list[RankEnds]:
        """Ends of the ranks of the last start."""
        newest = max(each.fold.incarnation for each in self.ends.values())
        return [each for each in self.ends.values() if each.fold.incarnation == newest]

    @property
    def last_start(self) -> StartLine | None:
        """The last start, if its beginning is in the log."""
        return self.folds[self.last].start

    @property
    def verdict(self) -> str:
        """On the end of the last start; empty if it has not failed, or nobody has told."""
        return "".join(each.fold.verdict for each in self.newest)

    @property
    def shares(self) -> TimeShares:
        """Shares of the time from the first iteration to the last."""
        return TimeShares.of(self.folds[self.first].spent.seconds)

    @property
    def num_iterations(self) -> int:
        """Iterations that the rank has done that has done most."""
        return max(each.fold.iteration for each in self.ends.values())

    @property
    def stragglers(self) -> list[Straggler]:
        """The slowest ranks of the last start, as it ended."""
        start = self.last_start
        has_experts = bool(start and start.num_experts)
        own = (each.fold.own_times for each in self.newest)
        return find_stragglers(replace(each, has_experts=has_experts) for each in own)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts on which ranks ran, in all starts of those that were read."""
        first = {each.host for each in self.ends.values() if each.host}
        return tuple(sorted(first.union(*(each.hosts for each in self.folds.values()))))

    @property
    def tiers(self) -> dict[SnapshotTier, TierMoves]:
        """Snapshots of all ranks that were read, by tier that some have reached."""
        found: dict[SnapshotTier, TierMoves] = {}
        for fold in self.folds.values():
            for tier, moves in fold.tiers.items():
                if moves.num:
                    total = found.setdefault(tier, TierMoves())
                    total.num += moves.num
                    total.num_bytes += moves.num_bytes
                    total.seconds += moves.seconds
                    total.longest_s = max(total.longest_s, moves.longest_s)
        return found

    @property
    def read_bytes(self) -> Counter[str]:
        """Bytes that recoveries read, by memory or storage."""
        return sum((each.read_bytes for each in self.folds.values()), Counter())

    @property
    def total(self) -> TimelineRow:
        """Row of all ranks that were read."""
        total = TimelineRow(frame=self.frame)
        for row in self.rows:
            total.add(row)
        return total


@dataclass(kw_only=True, slots=True)
class _LeftOut:
    """Parts of an event log that could not be read: files and why, and by rank lines that are no events."""

    files: dict[str, str] = field(default_factory=dict)
    num_lines: dict[int, int] = field(default_factory=dict)

    def describe(self) -> tuple[str, ...]:
        """Return a line on each part."""
        lines = [f"{name}: {reason}" for name, reason in self.files.items()][:_MAX_FILES_NAMED]
        if len(self.files) > len(lines):
            lines.append(f"{len(self.files) - len(lines)} more files")
        if num_lines := sum(self.num_lines.values()):
            what = "line that is no event" if num_lines == 1 else "lines that are no events"
            lines.append(f"{num_lines} {what}, such as a killed rank leaves")
        return tuple(lines)


def read_run(
    directory: Path, *, all_ranks: bool, trace: Callable[[Iterable[Part]], None] | None = None
) -> ReportedRun:
    """Read the event files of a directory: their ends, the first and last rank's whole, and all if wanted.

    Args:
        trace: takes the parts of a trace.

    Raises:
        ConfigError: if the directory holds no event log, or none that can be read.
    """
    left_out = _LeftOut()
    ends = _all_ends(directory, left_out)
    # Every rank has the times; the loss is on the last stage, where the last rank of a start always is.
    newest = max(each.fold.incarnation for each in ends.values())
    there = [rank for rank, each in ends.items() if each.fold.incarnation == newest]
    first, main = min(there), max(there)
    last_of = _last_ranks(directory, first, ends, main)
    last_ranks = {main, *last_of.values()}
    whole = sorted({first, *last_ranks})
    frame = _frame(ends, all_ranks=all_ranks)
    groups = _group(ends) if all_ranks else ((f"rank {rank}", [rank]) for rank in whole)
    row_of = {
        rank: row
        for name, ranks in groups
        for row in [TimelineRow(frame=frame, name=name)]
        for rank in ranks
    }
    history, folds = JobHistory(frame.last_iteration), {}
    work = [
        _Work(
            path=event_path(directory, rank),
            rank=rank,
            # The numbers of some ranks are the ones that people compare, and a trace has all iterations.
            frame=replace(frame, every=1) if rank in whole or trace else frame,
            has_history=last_ranks == {rank},
            has_trace=trace is not None,
        )
        for rank in row_of
    ]
    for done in _read_files(work, sum(ends[rank].num_bytes for rank in row_of)):
        rank = done.fold.rank
        folds[rank] = done.fold
        left_out.num_lines[rank] = done.fold.num_not_read
        if done.error:
            left_out.files[event_path(directory, rank).name] = done.error
        row_of[rank].add(done.row)
        history = done.history or history
        if trace is not None:
            trace(done.trace)
    if len(last_ranks) > 1:
        _join(history, directory, last_of)
    return ReportedRun(
        frame=frame,
        ends=ends,
        folds=folds,
        history=history,
        first=first,
        last=main,
        rows=[*{id(row): row for row in row_of.values()}.values()],
        left_out=left_out.describe(),
    )


def _last_ranks(
    directory: Path, first: int, ends: Mapping[int, RankEnds], main: int
) -> dict[int, int]:
    """Return the last rank of each start that the first rank knows; the main one if that left nothing."""
    found = {}
    with suppress(OSError):  # reading the whole file says it
        for line in read_lines(event_path(directory, first)):
            if b'"start"' in line and isinstance(event := decode(line), StartLine):
                last = event.world_size - 1
                found[event.incarnation] = last if last in ends else main
    return found


def _join(history: JobHistory, directory: Path, last_of: Mapping[int, int]) -> None:
    """Give a history the events of the last rank of each start, where the number of ranks has changed."""

    def own(rank: int) -> Iterator[Line]:
        events = map(decode, read_lines(event_path(directory, rank)))
        return (each for each in events if each and last_of.get(each.incarnation) == rank)

    with suppress(OSError):
        for event in merge(*map(own, {*last_of.values()}), key=attrgetter("incarnation")):
            history.take(event)


def _ranks(directory: Path) -> Sequence[int]:
    """Return the ranks that have an event file."""
    try:
        ranks = ranks_with_events(directory) if directory.is_dir() else ()
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be read: {error.strerror}. Give the directory that --moe-ft-event-log "
            "named, and run this as a user who may read it."
        ) from error
    if not ranks:
        raise ConfigError(
            f"{directory} holds no event log (rank_00000.jsonl, ...). "
            "Give the directory that --moe-ft-event-log named."
        )
    return ranks


def _all_ends(directory: Path, left_out: _LeftOut) -> dict[int, RankEnds]:
    """Return those of all ranks that left events; raise ConfigError if there are none."""
    ends = {
        rank: found
        for rank in _ranks(directory)
        if (found := _read_ends(directory, rank, left_out)) is not None
    }
    if not ends:
        if reasons := "; ".join(left_out.describe()):
            raise ConfigError(
                f"the event log in {directory} holds nothing that can be read: {reasons}. Give the "
                "directory that --moe-ft-event-log named, and run this as a user who may read it."
            )
        raise ConfigError(
            f"the event log in {directory} is empty: no rank came as far as training."
        )
    return ends


def _read_ends(directory: Path, rank: int, left_out: _LeftOut) -> RankEnds | None:
    """Return how a rank's file begins and how its last incarnation went, None if it holds no events."""
    path, fold = event_path(directory, rank), RankFold(rank=rank)
    try:
        first = next((event for line in read_lines(path) if (event := decode(line))), None)
        events = _last_events(path, fold)
        num_bytes = path.stat().st_size
    except OSError as error:
        left_out.files[path.name] = error.strerror or str(error)
        return None
    left_out.num_lines[rank] = fold.num_not_read
    if first is None or not events:
        return None
    for event in reversed(events):
        fold.take(event)
    progress = read_progress(directory, rank)
    is_last = progress is not None and progress.incarnation == fold.incarnation
    return RankEnds(
        fold=fold,
        phase=str(progress.phase) if progress and is_last else "",
        host=first.host if isinstance(first, StartLine) else "",
        first_s=first.time,
        num_bytes=num_bytes,
    )


def _last_events(path: Path, fold: RankFold) -> list[Line]:
    """Return the last events of the last incarnation, the newest first, and count what is no event."""
    events: list[Line] = []
    num_iterations = 0
    for line in read_lines_backwards(path):
        if (event := decode(line)) is None:
            fold.num_not_read += 1
            continue
        num_iterations += isinstance(event, IterationLine)
        if num_iterations > _MOST_READ or events and event.incarnation != events[0].incarnation:
            break
        if not events or not isinstance(event, RouterLoadLine):  # they are large
            events.append(event)
    return events


def _frame(ends: Mapping[int, RankEnds], *, all_ranks: bool) -> Frame:
    last_iteration = max(each.fold.iteration for each in ends.values())
    num = last_iteration * len(ends) if all_ranks else 0
    return Frame(
        first_s=min(each.first_s for each in ends.values()),
        last_s=max(each.fold.last.time for each in ends.values() if each.fold.last),
        last_iteration=last_iteration,
        every=max(1, math.ceil(num / _MOST_ITERATIONS)),
        loads_every=max(1, math.ceil(last_iteration / _MOST_LOADS)),
    )


def _group(ends: Mapping[int, RankEnds]) -> Iterator[tuple[str, list[int]]]:
    """Yield name and ranks of a row: each rank; with many ranks each node, with many nodes several ranks."""
    if len(ends) <= _MOST_ROWS:
        for rank, each in ends.items():
            yield f"rank {rank}" + (f" on {each.host}" if each.host else ""), [rank]
        return
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, each in ends.items():
        by_host[each.host].append(rank)
    if 1 < len(by_host) <= _MOST_ROWS:
        rows = [(host or "unknown", ranks) for host, ranks in by_host.items()]
    else:
        per_row, all_ranks = math.ceil(len(ends) / _MOST_ROWS), [*ends]
        rows = [("", all_ranks[at : at + per_row]) for at in range(0, len(ends), per_row)]
    for host, ranks in rows:
        yield f"{host} {named_ranks(ranks)}".strip(), ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A file to read."""

    path: Path
    rank: int
    frame: Frame
    has_history: bool
    has_trace: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """Fold and sinks of a file, as far as it could be read, and why not further."""

    fold: RankFold
    row: TimelineRow
    history: JobHistory | None
    trace: list[Part]
    error: str


_done_bytes: "Synchronized[int] | None" = None  # in a process that reads: how far all of them are


def _share_progress(done_bytes: "Synchronized[int]") -> None:
    global _done_bytes
    _done_bytes = done_bytes


def _read_file(work: _Work) -> _Done:
    frame, error = work.frame, ""
    row = TimelineRow(frame=frame, ranks=(work.rank,))
    history = JobHistory(frame.last_iteration) if work.has_history else None
    trace = TraceSink(work.rank, frame.first_s) if work.has_trace else None
    sinks = (each for each in (row, history, trace) if each is not None)
    fold = RankFold(rank=work.rank, sinks=tuple(sinks))
    try:
        lines = _counting(read_lines(work.path))
        fold.read(sampled(lines, frame.every, frame.loads_every))
    except OSError as caught:
        error = caught.strerror or str(caught)
    fold.sinks = ()
    parts = [*trace.parts()] if trace else []
    return _Done(fold=fold, row=row, history=history, trace=parts, error=error)


def _counting(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield lines, and tell now and then how many bytes they had."""
    if (total := _done_bytes) is None:
        yield from lines
        return
    while block := list(islice(lines, 10_000)):
        yield from block
        with total.get_lock():
            total.value += sum(map(len, block))


def _read_files(work: Sequence[_Work], num_bytes: int) -> Iterator[_Done]:
    """Yield the sums of files, in any order; of much to read show the progress on standard error."""
    if num_bytes <= _FEW_BYTES:
        yield from map(_read_file, work)
        return
    context = get_context("spawn")  # nothing is inherited from threads that run here
    done_bytes = context.Value("q", 0)
    num_processes = min(len(work), len(os.sched_getaffinity(0)))
    with (
        progress_bar("reading", num_bytes, in_bytes=True) as bar,
        ProcessPoolExecutor(num_processes, context, _share_progress, (done_bytes,)) as pool,
    ):
        waiting: set[Future[_Done]] = {pool.submit(_read_file, each) for each in work}
        while waiting:
            done, waiting = wait(waiting, timeout=0.2)
            bar.reach(done_bytes.value)
            for each in done:
                yield each.result()
