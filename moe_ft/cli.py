"""Command line of moe_ft: ``moe_ft COMMAND``, or ``python -m moe_ft COMMAND``.

The commands are in moe_ft/commands/. None of them imports torch but those that start or build a model
(`launch`, `run`, `keep`, `plan`, `simulate`) or read its tensors (`convert`, `diff`), and `doctor` of several
processes.
"""

import argparse
import io
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, override

from moe_ft.command_lines import FLAG_PREFIX
from moe_ft.commands.convert import add_convert_command
from moe_ft.commands.directory import add_reading_commands
from moe_ft.commands.doctor import add_doctor_command
from moe_ft.commands.examples import add_examples_command
from moe_ft.commands.flags import add_flags_command
from moe_ft.commands.launch import keep, launch
from moe_ft.commands.parsers import CommandParser, Commands, program
from moe_ft.commands.plan import add_plan_command, split_command_line
from moe_ft.commands.removal import add_removing_commands
from moe_ft.commands.report import add_report_command
from moe_ft.commands.run import add_run_commands, is_given, run_script
from moe_ft.commands.simulate import add_simulate_command
from moe_ft.commands.watch import add_watch_command
from moe_ft.errors import MoeFtError
from moe_ft.installation import describe
from moe_ft.saying import Escaping
from moe_ft.spelling import COMMAND

# In the order of their help.
GROUPS: Mapping[str, Sequence[str]] = {
    "train": ("launch", "run", "keep"),
    "look at a run or at nodes": ("watch", "report", "inspect", "doctor"),
    "checkpoints": ("verify", "diff", "convert", "prune", "clean", "rescue"),
    "plan": ("plan", "simulate"),
    "more": ("flags", "examples"),
}
_ADDING = (
    add_run_commands,
    add_reading_commands,
    add_convert_command,
    add_removing_commands,
    add_report_command,
    add_watch_command,
    add_plan_command,
    add_simulate_command,
    add_doctor_command,
    add_flags_command,
    add_examples_command,
)
_WIDTH, _INDENT = 80, 12


def main(command_line: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    It is 1 if verify found damage, a check of doctor failed, or the job that clean was told to remove is
    still there; 2 for bad input.
    """
    words = sys.argv[1:] if command_line is None else list(command_line)
    if is_given("launch", words):
        launch(words[1:])
    if is_given("keep", words):
        keep(words[1:])
    if is_given("run", words):
        run_script(words[1:])
        return 0
    if words[:1] == ["flags"]:  # which takes one as it is written on a command line
        words = [each.removeprefix(FLAG_PREFIX) for each in words]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # paths may be no text
    streams = Escaping(sys.stdout), Escaping(sys.stderr)
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            own, of_training = split_command_line(words)
            parser = _parser()
            options = parser.parse_args(own)
            if options.command is None:
                parser.error(f"a command is missing. {parser.prog} --help lists them")
            options.of_training = of_training
            return int(options.run(options))
        except MoeFtError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except BrokenPipeError:  # `... | head`
            sys.stderr.close()
            return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=program(),
        usage="%(prog)s COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", nargs=0, action=_Versions, help="show what is installed, and where"
    )
    # The list is in the description: argparse knows no groups of commands.
    commands = parser.add_subparsers(
        dest="command", metavar=COMMAND, prog=program(), help=argparse.SUPPRESS
    )
    for add in _ADDING:
        add(commands)
    parser.description = f"{_listed(commands)}\n\n%(prog)s {COMMAND} --help says more of each."
    return parser


def _listed(commands: Commands) -> str:
    """Return all commands in their groups."""
    summaries = {each.dest: each.help or "" for each in commands._get_subactions()}
    lines = ["Fault tolerance for Mixture-of-Experts pretraining on Megatron-LM."]
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        for name in (each for each in names if each in summaries):
            begin, indent = f"  {name}".ljust(_INDENT), " " * _INDENT
            lines.append(textwrap.fill(begin + summaries[name], _WIDTH, subsequent_indent=indent))
    return "\n".join(lines)


class _Versions(argparse.Action):
    """Option that prints versions, which are looked for only then. __main__.py can do so without packages."""

    @override
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(describe())
        parser.exit()
