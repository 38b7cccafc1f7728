"""`moe_ft watch`: live view of a run in a terminal, from its event log.

It reads what the ranks append, and never from the start again (moe_ft/loop/course.py). `moe_ft report` says
more about a run that has ended.
"""

import argparse
import os
import select
import socket
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moe_ft.commands.parsers import Commands, add_command
from moe_ft.errors import ConfigError
from moe_ft.events import ranks_with_events, read_progress
from moe_ft.loop.course import FollowedRun, RankCourse, Tier
from moe_ft.planning.time_shares import Spent, TimeShares
from moe_ft.processes import has_ended
from moe_ft.saying import escape

_MOST_BYTES = 16 << 20  # of each file at a time: a long log is shown while it is read
_SILENT_S = 30.0  # without an event, at least, before a rank is called silent
_SILENT_ITERATIONS = 10
_PLAIN_WIDTH = 160
_MOST_RANKS = 16  # of a view that has no height
_RESTART_S = 60.0  # after the last event, before a run whose ranks have stopped is called ended


def add_watch_command(commands: Commands) -> None:
    """Add the command and its arguments."""
    parser = add_command(
        commands,
        "watch",
        "show a run while it trains, from its event log",
        "Progress and speed, ranks, checkpoints and failures; q quits. On no terminal it prints a view after "
        "the other, until the run has ended.",
        "runs/my_job/events",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of --moe-ft-event-log")
    parser.add_argument("--once", action="store_true", help="print the view once, and end")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="time between two views; default: 1",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not options.interval > 0:
        raise ConfigError(
            f"--interval={options.interval} must be more than 0. Give a number of seconds."
        )
    watch = Watch(Path(options.run_dir))
    raw = getattr(sys.stdout, "raw", sys.stdout)  # what is shown is escaped already
    console = Console(file=raw)
    if not console.is_terminal:
        console = Console(file=raw, width=_PLAIN_WIDTH, no_color=True)
    try:
        if options.once:
            while watch.look():
                pass
            console.print(watch.view())
        elif console.is_terminal:
            _show(watch, console, options.interval)
        else:
            _print_views(watch, console, options.interval)
    except KeyboardInterrupt:
        pass
    return 0


def _show(watch: "Watch", console: Console, interval_s: float) -> None:
    """Show views on the whole screen until `q` is pressed."""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            is_behind = watch.look()
            live.update(watch.view(console.height, "q quits"), refresh=True)
            if pressed(0.0 if is_behind else interval_s) == "q":
                return


def _print_views(watch: "Watch", console: Console, interval_s: float) -> None:
    """Print views one after the other until the run has ended."""
    while True:
        while watch.look():
            pass
        console.print(watch.view())
        if watch.has_ended:
            return
        time.sleep(interval_s)
        console.print()


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Give a function that waits for a key, at most so many seconds; leave the terminal as it was."""
    if not sys.stdin.isatty():
        yield _wait
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _read_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _read_key(seconds: float) -> str:
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    if not (key := os.read(sys.stdin.fileno(), 1)):  # the terminal has gone
        raise KeyboardInterrupt
    return key.decode(errors="replace")


class Watch:
    """Run that is watched."""

    def __init__(self, directory: Path) -> None:
        """Begin.

        Raises:
            ConfigError: if the directory holds no event log.
        """
        self._directory, self._course = directory, FollowedRun(directory)
        self._find_ranks()
        if not self._course.ranks:
            raise ConfigError(
                f"{directory} holds no event log (rank_00000.jsonl, ...). Give the directory that "
                "--moe-ft-event-log named, once the run has begun."
            )

    def _find_ranks(self) -> None:
        try:
            self._course.add(ranks_with_events(self._directory))
        except (FileNotFoundError, NotADirectoryError):
            pass  # no log
        except OSError as error:
            raise ConfigError(
                f"{self._directory} cannot be read: {error.strerror}. Give the directory that "
                "--moe-ft-event-log named, and run this as a user who may read it."
            ) from error

    def look(self) -> bool:
        """Read on; return whether more of the log is there to read."""
        self._find_ranks()
        self._course.read(_MOST_BYTES)
        return self._course.unread_bytes > 0

    @property
    def has_ended(self) -> bool:
        """True if all ranks have ended, and no restart is to be expected."""
        ranks = _of_last_start(self._course.ranks)
        if all(each.is_finished for each in ranks):
            return True
        age_s = time.time() - max(each.time_s for each in ranks)
        return age_s > _RESTART_S and all(each.ending or _is_gone(each) for each in ranks)

    def view(self, height: int | None = None, hint: str = "") -> RenderableType:
        """Return what there is to see: in so many lines, or with at most 16 ranks; troubled ones first."""
        ranks = self._course.ranks
        head = Table.grid(padding=(0, 2))
        lines = [*self._lines(ranks)]
        for name, value in lines:
            head.add_row(Text(name, style="bold"), value)
        most = _MOST_RANKS if height is None else max(1, height - len(lines) - 5)
        shown = sorted(ranks, key=lambda each: (not _is_trouble(each), each.rank))[:most]
        table = self._table(sorted(shown, key=lambda each: each.rank))
        rest = len(ranks) - len(shown)
        notes = [f"{rest} more ranks" if rest else "", hint]
        foot = Text(" · ".join(note for note in notes if note), style="dim")
        return Group(head, Text(), table, *([foot] if foot else []))

    def _lines(self, ranks: Sequence[RankCourse]) -> Iterator[tuple[str, Text]]:
        """Yield name and value of what is said of the whole run."""
        yield "run", Text(escape(str(self._directory)))
        yield "state", self._state(ranks)
        yield "iteration", Text(_speed(ranks))
        incarnation = max(each.incarnation for each in ranks)
        num_repairs = max(each.num_repairs for each in ranks)
        yield "starts", Text(f"{incarnation + 1}, {num_repairs} of them repairs in place")
        yield "last recovery", Text(escape(_recovery(ranks)))
        yield "last repair", Text(_repair(ranks))
        yield "lost tokens", Text(f"{max(each.lost_tokens for each in ranks):,}")
        seconds = {use: sum(each.spent.seconds[use] for each in ranks) for use in Spent}
        shares = TimeShares.of(seconds)
        yield "time", Text(", ".join(f"{use} {shares[use]:.1%}" for use in Spent))
        if troubles := [*self._troubles(ranks)]:
            yield "trouble", Text(escape("\n".join(troubles)), style="yellow")
        if self._course.unread_bytes:
            yield "log", Text(f"{self._course.unread_bytes / 2**20:,.0f} MiB are still to be read")

    def _state(self, ranks: Sequence[RankCourse]) -> Text:
        ranks = _of_last_start(ranks)
        missing = max((each.start.world_size for each in ranks if each.start), default=0) - len(
            ranks
        )
        if self.has_ended:
            endings = sorted({each.ending or "killed" for each in ranks})
            return Text(escape(f"the run has ended: {'; '.join(endings)}"), style="bold")
        if all(each.ending or _is_gone(each) for each in ranks):
            return Text("all ranks have stopped; a restart may follow", style="yellow")
        quiet_s = time.time() - max(each.time_s for each in ranks)
        if all(map(_is_silent, ranks)):
            return Text(f"no rank has written anything for {quiet_s:,.0f} s", style="red")
        note = f"; nothing yet from {missing} of the ranks" if missing > 0 else ""
        return Text(f"running on {len(ranks)} ranks{note}", style="green")

    def _troubles(self, ranks: Sequence[RankCourse]) -> Iterator[str]:
        num_degraded = sum(sum(each.degraded.values()) for each in ranks)
        events = [each.last_degraded for each in ranks if each.last_degraded]
        if events:
            last = max(events, key=lambda event: event.time)
            reason = last.reason.splitlines()[0] if last.reason else ""
            yield f"{num_degraded} failures of checkpointing, the last of {last.part}: {reason}"
        if num_skipped := sum(each.num_skipped for each in ranks):
            yield f"{num_skipped} snapshots were due and left out"
        if num_lines := sum(each.num_not_read for each in ranks):
            yield f"{num_lines} lines of the log are no events, such as a killed rank leaves"
        for rank, reason in self._course.problems.items():
            yield f"the log of rank {rank} cannot be read: {reason}"

    def _table(self, ranks: Sequence[RankCourse]) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("rank", "host", "start", "iteration", "s/iteration", "stall ms", "idle ms"):
            table.add_column(name, justify="left" if name == "host" else "right", no_wrap=True)
        for tier in Tier:
            table.add_column(tier, justify="right", no_wrap=True)
        table.add_column("state", overflow="ellipsis", no_wrap=True)
        for each in ranks:
            table.add_row(*self._row(each))
        return table

    def _row(self, each: RankCourse) -> Iterator[RenderableType]:
        yield str(each.rank)
        yield Text(escape(each.start.host) if each.start else "-")
        yield str(each.incarnation)
        yield str(each.iteration)
        yield _number(each.iteration_s, 1.0, ".3f")
        yield _number(each.recent_stall_s, 1e3, ".1f")
        yield _number(each.recent_idle_s, 1e3, ".0f")
        for traffic in each.tiers.values():
            yield str(traffic.iteration) if traffic.num else "-"
        yield Text(escape(self._rank_state(each)), style="red" if _is_trouble(each) else "")

    def _rank_state(self, each: RankCourse) -> str:
        if each.ending:
            return each.ending
        progress = read_progress(self._directory, each.rank)
        phase = str(progress.phase) if progress else "its start"
        if _is_gone(each):
            return f"its process has gone, in {phase}"
        if _is_silent(each):
            return f"silent for {time.time() - each.time_s:,.0f} s, in {phase}"
        return phase


def _is_gone(each: RankCourse) -> bool:
    """Return whether the process of a rank is known to have ended; it must be of this host."""
    start = each.start
    return bool(start and start.pid and start.host == socket.gethostname() and has_ended(start.pid))


def _of_last_start(ranks: Sequence[RankCourse]) -> list[RankCourse]:
    """Return the ranks of the last start, which may have fewer than those before it."""
    newest = max((each.incarnation for each in ranks), default=0)
    return [each for each in ranks if each.incarnation == newest]


def _is_silent(each: RankCourse) -> bool:
    usual_s = max(_SILENT_S, _SILENT_ITERATIONS * (each.iteration_s or 0.0))
    return time.time() - each.time_s > usual_s


def _is_trouble(each: RankCourse) -> bool:
    return not each.is_finished and (bool(each.ending) or _is_gone(each) or _is_silent(each))


def _number(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(factor * value, form)


def _speed(ranks: Sequence[RankCourse]) -> str:
    """Return how far the run is, and how fast."""
    planned = max((each.start.train_iterations or 0 for each in ranks if each.start), default=0)
    parts = [f"{max(each.iteration for each in ranks)}" + (f" of {planned}" if planned else "")]
    seconds = [each.iteration_s for each in ranks if each.iteration_s]
    if seconds:
        parts.append(f"{1 / max(seconds):.2f} iterations/s")
    tokens = [each.tokens_per_s for each in ranks if each.tokens_per_s is not None]
    if tokens:
        parts.append(f"{min(tokens):,.0f} tokens/s")
    with_loss = [each for each in ranks if each.loss is not None]
    if with_loss:
        parts.append(f"loss {max(with_loss, key=lambda each: each.time_s).loss:.4f}")
    return " · ".join(parts)


def _recovery(ranks: Sequence[RankCourse]) -> str:
    events = [each.recovery for each in ranks if each.recovery]
    if not events:
        return "none"
    last = max(events, key=lambda event: event.time)
    sources = ", ".join(f"{num} units from {tier}" for tier, num in last.sources.items())
    return (
        f"{_clock(last.time)}, continued after iteration {last.target_iteration}: {sources or 'no units'}, "
        f"{last.replayed_iterations} iterations replayed, {last.lost_tokens:,} tokens lost"
    )


def _repair(ranks: Sequence[RankCourse]) -> str:
    events = [each.repair for each in ranks if each.repair]
    if not events:
        return "none"
    last = max(events, key=lambda event: event.time)
    dead = ", ".join(map(str, last.dead_ranks))
    return (
        f"{_clock(last.time)}, rank {dead} in iteration {last.broken_iteration + 1}, "
        f"{last.seconds:.1f} s until that was finished"
    )


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
