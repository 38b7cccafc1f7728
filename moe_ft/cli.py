"""Command line of moe_ft: ``python -m moe_ft {inspect,verify,clean,report,plan}``."""

import argparse
import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moe_ft.commands.plan.command import add_plan_command
from moe_ft.commands.report import render, summarize
from moe_ft.config.config import DEFAULT_MEMORY_DIR
from moe_ft.engine.storage import hide_password
from moe_ft.errors import ConfigError, MoeFtError
from moe_ft.recovery.inspect.cleaning import clean
from moe_ft.recovery.inspect.holdings import find_holdings, render_holdings
from moe_ft.recovery.inspect.verification import verify


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    It is 1 if verify found damage, or the job that clean was told to remove is still there; 2 for bad input.
    """
    options = _parser().parse_args(command_line)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may be no text
    try:
        return int(options.run(options))
    except MoeFtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `... | head`
        sys.stderr.close()
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moe_ft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    directory_help = (
        "a persist directory (or fsspec URL), one of its iter_* directories, or a memory directory"
    )
    inspect = commands.add_parser("inspect", help="show what is in checkpoints")
    inspect.add_argument("directory", metavar="DIR", help=directory_help)
    inspect.add_argument("--units", action="store_true", help="list every unit of the newest state")
    inspect.set_defaults(run=_inspect)
    check = commands.add_parser(
        "verify", help="read everything and check everything; exit code 1 if something is wrong"
    )
    check.add_argument("directory", metavar="DIR", help=directory_help)
    check.set_defaults(run=_verify)
    cleaning = commands.add_parser(
        "clean",
        help="show the host memory of your dead jobs on this machine; --remove removes it",
    )
    cleaning.add_argument(
        "--memory-dir",
        default=DEFAULT_MEMORY_DIR,
        metavar="DIR",
        help=f"--moe-ft-memory-dir of the jobs (default {DEFAULT_MEMORY_DIR})",
    )
    cleaning.add_argument("--job-id", metavar="NAME", help="only this job's, whatever its age")
    cleaning.add_argument(
        "--older-than",
        type=float,
        default=60.0,
        metavar="MINUTES",
        help="without --job-id: leave what changed more recently (default 60)",
    )
    cleaning.add_argument(
        "--remove", action="store_true", help="remove it; without, only say what would be removed"
    )
    cleaning.set_defaults(run=_clean)
    report = commands.add_parser("report", help="summarize the event log of a run")
    report.add_argument("run_dir", metavar="RUN_DIR", help="what --moe-ft-event-log named")
    report.set_defaults(run=_report)
    add_plan_command(commands)
    return parser


@contextmanager
def _reading(directory: str) -> Iterator[None]:
    """Turn what goes wrong in reading a directory or fsspec URL into a ConfigError."""
    if not directory.strip():
        raise ConfigError(
            f"DIR='{directory}' is empty: an unset variable? Name a directory or fsspec URL; the current "
            "directory is a dot."
        )
    # Packages that implement a protocol raise errors of their own, such as botocore's.
    kinds = (Exception,) if "://" in directory else (OSError, ValueError, ImportError)
    try:
        yield
    except MoeFtError:
        raise
    except kinds as error:
        raise ConfigError(
            f"DIR={hide_password(directory)} cannot be read: {type(error).__name__}: {error}. Name a "
            "directory that you may read, or an fsspec URL whose package is installed."
        ) from error


def _inspect(options: argparse.Namespace) -> int:
    with _reading(options.directory):
        text = render_holdings(find_holdings(options.directory), lists_units=options.units)
    print(text)
    return 0


def _verify(options: argparse.Namespace) -> int:
    with _reading(options.directory):
        right, wrong = verify(options.directory)
    for line in right:
        print(f"ok     {line}")
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0


def _clean(options: argparse.Namespace) -> int:
    removed, left = clean(
        options.memory_dir, options.job_id, options.older_than * 60, removes=options.remove
    )
    for line in removed:
        print(f"{'removed' if options.remove else 'would remove'} {line}")
    for line in left:
        print(f"left {line}")
    if not removed and not left:
        print(f"no memory of jobs under {options.memory_dir}")
    if removed and not options.remove:
        print("nothing was removed: add --remove to do that")
    return 1 if options.remove and options.job_id is not None and left else 0


def _report(options: argparse.Namespace) -> int:
    directory = Path(options.run_dir)
    print(render(summarize(directory), directory))
    return 0
