"""`moe_ft run`: train with a pretraining script of one's own, which stays as it is."""

import argparse
import importlib
from collections.abc import Sequence

USAGE = "moe_ft run [-m] SCRIPT ARGS..."
EXAMPLE = "torchrun --nproc-per-node 8 -m moe_ft run pretrain_gpt.py ... --moe-ft-strategy NAME"


def add_run_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the help; `run_script` runs it, since its arguments are the script's."""
    commands.add_parser(
        "run",
        help="train with a Megatron pretraining script, which stays as it is",
        usage=USAGE,
        epilog=f"The flags of moe_ft join those of the script, whose --help lists both. Example: {EXAMPLE}",
    )


def runs_script(words: Sequence[str]) -> bool:
    """Return whether a command line runs a script, and not only asks for help."""
    return words[:1] == ["run"] and words[1:2] not in (["-h"], ["--help"])


def run_script(words: Sequence[str]) -> None:
    """Run a script and its arguments as this process; returns when it has ended.

    The launcher touches Megatron's training loop, and this package does not, so that it is found only here.
    """
    importlib.import_module("megatron.fault_tolerance.launch.command").main(words)
