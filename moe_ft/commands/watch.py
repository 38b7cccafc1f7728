"""`moe_ft watch`: live view of a run in a terminal, from its event log.

watch_view.py has what is shown. `moe_ft report` says more about a run that has ended.
"""

import argparse
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live

from moe_ft.commands.parsers import Commands, add_command
from moe_ft.commands.watch_view import Watch
from moe_ft.errors import ConfigError

_PLAIN_WIDTH = 160


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
