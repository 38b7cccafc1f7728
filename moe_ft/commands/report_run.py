"""The event log of a run, read once: how each rank ended, and the sums of all ranks.

Files are read by several processes, each line once. report_rank.py has what one file gives. How much of it is
kept does not depend on the length of the log: ranks are added up by node where there are many.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import chain, islice, takewhile
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from operator import attrgetter
from pathlib import Path
from statistics import median

from moe_ft.bars import progress_bar
from moe_ft.commands.report_course import Course
from moe_ft.commands.report_events import LeftOut, Sampling
from moe_ft.commands.report_rank import Frame, RankReader, RankSums
from moe_ft.errors import ConfigError
from moe_ft.event_lines import End, Fault, Hang, Iteration, Line, Start, Stopped, Verdict, decode
from moe_ft.events import (
    event_path,
    ranks_with_events,
    read_lines,
    read_lines_backwards,
    read_progress,
)
from moe_ft.loop.stragglers import MOST_TIMES, OwnTimes, Straggler, find_stragglers
from moe_ft.planning.time_shares import TimeShares
from moe_ft.verdicts import named_ranks

_NUM_RECENT = 20  # iterations of a rank, for a median
_MOST_READ = (
    8 * MOST_TIMES
)  # iterations that are read for own times, which a GPU tells in one of eight
_MOST_ROWS = 64
_MOST_ITERATIONS = 3_000_000  # of all ranks, whose lines are decoded
_MOST_LOADS = 88  # iterations whose loads are decoded
_FEW_BYTES = 32 << 20  # that one process reads as fast as several


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """Course of one rank's last incarnation.

    Attributes:
        iteration: the last one that it has done.
        phase: the last one; empty if it is not known.
        ending: how it ended.
        idle_s: median of what it waited for others in its last iterations; None if the log does not say.
        own: its own times in them.
    """

    rank: int
    incarnation: int
    iteration: int
    phase: str
    ending: str
    idle_s: float | None = None
    own: OwnTimes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ends:
    """Beginning and end of a rank's file."""

    summary: RankSummary
    host: str
    first_s: float
    last_s: float
    num_bytes: int
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that share a row of the timeline."""

    name: str
    ranks: tuple[int, ...]
    sums: RankSums = field(default_factory=lambda: RankSums(num_ranks=0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run over all its incarnations.

    Attributes:
        ranks: those that left events, ascending.
        course: of the job, as the last rank of each start tells it.
        first_sums: sums of the first rank, which every start has.
        groups: of ranks, with their sums; only the first and last rank's where the others were not read.
        first_hosts: where all ranks were first.
        left_out: a line on each part of the log that could not be read.
        verdict: on the end of the last start; empty if it has not failed, or nobody has told.
    """

    frame: Frame
    ranks: tuple[RankSummary, ...]
    course: Course
    first_sums: RankSums
    groups: tuple[Group, ...]
    first_hosts: frozenset[str]
    left_out: tuple[str, ...]
    verdict: str

    @property
    def shares(self) -> TimeShares:
        """Shares of the time from the first iteration to the last."""
        return TimeShares.of(self.first_sums.seconds)

    @property
    def num_iterations(self) -> int:
        """Iterations that the rank has done that has done most."""
        return max(each.iteration for each in self.ranks)

    @property
    def hangs(self) -> dict[str, int] | None:
        """Hangs by section of the loop; None if not all ranks were read."""
        total = self.total
        return dict(total.hangs) if total.num_ranks == len(self.ranks) else None

    @property
    def stragglers(self) -> list[Straggler]:
        """The slowest ranks of the last start, as it ended."""
        start = self.course.last_start
        has_experts = bool(start and start.num_experts)
        newest = max(each.incarnation for each in self.ranks)
        own = [each.own for each in self.ranks if each.own and each.incarnation == newest]
        return find_stragglers(replace(each, has_experts=has_experts) for each in own)

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts on which ranks ran, in all starts of those that were read."""
        return tuple(sorted(self.first_hosts | self.total.hosts))

    @property
    def total(self) -> RankSums:
        """Sums of all ranks that were read."""
        total = RankSums(num_ranks=0)
        for group in self.groups:
            total.add(group.sums)
        return total


def read_run(directory: Path, *, all_ranks: bool) -> Run:
    """Read the event files of a directory: their ends, the first and last rank's whole, and all if wanted.

    Raises:
        ConfigError: if the directory holds no event log, or none that can be read.
    """
    left_out = LeftOut()
    ends = _all_ends(directory, left_out)
    # Every rank has the times; the loss is on the last stage, where the last rank of a start always is.
    newest = max(each.summary.incarnation for each in ends.values())
    there = [rank for rank, each in ends.items() if each.summary.incarnation == newest]
    first, main = min(there), max(there)
    last_of = _last_ranks(directory, first, ends, main)
    last_ranks = {main, *last_of.values()}
    whole = sorted({first, *last_ranks})
    frame = _frame(ends, all_ranks=all_ranks)
    rows = (
        _group(ends) if all_ranks else (Group(name=f"rank {each}", ranks=(each,)) for each in whole)
    )
    groups = tuple(rows)
    of_rank = {rank: group for group in groups for rank in group.ranks}
    course, first_sums = Course(frame.last_iteration), RankSums()
    work = [
        _Work(
            directory=directory,
            rank=rank,
            frame=frame,
            is_whole=rank in whole,
            has_course=last_ranks == {rank},
        )
        for rank in of_rank
    ]
    num_bytes = sum(ends[rank].num_bytes for rank in of_rank)
    for done in _read_files(work, num_bytes):
        left_out.num_lines[done.rank] = done.num_others
        if done.error is not None:
            left_out.add_file(event_path(directory, done.rank), done.error)
        of_rank[done.rank].sums.add(done.sums)
        if done.rank == first:
            first_sums = done.sums
        if done.course is not None:
            course = done.course
    if len(last_ranks) > 1:
        _join(course, directory, last_of)
    return Run(
        frame=frame,
        ranks=tuple(each.summary for each in ends.values()),
        course=course,
        first_sums=first_sums,
        groups=groups,
        first_hosts=frozenset(each.host for each in ends.values() if each.host),
        left_out=left_out.describe(),
        verdict="".join(each.words for rank in there if (each := ends[rank].verdict)),
    )


def _last_ranks(directory: Path, first: int, ends: dict[int, _Ends], main: int) -> dict[int, int]:
    """Return the last rank of each start that the first rank knows; the main one if that left nothing."""
    found = {}
    with suppress(OSError):  # reading the whole file says it
        for line in read_lines(event_path(directory, first)):
            if b'"start"' in line and isinstance(event := decode(line), Start):
                last = event.world_size - 1
                found[event.incarnation] = last if last in ends else main
    return found


def _join(course: Course, directory: Path, last_of: dict[int, int]) -> None:
    """Give a course the events of the last rank of each start, where the number of ranks has changed."""

    def own(rank: int) -> Iterator[Line]:
        lines = LeftOut().typed(rank, read_lines(event_path(directory, rank)))
        return (each for each in lines if last_of.get(each.incarnation) == rank)

    with suppress(OSError):
        for event in merge(*map(own, {*last_of.values()}), key=attrgetter("incarnation")):
            course.take(event)


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


def _all_ends(directory: Path, left_out: LeftOut) -> dict[int, _Ends]:
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


def _read_ends(directory: Path, rank: int, left_out: LeftOut) -> _Ends | None:
    """Return how a rank's file begins and how its last incarnation went, None if it holds no events."""
    path = event_path(directory, rank)
    try:
        first = next(LeftOut().typed(rank, read_lines(path)), None)
        lines = left_out.typed(rank, read_lines_backwards(path))
        last = next(lines, None)
        if first is None or last is None:
            return None
        own = takewhile(lambda line: line.incarnation == last.incarnation, chain([last], lines))
        known = (line for line in own if isinstance(line, Start | Iteration | Verdict))
        recent = list(islice(known, _MOST_READ + 1))
        verdict = next((each for each in recent if isinstance(each, Verdict)), None)
        recent = [each for each in recent if each is not verdict]
        num_bytes = path.stat().st_size
    except OSError as error:
        left_out.add_file(path, error)
        return None
    progress = read_progress(directory, rank)
    iterations = [each for each in recent if isinstance(each, Iteration)]
    idle = [each.idle_s for each in iterations[:_NUM_RECENT] if each.idle_s is not None]
    summary = RankSummary(
        rank=rank,
        incarnation=last.incarnation,
        iteration=recent[0].iteration if recent else 0,
        phase=str(progress.phase) if progress and progress.incarnation == last.incarnation else "",
        ending=_ending(last),
        idle_s=median(idle) if idle else None,
        own=_own_times(rank, iterations, has_first=len(recent) < _MOST_READ),
    )
    host = first.host if isinstance(first, Start) else ""
    return _Ends(
        summary=summary,
        host=host,
        first_s=first.time,
        last_s=last.time,
        num_bytes=num_bytes,
        verdict=verdict,
    )


def _own_times(rank: int, iterations: Sequence[Iteration], *, has_first: bool) -> OwnTimes | None:
    """Return the own times of iterations, the newest first, without the first one of a start."""
    warm = iterations[:-1] if has_first else iterations
    known = {each.iteration: each.own_s for each in warm if each.own_s is not None}
    newest = dict(islice(known.items(), MOST_TIMES))
    stage = iterations[0].stage if iterations else 0
    return OwnTimes(rank=rank, stage=stage, has_experts=False, seconds=newest)


def _ending(last: Line) -> str:
    match last:
        case End(reason=reason):
            return reason
        case Stopped(reason=reason, silent_ranks=silent):
            missed = f"; heard nothing from {', '.join(map(str, silent))}" if silent else ""
            return f"stopped: {reason[:60]}{missed}"
        case Hang(section=section, silent_s=silent_s, limit_s=limit_s):
            return (
                f"hung in its {section}: {silent_s:.0f} s without progress, limit {limit_s:.0f} s"
            )
        case Fault(kind=kind):
            return f"fell silent after an injected {kind}"
    return "fell silent: running, killed or hung"


def _frame(ends: dict[int, _Ends], *, all_ranks: bool) -> Frame:
    last_iteration = max(each.summary.iteration for each in ends.values())
    num = last_iteration * len(ends) if all_ranks else 0
    return Frame(
        first_s=min(each.first_s for each in ends.values()),
        last_s=max(each.last_s for each in ends.values()),
        last_iteration=last_iteration,
        sampling=Sampling(
            every=max(1, math.ceil(num / _MOST_ITERATIONS)),
            loads_every=max(1, math.ceil(last_iteration / _MOST_LOADS)),
        ),
    )


def _group(ends: dict[int, _Ends]) -> Iterator[Group]:
    """Yield a row for each rank; with many ranks for each node, with many nodes for several ranks."""
    if len(ends) <= _MOST_ROWS:
        for rank, each in ends.items():
            yield Group(
                name=f"rank {rank}" + (f" on {each.host}" if each.host else ""), ranks=(rank,)
            )
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
        yield Group(name=f"{host} {named_ranks(ranks)}".strip(), ranks=tuple(ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Work:
    """A file to read."""

    directory: Path
    rank: int
    frame: Frame
    is_whole: bool
    has_course: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Done:
    """Sums of a file, as far as it could be read."""

    rank: int
    sums: RankSums
    course: Course | None
    num_others: int
    error: OSError | None


_done_bytes: "Synchronized[int] | None" = None  # in a process that reads: how far all of them are


def _share_progress(done_bytes: "Synchronized[int]") -> None:
    global _done_bytes
    _done_bytes = done_bytes


def _read_file(work: _Work) -> _Done:
    frame = work.frame
    if work.is_whole:  # its numbers are the ones that people compare
        frame = replace(frame, sampling=replace(frame.sampling, every=1))
    course = Course(frame.last_iteration) if work.has_course else None
    reader, error = RankReader(work.rank, frame, course), None
    try:
        reader.read(_counting(read_lines(event_path(work.directory, work.rank))))
    except OSError as caught:
        error = caught
    return _Done(
        rank=work.rank, sums=reader.sums, course=course, num_others=reader.num_others, error=error
    )


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
