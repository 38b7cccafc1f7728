"""Command line of moe_ft: ``python -m moe_ft {inspect,verify,clean,report,plan}``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ft.config import DEFAULT_MEMORY_DIR
from moe_ft.errors import MoeFtError
from moe_ft.plan_command.command import add_plan_command
from moe_ft.recovery.cleaning import clean
from moe_ft.recovery.inspection import find_holdings, render_holdings, verify
from moe_ft.report import render, summarize


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 1 if verify found damage, 2 for bad input."""
    options = _parser().parse_args(command_line)
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
        "clean", help="remove the host memory of dead jobs on this machine"
    )
    cleaning.add_argument("--memory-dir", default=DEFAULT_MEMORY_DIR, metavar="DIR")
    cleaning.add_argument("--job-id", metavar="NAME", help="only this job's, whatever its age")
    cleaning.add_argument(
        "--older-than",
        type=float,
        default=60.0,
        metavar="MINUTES",
        help="without --job-id: leave what changed more recently (default 60)",
    )
    cleaning.set_defaults(run=_clean)
    report = commands.add_parser("report", help="summarize the event log of a run")
    report.add_argument("run_dir", metavar="RUN_DIR", help="what --moe-ft-event-log named")
    report.set_defaults(run=_report)
    add_plan_command(commands)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    print(render_holdings(find_holdings(options.directory), lists_units=options.units))
    return 0


def _verify(options: argparse.Namespace) -> int:
    right, wrong = verify(options.directory)
    for line in right:
        print(f"ok     {line}")
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0


def _clean(options: argparse.Namespace) -> int:
    removed, left = clean(options.memory_dir, options.job_id, options.older_than * 60)
    for line in removed:
        print(f"removed {line}")
    for line in left:
        print(f"left    {line}")
    if not removed and not left:
        print(f"no memory of jobs under {options.memory_dir}")
    return 0


def _report(options: argparse.Namespace) -> int:
    directory = Path(options.run_dir)
    print(render(summarize(directory), directory))
    return 0
