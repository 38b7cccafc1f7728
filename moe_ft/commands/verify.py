"""`python -m moe_ft verify`: read and check everything in checkpoints."""

import argparse

from moe_ft.commands.directory import add_directory, reading
from moe_ft.recovery.inspect.verification import verify


def add_verify_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command and its flags."""
    parser = commands.add_parser(
        "verify", help="read and check everything; exit code 1 if something is wrong"
    )
    add_directory(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is right and what is wrong; return 1 if something is."""
    with reading(options.directory):
        right, wrong = verify(options.directory)
    for line in right:
        print(f"ok     {line}")
    for line in wrong:
        print(f"WRONG  {line}")
    return 1 if wrong else 0
