"""Command line of moe_ft: ``moe_ft COMMAND``, or ``python -m moe_ft COMMAND``.

They are in moe_ft/commands/. None of them imports torch but those that start or build a model (`run`, `keep`,
`plan`, `simulate`) or read its tensors (`convert`, `diff`), and `doctor` of several processes.
"""

import argparse
import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from moe_ft.commands.convert import add_convert_command
from moe_ft.commands.directory import add_reading_commands
from moe_ft.commands.doctor import add_doctor_command
from moe_ft.commands.examples import add_examples_command
from moe_ft.commands.plan import add_plan_command, split_command_line
from moe_ft.commands.removal import add_removing_commands
from moe_ft.commands.report import add_report_command
from moe_ft.commands.run import add_run_commands, is_given, keep, run_script
from moe_ft.commands.simulate import add_simulate_command
from moe_ft.commands.watch import add_watch_command
from moe_ft.errors import MoeFtError
from moe_ft.saying import Escaping


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    It is 1 if verify found damage, a check of doctor failed, or the job that clean was told to remove is
    still there; 2 for bad input.
    """
    words = sys.argv[1:] if command_line is None else list(command_line)
    if is_given("keep", words):
        keep(words[1:])
    if is_given("run", words):
        run_script(words[1:])
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may be no text
    streams = Escaping(sys.stdout), Escaping(sys.stderr)
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            own, of_training = split_command_line(words)
            options = _parser().parse_args(own)
            options.of_training = of_training
            return int(options.run(options))
        except MoeFtError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:  # `... | head`
            sys.stderr.close()
            return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m moe_ft", description="Commands of moe_ft.")
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (
        add_run_commands,
        add_reading_commands,
        add_convert_command,
        add_removing_commands,
        add_report_command,
        add_watch_command,
        add_plan_command,
        add_simulate_command,
        add_doctor_command,
        add_examples_command,
    ):
        add(commands)
    return parser
