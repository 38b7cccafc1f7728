"""The command line of `moe_ft run`: which script runs, with what arguments and modules.

It imports neither torch nor Megatron: the folder of the script may hold a Megatron, which then comes first.
running.py runs the script.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.fault_tolerance.launch.refusing import refuse
from moe_ft.commands.run import EXAMPLE, USAGE

PROGRAM = "moe_ft run"


@dataclass(frozen=True, slots=True)
class Target:
    """A script to run: the path of a file, or the name of a module."""

    name: str
    is_module: bool = False


def main(words: Sequence[str]) -> None:
    """Run a script as Python does, with moe_ft around Megatron's training loop.

    Args:
        words: the script and its arguments.
    """
    target, arguments = _read(words)
    sys.argv = [target.name, *arguments]
    _set_path(os.getcwd() if target.is_module else os.path.dirname(os.path.realpath(target.name)))
    running = importlib.import_module("megatron.fault_tolerance.launch.running")
    running.run(target)


def _read(words: Sequence[str]) -> tuple[Target, list[str]]:
    is_module = words[:1] == ["-m"]
    rest = list(words[is_module:])
    if not rest or rest[0].startswith("-"):
        given = f"{rest[0]} is no script" if rest else "there is no script"
        refuse(f"{given}. Write {USAGE}, such as: {EXAMPLE}", PROGRAM)
    if not is_module:
        _check_script(rest[0])
    return Target(rest[0], is_module), rest[1:]


def _check_script(name: str) -> None:
    """Refuse a script that cannot run, before Megatron is imported."""
    path = Path(name)
    if not name or (path.exists() and not path.is_file()):  # a pipe would be waited for
        refuse(f"'{name}' is no file. Give the path of the pretraining script: {USAGE}", PROGRAM)
    try:
        compile(path.read_bytes(), name, "exec")
    except OSError as error:
        refuse(
            f"{name} cannot be read: {error.strerror}. Give the path of the pretraining script.",
            PROGRAM,
        )
    except SyntaxError as error:
        _end_as_python(error)


def _end_as_python(error: SyntaxError) -> NoReturn:
    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr, flush=True)
    raise SystemExit(1) from None


def _set_path(first: str) -> None:
    """Put a folder first, in the place of the one from which `moe_ft run` itself was started.

    That one stays last if moe_ft was found there: it is a checkout that is not installed.
    """
    if sys.flags.safe_path:
        return
    started_from = os.path.realpath(sys.path[0] or os.getcwd())
    own = str(Path(__file__).resolve().parents[3])
    sys.path[0] = first
    if started_from == own:
        sys.path.append(own)
