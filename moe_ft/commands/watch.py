"""`moe_ft watch`: lines on a whole run and a row for each rank, while it trains, until `q` is pressed.

It reads what the ranks append, and never from the start again (moe_ft/loop/event_fold.py).
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

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from moe_ft.commands.parsers import Commands, add_command
from moe_ft.errors import ConfigError
from moe_ft.event_lines import CorruptionLine, DegradedLine, RepairLine, SkippedLine, SnapshotTier
from moe_ft.events import ranks_with_events, read_progress
from moe_ft.loop.event_fold import FollowedRun, RankFold
from moe_ft.loop.stragglers import find_stragglers
from moe_ft.planning.time_shares import Spent, TimeShares
from moe_ft.processes import has_ended
from moe_ft.saying import escape, some_of

_PLAIN_WIDTH = 160
_MOST_BYTES = 16 << 20  # of each file at a time: a long log is shown while it is read
_SILENT_S = 30.0  # without an event, at least, before a rank is called silent
_SILENT_ITERATIONS = 10
_SLOW_S, _SLOW_ITERATIONS = 5.0, 10  # without an event, before the state line says so
_MOST_RANKS = 16  # of a view that has no height
_MOST_NAMED = 4
_MOST_ENDINGS = 3
_RESTART_S = 60.0  # after the last event, before a run whose ranks have stopped is called ended
_STATE_WIDTH = 28  # of the states that columns make room for
# Columns that a narrow terminal does without.
_DROPPED_FIRST = (
    *("idle ms", "stall ms", "start", "host", "s/iteration"),
    *(SnapshotTier.PEERS, SnapshotTier.STORAGE, SnapshotTier.MEMORY),
)
_AFTER_A_DEATH = {
    "repair": "being repaired in place",
    "restart": "all ranks start again",
    "end": "the job ends",
}
_BARS = "▁▂▃▄▅▆▇█"
_BESIDE_BARS = 34  # letters of the line that has them


class Watch:
    """Run that is watched."""

    def __init__(self, directory: Path) -> None:
        """Begin.

        Raises:
            ConfigError: if the directory holds no event log.
        """
        self._directory = directory
        self._run = FollowedRun(directory)
        self._find_ranks()
        if not self._run.ranks:
            raise ConfigError(
                f"{directory} holds no event log (rank_00000.jsonl, ...). Give the directory that "
                "--moe-ft-event-log named, once the run has begun."
            )

    def _find_ranks(self) -> None:
        try:
            self._run.add(ranks_with_events(self._directory))
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
        self._run.read(_MOST_BYTES)
        return self._run.unread_bytes > 0

    @property
    def has_ended(self) -> bool:
        """True if all ranks have ended, and no restart is to be expected."""
        ranks = _of_last_start(self._run.ranks)
        if all(each.is_finished for each in ranks):
            return True
        age_s = time.time() - max(each.time_s for each in ranks)
        return age_s > _RESTART_S and all(each.ending or _is_gone(each) for each in ranks)

    def view(
        self, console: Console, *, height: int | None = None, hint: str = ""
    ) -> RenderableType:
        """Return what there is to see in the width of a console; of many ranks the troubled ones.

        Args:
            height: lines that there are; without a limit at most 16 ranks are shown.
        """
        ranks = self._run.ranks
        head = Table.grid(padding=(0, 2, 0, 0))
        head.add_column(no_wrap=True)
        head.add_column(overflow="fold")
        for name, value in self._lines(ranks, console.width):
            head.add_row(Text(name, style="bold"), value)
        most = _MOST_RANKS
        if height is not None:
            most = max(1, height - len(console.render_lines(head, pad=False)) - 4)
        shown = sorted(ranks, key=lambda each: (not _is_trouble(each), each.rank))[:most]
        table = self._table(sorted(shown, key=lambda each: each.rank), console.width)
        rest = len(ranks) - len(shown)
        notes = [f"{rest} more ranks" if rest else "", hint]
        foot = Text(" · ".join(note for note in notes if note), style="dim")
        return Group(head, Text(), table, *([foot] if foot else []))

    def _lines(self, ranks: Sequence[RankFold], width: int) -> Iterator[tuple[str, Text]]:
        """Yield name and value of what is said of the whole run."""
        yield "run", Text(escape(str(self._directory)))
        yield "state", self._state(ranks)
        yield "iteration", Text(_speed(ranks))
        if history := _sparkline(ranks[0], max(1, width - _BESIDE_BARS)):
            yield "seconds of each", Text(history, style="cyan")
        incarnation = max(each.incarnation for each in ranks)
        num_repairs = max(each.num(RepairLine) for each in ranks)
        yield "starts", Text(f"{incarnation + 1}, {num_repairs} of them repairs in place")
        yield "last recovery", Text(escape(_recovery(ranks)))
        yield "last repair", Text(_repair(ranks))
        if any(each.tiers[SnapshotTier.STORAGE].num for each in ranks):
            yield "on storage", Text(_stored(ranks))
        yield "lost tokens", Text(f"{max(each.lost_tokens for each in ranks):,}")
        seconds = {use: sum(each.spent.seconds[use] for each in ranks) for use in Spent}
        shares = TimeShares.of(seconds)
        yield "time", Text(", ".join(f"{use} {shares[use]:.1%}" for use in Spent))
        slowest = find_stragglers(each.own_times for each in _of_last_start(ranks))
        if slowest:
            yield "slowest ranks", Text("\n".join(map(str, slowest)), style="yellow")
        if troubles := [*self._troubles(ranks)]:
            yield "trouble", Text(escape("\n".join(troubles)), style="yellow")
        if self._run.unread_bytes:
            yield "log", Text(f"{self._run.unread_bytes / 2**20:,.0f} MiB are still to be read")

    def _state(self, ranks: Sequence[RankFold]) -> Text:
        most = max((each.start.world_size for each in ranks if each.start), default=0)
        number = max(each.incarnation for each in ranks)
        expected = max((each.lost_rank for each in ranks if each.lost_rank), default="")
        ranks = _of_last_start(ranks)
        if self.has_ended:
            endings = sorted({each.ending or "killed" for each in ranks})
            return Text(escape(f"the run has ended: {'; '.join(endings)}"), style="bold")
        lost = [each.rank for each in ranks if each.ending or _is_gone(each)]
        if len(lost) == len(ranks):
            return Text("all ranks have stopped; a restart may follow", style="yellow")
        quiet_s = time.time() - max(each.time_s for each in ranks)
        if lost and not all(each.is_finished for each in ranks if each.rank in lost):
            what = _AFTER_A_DEATH.get(expected, "a repair or a restart is to follow")
            return Text(f"{_named(lost)} gone: {what} ({quiet_s:,.0f} s)", style="bold yellow")
        if all(map(_is_silent, ranks)):
            return Text(f"no rank has written anything for {quiet_s:,.0f} s", style="bold red")
        if len(ranks) < most:
            started = f"{len(ranks)} of {most} ranks have begun start {number + 1}"
            return Text(f"starting: {started}; nothing yet from the others", style="yellow")
        usual_s = max((each.iteration_s or 0.0 for each in ranks), default=0.0)
        if usual_s and quiet_s > max(_SLOW_S, _SLOW_ITERATIONS * usual_s):
            usual = f"an iteration takes {usual_s:.3f} s"
            return Text(f"nothing has come for {quiet_s:,.0f} s; {usual}", style="yellow")
        return Text(f"running on {len(ranks)} ranks", style="green")

    def _troubles(self, ranks: Sequence[RankFold]) -> Iterator[str]:
        failed = [each for each in ranks if each.ending and not each.is_finished]
        for each in failed[:_MOST_ENDINGS]:
            yield f"rank {each.rank} {each.ending}"
        for verdict in (each.verdict for each in _of_last_start(ranks) if each.verdict):
            yield f"verdict: {verdict}"
        num_degraded = sum(each.num(DegradedLine) for each in ranks)
        events = [each.degraded for each in ranks if each.degraded]
        if events:
            last = max(events, key=lambda event: event.time)
            reason = last.reason.splitlines()[0] if last.reason else ""
            yield f"{num_degraded} failures of checkpointing, the last of {last.part}: {reason}"
        if num_found := sum(each.num(CorruptionLine) for each in ranks):
            yield f"{num_found} findings of silent corruption: report says which ranks they accuse"
        if num_skipped := sum(each.num(SkippedLine) for each in ranks):
            yield f"{num_skipped} snapshots were due and left out"
        if num_lines := sum(each.num_not_read for each in ranks):
            yield f"{num_lines} lines of the log are no events, such as a killed rank leaves"
        for rank, reason in self._run.problems.items():
            yield f"the log of rank {rank} cannot be read: {reason}"

    def _table(self, ranks: Sequence[RankFold], width: int) -> Table:
        """Return a row for each rank, with the columns that fit; the state alone is cut short."""
        rows = [self._row(each) for each in ranks]
        widths = {name: max(len(name), *(row[name].cell_len for row in rows)) for name in rows[0]}
        state = min(widths.pop("state"), _STATE_WIDTH)
        for name in _DROPPED_FIRST:
            if sum(each + 2 for each in widths.values()) + state <= width:
                break
            del widths[name]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for name, num in widths.items():
            side: JustifyMethod = "left" if name == "host" else "right"
            table.add_column(name, justify=side, no_wrap=True, min_width=num)
        rest = max(1, width - sum(num + 2 for num in widths.values()))
        table.add_column("state", overflow="ellipsis", no_wrap=True, max_width=rest)
        for row in rows:
            table.add_row(*(row[name] for name in widths), row["state"])
        return table

    def _row(self, each: RankFold) -> dict[str, Text]:
        """Return the cells of a rank by column, in the order of the columns."""
        iterations = {
            tier.value: str(traffic.iteration) if traffic.num else "-"
            for tier, traffic in each.tiers.items()
        }
        cells = {
            "rank": str(each.rank),
            "host": escape(each.start.host) if each.start else "-",
            "start": str(each.incarnation),
            "iteration": str(each.iteration),
            "s/iteration": _number(each.iteration_s, 1.0, ".3f"),
            "stall ms": _number(each.recent_stall_s, 1e3, ".1f"),
            "idle ms": _number(each.recent_idle_s, 1e3, ".0f"),
            **iterations,
        }
        style = "bold red" if _is_trouble(each) else "dim" if each.is_finished else "green"
        state = Text(escape(self._rank_state(each)), style=style)
        return {**{name: Text(cell) for name, cell in cells.items()}, "state": state}

    def _rank_state(self, each: RankFold) -> str:
        if each.ending:
            return each.ending
        progress = read_progress(self._directory, each.rank)
        phase = str(progress.phase) if progress else "its start"
        if _is_gone(each):
            return f"gone, in {phase}"
        if _is_silent(each):
            return f"silent for {time.time() - each.time_s:,.0f} s, in {phase}"
        return phase


def _is_gone(each: RankFold) -> bool:
    """Return whether the process of a rank is known to have ended; it must be of this host."""
    start = each.start
    return bool(start and start.pid and start.host == socket.gethostname() and has_ended(start.pid))


def _of_last_start(ranks: Sequence[RankFold]) -> list[RankFold]:
    """Return the ranks of the last start, which may have fewer than those before it."""
    newest = max((each.incarnation for each in ranks), default=0)
    return [each for each in ranks if each.incarnation == newest]


def _is_silent(each: RankFold) -> bool:
    usual_s = max(_SILENT_S, _SILENT_ITERATIONS * (each.iteration_s or 0.0))
    return time.time() - each.time_s > usual_s


def _is_trouble(each: RankFold) -> bool:
    return not each.is_finished and (bool(each.ending) or _is_gone(each) or _is_silent(each))


def _number(value: float | None, factor: float, form: str) -> str:
    return "-" if value is None else format(factor * value, form)


def _named(ranks: Sequence[int]) -> str:
    """Return some ranks and the verb that follows, the first ones of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {some_of([*map(str, ranks)], _MOST_NAMED)} have"


def _sparkline(rank: RankFold, most_bars: int) -> str:
    """Return a bar for each of the last iterations of a rank, as high as its seconds."""
    seconds = [*rank.history][-most_bars:]
    if len(seconds) < 2:
        return ""
    most, steps = max(*seconds, 1e-9), len(_BARS) - 1
    bars = "".join(_BARS[min(steps, round(steps * max(0.0, each) / most))] for each in seconds)
    return f"{bars} up to {max(seconds):.3f}"


def _speed(ranks: Sequence[RankFold]) -> str:
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


def _recovery(ranks: Sequence[RankFold]) -> str:
    events = [each.recovery for each in ranks if each.recovery]
    if not events:
        return "none"
    last = max(events, key=lambda event: event.time)
    sources = ", ".join(f"{num} units from {tier}" for tier, num in last.sources.items())
    return (
        f"{_clock(last.time)}, continued after iteration {last.target_iteration}: {sources or 'no units'}, "
        f"{last.replayed_iterations} iterations replayed, {last.lost_tokens:,} tokens lost"
    )


def _stored(ranks: Sequence[RankFold]) -> str:
    """Return the newest checkpoint on storage, and the newest that all ranks have read back."""
    found = [each.read_back for each in ranks]
    known = [each for each in found if each is not None]
    newest = min(each.tiers[SnapshotTier.STORAGE].iteration for each in ranks)
    read = f"iteration {min(known)}" if len(known) == len(found) else "none"
    return f"iteration {newest}, and read back by all ranks: {read}"


def _repair(ranks: Sequence[RankFold]) -> str:
    events = [each.repair for each in ranks if each.repair]
    if not events:
        return "none"
    last = max(events, key=lambda event: event.time)
    dead, shared = (", ".join(map(str, each)) for each in (last.dead_ranks, last.shared))
    since = f"; without a device of their own: ranks {shared}" if shared else ""
    return (
        f"{_clock(last.time)}, rank {dead} in iteration {last.broken_iteration + 1}, "
        f"{last.seconds:.1f} s until that was finished{since}"
    )


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


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
            console.print(watch.view(console))
        elif console.is_terminal:
            _show(watch, console, options.interval)
        else:
            _print_views(watch, console, options.interval)
    except KeyboardInterrupt:
        pass
    return 0


def _show(watch: Watch, console: Console, interval_s: float) -> None:
    """Show views on the whole screen until `q` is pressed."""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            is_behind = watch.look()
            live.update(watch.view(console, height=console.height, hint="q quits"), refresh=True)
            if pressed(0.0 if is_behind else interval_s) == "q":
                return


def _print_views(watch: Watch, console: Console, interval_s: float) -> None:
    """Print views one after the other until the run has ended."""
    while True:
        while watch.look():
            pass
        console.print(watch.view(console))
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
