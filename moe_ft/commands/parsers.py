"""Parsers of the commands: their help, their errors, and how this program was called."""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NoReturn, override

from moe_ft.spelling import explained

_COLUMNS = 80  # of a terminal that nobody has made wider
CODES = "0: done, 2: the command line or what it names cannot be used, with one line that says why."


class CommandParser(argparse.ArgumentParser):
    """Parser of one command. It refuses what it does not know itself, and says what may be meant."""

    _words: Sequence[str] = ()

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self._words = sys.argv[1:] if args is None else args
        found, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return found, []

    @override
    def error(self, message: str) -> NoReturn:
        names = (word.partition("=")[0] for word in self._words if word.startswith("--"))
        unknown = [name for name in names if name not in self._option_string_actions]
        if "arguments are required" in message and unknown:  # the likelier mistake
            message = f"unrecognized arguments: {' '.join(unknown)}"
        super().error(explained(message, self))


type Commands = argparse._SubParsersAction[CommandParser]


def program() -> str:
    """Return how this program is called: `moe_ft`, or `python -m moe_ft`."""
    is_module = PurePath(sys.argv[0]).parts[-2:] == ("moe_ft", "__main__.py")
    return "python -m moe_ft" if is_module else "moe_ft"


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    description: str,
    example: str,
    codes: str = CODES,
    usage: str | None = None,
) -> CommandParser:
    """Add a command.

    Args:
        summary: what it does, for the list of all commands.
        description: what it does and reads, in sentences.
        example: words after the name of the command.
        codes: meaning of its exit codes.
        usage: as argparse takes it, where its own cannot tell the order of the words.
    """
    paragraphs = [f"{summary[0].upper()}{summary[1:]}. {description}"]
    example = f"Example:\n  %(prog)s {example}"
    return commands.add_parser(
        name,
        help=summary,
        description="\n\n".join(textwrap.fill(each, _COLUMNS) for each in paragraphs),
        epilog=f"{example}\n\n{textwrap.fill(f'Exit code: {codes}', _COLUMNS)}",
        usage=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
