"""`moe_ft run` and `keep`: train with a pretraining script of one's own, which stays as it is.

torchrun starts `keep`, so that a restart of a rank imports nothing again: cluster/worker.py.

Nothing here imports torch or Megatron: the folder of the script may hold a Megatron, which then comes first.
megatron/fault_tolerance/launch/pretraining.py runs the script. It touches Megatron's training loop, which
this package does not, so it is found by name, and only when a script runs.
"""

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from moe_ft.cluster.target import OF_NODES, is_found
from moe_ft.cluster.target import USAGE as USAGE_OF_KEEP
from moe_ft.loop.refusing import refuse

USAGE = "moe_ft run [-m] SCRIPT ARGS..."
EXAMPLE = (
    "torchrun --standalone --nproc-per-node 8 -m moe_ft run pretrain_gpt.py ... --moe-ft-strategy STRATEGY "
    "--moe-ft-job-id NAME"
)
PROGRAM = "moe_ft run"
LAUNCHER = "megatron.fault_tolerance.launch.pretraining"


def add_run_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both to the help; `run_script` and cluster/worker.py run them: the arguments are the script's."""
    commands.add_parser(
        "run",
        help="train with a Megatron pretraining script, which stays as it is",
        usage=USAGE,
        epilog=f"The flags of moe_ft join the script's own; its --help lists both. Example: {EXAMPLE}",
    )
    keep = commands.add_parser(
        "keep",
        help="start ranks under torchrun from a process that has imported Megatron already",
        usage=USAGE_OF_KEEP,
        epilog="Example: torchrun --nproc-per-node 8 -m moe_ft keep -- pretrain_gpt_moe.py ...",
    )
    keep.add_argument(
        "--preload", help="module to import before ranks are forked; may come several times"
    )
    for name, text in OF_NODES.items():
        keep.add_argument(f"--{name}", help=text)


def is_given(command: str, words: Sequence[str]) -> bool:
    """Return whether a command line starts with a command, and does not only ask for its help."""
    return words[:1] == [command] and words[1:2] not in (["-h"], ["--help"])


def run_script(words: Sequence[str]) -> None:
    """Run a script as Python does, with moe_ft around Megatron's training loop; return when it has ended.

    Args:
        words: the script, or -m and a module, and its arguments.
    """
    is_module = words[:1] == ["-m"]
    name, *arguments = _checked(words[is_module:])
    if not is_module:
        _check_script(name)
    sys.argv = [name, *arguments]
    _set_path(os.getcwd() if is_module else os.path.dirname(os.path.realpath(name)))
    if is_module and not is_found(name):
        refuse(f"-m {name}: there is no such module. Give one that Python finds: {USAGE}", PROGRAM)
    importlib.import_module(LAUNCHER).run(name, is_module=is_module)


def _checked(words: Sequence[str]) -> Sequence[str]:
    if not words or words[0].startswith("-"):
        given = f"{words[0]} is no script" if words else "there is no script"
        refuse(f"{given}. Write {USAGE}, such as: {EXAMPLE}", PROGRAM)
    return words


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
    own = str(Path(__file__).resolve().parents[2])
    sys.path[0] = first
    if started_from == own:
        sys.path.append(own)
