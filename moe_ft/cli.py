"""Command line of moe_ft: ``python -m moe_ft {report}``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ft.errors import MoeFtError
from moe_ft.report import render, summarize


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m moe_ft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="summarize the event log of a run")
    report.add_argument("run_dir", metavar="RUN_DIR", help="what --moe-ft-event-log named")
    options = parser.parse_args(command_line)
    directory = Path(options.run_dir)
    try:
        print(render(summarize(directory), directory))
    except MoeFtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
