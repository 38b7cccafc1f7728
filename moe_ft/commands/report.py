"""`moe_ft report`: summarize a run from its event log: how far it came, how fast, and how each rank ended.

It reads files written by moe_ft/events.py, and names the parts that it cannot read.
"""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import chain, islice, pairwise, takewhile
from pathlib import Path
from statistics import mean, median
from typing import Literal

import msgspec
from tabulate import tabulate

from moe_ft.commands.pages import shares_table
from moe_ft.config.fields import size_text
from moe_ft.errors import ConfigError
from moe_ft.events import (
    Event,
    event_path,
    ranks_with_events,
    read_lines,
    read_lines_backwards,
    read_progress,
)
from moe_ft.planning.time_shares import TimeShares, TimeSpent

_NUM_AROUND_RECOVERY = 5
_NUM_RECENT = 20  # iterations of a rank, for a median
_MAX_FILES_NAMED = 8


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    """Any event; the fields of each kind are in docs/events.md."""

    time: float
    incarnation: int
    iteration: int


class _Start(_Line, frozen=True):
    pass


class _Iteration(_Line, frozen=True, kw_only=True):
    iteration_s: float
    num_tokens: float
    idle_s: float | None = None
    stall_s: float = 0.0
    loss: float | Literal["nan", "inf", "-inf"] | None = None


class _Recovery(_Line, frozen=True, kw_only=True):
    target_iteration: int
    replayed_iterations: int
    sources: dict[str, int]
    lost_tokens: int
    plt: float
    total_plt: float = 0.0
    mtl: float = 0.0
    lossy: dict[str, str] = {}
    phases_s: dict[str, float] = {}


class _Replicate(_Line, frozen=True, kw_only=True):
    state_bytes: int = 0
    gradient_bytes: int = 0


class _AtRisk(_Line, frozen=True, kw_only=True):
    tokens: dict[str, int]


class _Repair(_Line, frozen=True, kw_only=True):
    dead_ranks: tuple[int, ...]
    hung_s: dict[str, float]
    broken_iteration: int
    seconds: float


class _Fault(_Line, frozen=True, kw_only=True):
    kind: str


class _Stopped(_Line, frozen=True, kw_only=True):
    reason: str
    silent_ranks: tuple[int, ...] | None = None


class _End(_Line, frozen=True, kw_only=True):
    reason: str


_KINDS: dict[str, type[_Line]] = {
    "start": _Start,
    "iteration": _Iteration,
    "recovery": _Recovery,
    "repair": _Repair,
    "replicate": _Replicate,
    "at_risk": _AtRisk,
    "fault_injected": _Fault,
    "stopped": _Stopped,
    "end": _End,
}


@dataclass(kw_only=True, slots=True)
class _LeftOut:
    """Parts of an event log that could not be read: files and why, and by rank lines that are no events."""

    files: list[str] = field(default_factory=list)
    num_lines: dict[int, int] = field(default_factory=dict)

    def typed(self, rank: int, lines: Iterable[Event | None]) -> Iterator[_Line]:
        """Yield a rank's events with the fields that their kind has, and count the lines that are none."""
        self.num_lines[rank] = 0
        for event in lines:
            try:
                yield msgspec.convert(event, _KINDS.get(event["event"] if event else "", _Line))
            except msgspec.ValidationError:
                self.num_lines[rank] += 1

    def add_file(self, path: Path, error: OSError) -> None:
        """Note a file that cannot be read."""
        self.files.append(f"{path.name}: {error.strerror}")

    def describe(self) -> tuple[str, ...]:
        """Return a line on each part that was left out."""
        lines = self.files[:_MAX_FILES_NAMED]
        if len(self.files) > len(lines):
            lines.append(f"{len(self.files) - len(lines)} more files")
        if num_lines := sum(self.num_lines.values()):
            what = "line that is no event" if num_lines == 1 else "lines that are no events"
            lines.append(f"{num_lines} {what}, such as a killed rank leaves")
        return tuple(lines)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """Course of one rank's last incarnation.

    Attributes:
        iteration: the last one that it has done.
        phase: the last one; empty if it is not known.
        ending: how it ended.
        idle_s: median of what it waited for others in its last iterations; None if the log does not say.
    """

    rank: int
    incarnation: int
    iteration: int
    phase: str
    ending: str
    idle_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Course of a run over all its incarnations; None where the log does not say.

    Attributes:
        recoveries: rows of a table for people.
        repairs: rows of another one; each has a recovery of the same start.
        shares: of the time from the first iteration to the last.
        snapshots: rows on what one rank has sent, and on tokens that are not everywhere.
        left_out: a line on each part of the log that could not be read.
    """

    num_iterations: int
    num_incarnations: int
    first_loss: float | None
    last_loss: float | None
    iteration_s: float | None
    tokens_per_s: float | None
    ranks: tuple[RankSummary, ...]
    recoveries: tuple[dict[str, object], ...]
    repairs: tuple[dict[str, object], ...]
    shares: TimeShares
    snapshots: tuple[tuple[str, str], ...]
    left_out: tuple[str, ...]


def summarize(directory: Path) -> RunSummary:
    """Read all event files of a directory.

    Raises:
        ConfigError: if the directory holds no event log, or none that can be read.
    """
    left_out = _LeftOut()
    found = (_summarize_rank(directory, rank, left_out) for rank in _ranks(directory))
    summaries = tuple(filter(None, found))
    if not summaries:
        if reasons := "; ".join(left_out.describe()):
            raise ConfigError(
                f"the event log in {directory} holds nothing that can be read: {reasons}. Give the "
                "directory that --moe-ft-event-log named, and run this as a user who may read it."
            )
        raise ConfigError(f"the event log in {directory} is empty: no rank has trained.")
    # Every rank has the times; the loss is on the last stage, where the last rank always is.
    events = _read_course(directory, summaries[-1].rank, left_out)
    courses = [event for event in events if isinstance(event, _Start | _Iteration)]
    # The first iteration of a start pays for warming up.
    steady = [
        event
        for before, event in pairwise(courses)
        if isinstance(before, _Iteration) and isinstance(event, _Iteration)
    ]
    losses = {event.iteration: loss for event in courses if (loss := _loss(event)) is not None}
    iteration_s = median(event.iteration_s for event in steady) if steady else None
    num_tokens = median(event.num_tokens for event in steady) if steady else None
    return RunSummary(
        num_iterations=max(summary.iteration for summary in summaries),
        num_incarnations=1 + max(summary.incarnation for summary in summaries),
        first_loss=losses[min(losses)] if losses else None,
        last_loss=losses[max(losses)] if losses else None,
        iteration_s=iteration_s,
        tokens_per_s=num_tokens / iteration_s if iteration_s and num_tokens else None,
        ranks=summaries,
        recoveries=tuple(_summarize_recoveries(events)),
        repairs=tuple(_summarize_repair(event) for event in events if isinstance(event, _Repair)),
        shares=_share_time(events),
        snapshots=tuple(_summarize_snapshots(events)),
        left_out=left_out.describe(),
    )


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


def _read_course(directory: Path, rank: int, left_out: _LeftOut) -> list[_Line]:
    """Return the events of a rank that a summary is made of."""
    path = event_path(directory, rank)
    course: list[_Line] = []
    try:
        for event in left_out.typed(rank, read_lines(path)):
            if isinstance(event, _Start | _Iteration | _Recovery | _Repair | _Replicate | _AtRisk):
                course.append(event)
    except OSError as error:
        left_out.add_file(path, error)
    return course


def _loss(event: _Line) -> float | None:
    """Return the loss that an event has; JSON cannot write all of them as numbers."""
    if not isinstance(event, _Iteration) or event.loss is None:
        return None
    return float(event.loss)


def _share_time(events: Sequence[_Line]) -> TimeShares:
    """Return what the time of a run went into."""
    spent, replay_s, is_first = TimeSpent(), 0.0, True
    for event in events:
        if isinstance(event, _Start):
            is_first = True
        elif isinstance(event, _Recovery):
            replay_s += event.phases_s.get("replay", 0.0)
        elif isinstance(event, _Iteration):
            times = event.time, event.iteration_s, event.stall_s
            spent.add(event.iteration, *times, replay_s if is_first else None)
            replay_s, is_first = 0.0, False
    return TimeShares.of(spent.seconds)


def show(value: float | None, form: str = ".3f") -> str:
    """Return a number as text, a dash where the log does not say."""
    return "-" if value is None else format(value, form)


def _summarize_recoveries(events: Sequence[_Line]) -> Iterator[dict[str, object]]:
    """Yield the row of each recovery: what it cost, and the loss around it."""
    losses: dict[int, float] = {}  # as the last attempt at each iteration had them
    for position, event in enumerate(events):
        if (own := _loss(event)) is not None:
            losses[event.iteration] = own
        if not isinstance(event, _Recovery):
            continue
        target = event.target_iteration
        losses = {iteration: loss for iteration, loss in losses.items() if iteration <= target}
        before = [losses[iteration] for iteration in sorted(losses)][-_NUM_AROUND_RECOVERY:]
        after = [
            loss
            for line in events[position:]
            if line.incarnation == event.incarnation and (loss := _loss(line)) is not None
        ][:_NUM_AROUND_RECOVERY]
        yield {
            "start": event.incarnation,
            "continued from": target,
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


def _summarize_snapshots(events: Sequence[_Line]) -> Iterator[tuple[str, str]]:
    """Yield what the last rank has sent to peers, and what failures would have lost, as rows for people."""
    sent = [event for event in events if isinstance(event, _Replicate)]
    if state := sum(each.state_bytes for each in sent):
        gradients = sum(each.gradient_bytes for each in sent)
        yield "state, gradients to peers", f"{size_text(state)}, {size_text(gradients)} (last rank)"
    risks = [event.tokens for event in events if isinstance(event, _AtRisk)]
    for target in sorted({*chain(*risks)}):
        yield (
            f"tokens not in {target} (mean)",
            f"{mean(each[target] for each in risks if target in each):,.0f}",
        )


def _summarize_repair(repair: _Repair) -> dict[str, object]:
    """Return the row of a repair. Iterations are counted from 1, as log lines do."""
    return {
        "start": repair.incarnation,
        "replaced ranks": ", ".join(map(str, repair.dead_ranks)),
        "that hung": ", ".join(repair.hung_s) or "-",
        "in iteration": repair.broken_iteration + 1,
        "seconds": f"{repair.seconds:.1f}",
    }


def _summarize_rank(directory: Path, rank: int, left_out: _LeftOut) -> RankSummary | None:
    """Return how a rank's last incarnation went, None if its file holds no events."""
    path = event_path(directory, rank)
    lines = left_out.typed(rank, read_lines_backwards(path))
    try:
        last = next(lines, None)
        if last is None:
            return None
        own = takewhile(lambda line: line.incarnation == last.incarnation, chain([last], lines))
        steps = (line for line in own if isinstance(line, _Start | _Iteration))
        recent = list(islice(steps, _NUM_RECENT))
    except OSError as error:
        left_out.add_file(path, error)
        return None
    progress = read_progress(directory, rank)
    return RankSummary(
        rank=rank,
        incarnation=last.incarnation,
        iteration=recent[0].iteration if recent else 0,
        phase=str(progress.phase) if progress and progress.incarnation == last.incarnation else "",
        ending=_ending(last),
        idle_s=_median_idle(recent),
    )


def _ending(last: _Line) -> str:
    match last:
        case _End(reason=reason):
            return reason
        case _Stopped(reason=reason, silent_ranks=silent):
            missed = f"; heard nothing from {', '.join(map(str, silent))}" if silent else ""
            return f"stopped: {reason[:60]}{missed}"
        case _Fault(kind=kind):
            return f"fell silent after an injected {kind}"
    return "fell silent: running, killed or hung"


def add_report_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its argument."""
    parser = commands.add_parser("report", help="summarize the event log of a run")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of --moe-ft-event-log")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    directory = Path(options.run_dir)
    print(render(summarize(directory), directory))
    return 0


def render(summary: RunSummary, directory: Path) -> str:
    """Return the summary as text; ranks are listed if one did not finish."""
    rows = [
        ("iterations", str(summary.num_iterations)),
        ("starts", _starts(summary)),
        ("loss at start", show(summary.first_loss)),
        ("loss at end", show(summary.last_loss)),
        ("seconds per iteration (median)", show(summary.iteration_s)),
        ("tokens per second", show(summary.tokens_per_s, ",.0f")),
        ("seconds idle, by rank (median)", _idle(summary)),
        *summary.snapshots,
        ("events", str(directory)),
    ]
    text = tabulate(rows, tablefmt="simple", disable_numparse=True)
    text += "\n\n" + shares_table({"share": summary.shares})
    for table in filter(None, (summary.recoveries, summary.repairs)):
        text += "\n\n" + tabulate(table, headers="keys", disable_numparse=True)
    if any(rank.ending != "finished" for rank in summary.ranks):
        ranks = map(astuple, summary.ranks)
        headers = ("rank", "start", "iterations done", "last phase", "how it ended", "idle s")
        text += "\n\n" + tabulate(ranks, headers=headers, tablefmt="simple", disable_numparse=True)
    if summary.left_out:
        text += "\n\n" + "\n".join(f"left out: {line}" for line in summary.left_out)
    return text


def _median_idle(steps: Sequence[_Line]) -> float | None:
    iterations = (step for step in steps if isinstance(step, _Iteration))
    known = [step.idle_s for step in iterations if step.idle_s is not None]
    return median(known) if known else None


def _idle(summary: RunSummary) -> str:
    known = [each.idle_s for each in summary.ranks if each.idle_s is not None]
    return f"{min(known):.3f} to {max(known):.3f}" if known else "-"


def _starts(summary: RunSummary) -> str:
    if not summary.repairs:
        return str(summary.num_incarnations)
    return f"{summary.num_incarnations}, {len(summary.repairs)} of them repairs in place"
