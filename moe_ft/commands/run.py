"""`moe_ft run` and `keep`: train with a pretraining script of one's own, which stays as it is.

`keep` runs all ranks of a node, and a restart of a rank imports nothing again: cluster/agent.py.

Nothing here imports torch or Megatron: the folder of the script may hold a Megatron, which then comes first.
megatron/fault_tolerance/launch/pretraining.py runs the script. It touches Megatron's training loop, which
this package does not, so it is found by name, and only when a script runs.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from moe_ft.cluster import agent
from moe_ft.cluster.options import HELP, KeepOptions
from moe_ft.cluster.options import USAGE as USAGE_OF_KEEP
from moe_ft.cluster.own_node import NodeMemory
from moe_ft.cluster.target import is_found
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.config.fields import flag_of
from moe_ft.errors import ConfigError
from moe_ft.loop.refusing import refuse

USAGE = "moe_ft run [-m] SCRIPT ARGS..."
EXAMPLE = (
    "torchrun --standalone --nproc-per-node 8 -m moe_ft run pretrain_gpt.py ... --moe-ft-strategy STRATEGY "
    "--moe-ft-job-id NAME"
)
PROGRAM = "moe_ft run"
_CODES = (
    "that of the script; or 2: flags or state cannot be used, 3: the last state is not on storage, start it "
    "again, 4: storage or memory is away, start it again later or elsewhere."
)
_OF_MEMORY = ("memory_dir", "job_id", "node_id")
LAUNCHER = "megatron.fault_tolerance.launch.pretraining"


def add_run_commands(commands: Commands) -> None:
    """Add both to the help; `run_script` and `keep` run them: the arguments are the script's."""
    add_command(
        commands,
        "run",
        "train with a Megatron pretraining script, which stays as it is",
        "It is one rank: a launcher such as torchrun starts all of them. The flags of moe_ft join the "
        "script's own; `moe_ft flags` lists them, and so does --help after the script.",
        f"pretrain_gpt.py ... --moe-ft-strategy dense\n  {EXAMPLE}",
        codes=_CODES,
        usage=f"%(prog)s {USAGE.removeprefix('moe_ft run ')}",
    )
    parser = add_command(
        commands,
        "keep",
        "run the ranks of a node, and replace those that die",
        "It is started once on each node, and forks ranks from a process that has imported Megatron. Nothing "
        "is added to their command line: docs/agent.md.",
        "--ranks-per-node 8 -- -m moe_ft run pretrain_gpt.py ... --moe-ft-strategy dense",
        codes=_CODES,
        usage="%(prog)s [OPTIONS] [--] SCRIPT ARGS... | -m MODULE ARGS...",
    )
    metavars = dict(re.findall(r"\[--([\w-]+) ([^]]+)\]", USAGE_OF_KEEP))
    for name, text in HELP.items():
        parser.add_argument(f"--{name}", metavar=metavars[name], help=text)


def is_given(command: str, words: Sequence[str]) -> bool:
    """Return whether a command line starts with a command, and does not only ask for its help."""
    return words[:1] == [command] and words[1:2] not in (["-h"], ["--help"])


def keep(words: Sequence[str]) -> NoReturn:
    """Run the ranks of this node, from the words of the command line after `keep`."""
    agent.main(words, _memory_of)


def _memory_of(options: KeepOptions) -> NodeMemory | None:
    """Return the memory of this node for the ranks; None if nothing names their job."""
    # Only here: by then the process from which ranks are forked imports already.
    from moe_ft.config.config import MemoryConfig
    from moe_ft.engine.memory.job_directory import node_directory
    from moe_ft.recovery.job_memory import MemoryOfNode

    flags: dict[str, Any] = {name: options.flag(flag_of(name)) for name in _OF_MEMORY}
    memory = replace(MemoryConfig(), **{name: each for name, each in flags.items() if each})
    with suppress(ConfigError):
        job = memory.resolve_job_id(os.environ)
        node = memory.resolve_node_id(os.environ, options.name)
        return MemoryOfNode(node_directory(memory.memory_dir, job, node))
    return None


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
