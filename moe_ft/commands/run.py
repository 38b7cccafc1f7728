"""`moe_ft run`: train with a pretraining script of one's own, which stays as it is.

Nothing here imports torch or Megatron: the folder of the script may hold a Megatron, which then comes first.
megatron/fault_tolerance/launch/pretraining.py runs the script. It touches Megatron's training loop, which
this package does not, so it is found by name, and only when a script runs.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from moe_ft.cluster.options import HELP
from moe_ft.cluster.options import USAGE as USAGE_OF_AGENT
from moe_ft.cluster.target import (
    BRIDGE,
    RUNNER_OF_BRIDGE,
    check_bridge,
    is_found,
    split_flags,
)
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.errors import ConfigError
from moe_ft.loop.refusing import refuse
from moe_ft.saying import silence_dependencies

USAGE = "moe_ft run [FLAGS... --] [-m] SCRIPT ARGS..."
EXAMPLE = (
    "torchrun --standalone --nproc-per-node 8 -m moe_ft run pretrain_gpt.py ... --moe-ft-strategy STRATEGY "
    "--moe-ft-job-id NAME"
)
PROGRAM = "moe_ft run"
_CODES = (
    "that of the script; or 2: flags or state cannot be used, 3: the last state is not on storage, start it "
    "again, 4: storage or memory is away, start it again later or elsewhere."
)
_OF_AGENT = {
    "launch": (
        "train with a Megatron pretraining script, protected",
        "It is started once on each node, in the place of torchrun, forks the ranks and replaces those that "
        "die. It adds a strategy, repairs, restarts and a name where they are not given: docs/own_script.md; "
        "to a job of Megatron-Bridge if flags of moe_ft, ended by --, are in front of its script, such as "
        "--moe-ft-strategy: docs/bridge.md.",
        "--ranks-per-node 8 pretrain_gpt.py ...",
    ),
    "keep": (
        "run the ranks of a node, and replace those that die",
        "The same as `launch`, but nothing is added to the command line of the ranks: docs/agent.md.",
        "--ranks-per-node 8 -- -m moe_ft run pretrain_gpt.py ... --moe-ft-strategy dense",
    ),
}
LAUNCHER = "megatron.fault_tolerance.launch.pretraining"


def add_run_commands(commands: Commands) -> None:
    """Add what runs scripts to the help: their arguments are the script's."""
    add_command(
        commands,
        "run",
        "train with a Megatron pretraining script, which stays as it is",
        "It is one rank: a launcher such as torchrun starts all of them. The flags of moe_ft join the "
        "script's own; `moe_ft flags` lists them, and so does --help after the script. Flags in front of the "
        "script, ended by --, mean a job of Megatron-Bridge, whose scripts never see them: docs/bridge.md.",
        f"pretrain_gpt.py ... --moe-ft-strategy dense\n  {EXAMPLE}",
        codes=_CODES,
        usage=f"%(prog)s {USAGE.removeprefix('moe_ft run ')}",
    )
    for name, (summary, text, example) in _OF_AGENT.items():
        parser = add_command(
            commands, name, summary, text, example, codes=_CODES, usage=f"%(prog)s {USAGE_OF_AGENT}"
        )
        for option, (metavar, meaning) in HELP.items():
            parser.add_argument(f"--{option}", metavar=metavar, help=meaning)


def is_given(command: str, words: Sequence[str]) -> bool:
    """Return whether a command line starts with a command, and does not only ask for its help."""
    return words[:1] == [command] and words[1:2] not in (["-h"], ["--help"])


def run_script(words: Sequence[str]) -> None:
    """Run a script as Python does, with moe_ft around Megatron's training loop; return when it has ended.

    Args:
        words: the script, or -m and a module, and its arguments.
    """
    try:
        flags, words = split_flags(words)
        if flags:
            _check_in_front(flags)
    except ConfigError as error:
        refuse(str(error), PROGRAM)
    is_module = check_script(words, PROGRAM, f"{USAGE}, such as: {EXAMPLE}")
    name, *arguments = words[is_module:]
    sys.argv = [name, *arguments]
    _set_path(os.getcwd() if is_module else os.path.dirname(os.path.realpath(name)))
    if is_module and not is_found(name):
        refuse(f"-m {name}: there is no such module. Give one that Python finds: {USAGE}", PROGRAM)
    silence_dependencies()
    if not flags:
        importlib.import_module(LAUNCHER).run(name, is_module=is_module)
        return
    try:
        check_bridge(arguments, is_there=is_found(BRIDGE))
    except ConfigError as error:
        refuse(str(error), PROGRAM)
    importlib.import_module(RUNNER_OF_BRIDGE).run(name, flags, is_module=is_module)


def _check_in_front(flags: Sequence[str]) -> None:
    """Raise ConfigError if words in front of a script are no flags of moe_ft, or wrong by themselves."""
    # Only here: a job of Megatron-LM reads its flags later.
    from moe_ft.commands.launch_checks import check_flags, check_in_front

    check_in_front(flags)
    # Ranks that srun starts without torchrun get the variables of torchrun later.
    world_size = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    check_flags(flags, int(world_size) if world_size.isdecimal() else 1)


def check_script(words: Sequence[str], program: str, usage: str) -> bool:
    """Refuse a script that cannot run, before Megatron is imported; return whether it is a module.

    Args:
        words: the script, or -m and a module, and its arguments.
        program, usage: for the message.
    """
    is_module = list(words[:1]) == ["-m"]
    if not words[is_module:] or words[is_module].startswith("-"):
        given = f"{words[is_module]} is no script" if words[is_module:] else "there is no script"
        refuse(f"{given}. Write {usage}", program)
    name = words[is_module]
    path = Path(name)
    if is_module:
        return True
    if not name or (path.exists() and not path.is_file()):  # a pipe would be waited for
        refuse(f"'{name}' is no file. Give the path of the pretraining script: {usage}", program)
    try:
        compile(path.read_bytes(), name, "exec")
    except OSError as error:
        refuse(
            f"{name} cannot be read: {error.strerror}. Give the path of the pretraining script.",
            program,
        )
    except SyntaxError as error:
        _end_as_python(error)
    return False


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
