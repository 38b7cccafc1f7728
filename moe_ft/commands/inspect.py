"""`python -m moe_ft inspect`: show the contents of checkpoints."""

import argparse

from moe_ft.commands.directory import add_directory, reading
from moe_ft.recovery.inspect.boundary_logs import render_logs
from moe_ft.recovery.inspect.holdings import find_holdings, render_holdings


def add_inspect_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("inspect", help="show what is in checkpoints")
    add_directory(parser)
    parser.add_argument("--units", action="store_true", help="list every unit of the newest state")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the contents of a directory."""
    with reading(options.directory):
        text = render_holdings(find_holdings(options.directory), lists_units=options.units)
        logs = render_logs(options.directory)
    print("\n\n".join(filter(None, [text, logs])))
    return 0
