"""`moe_ft run` and `moe_ft keep`, whose process becomes a rank: their arguments are the script's."""

import argparse
import importlib
from collections.abc import Sequence

from moe_ft.keeper.target import USAGE as KEEP_USAGE
from moe_ft.keeper.worker import main

RUN_USAGE = "moe_ft run [-m] SCRIPT ARGS..."
RUN_EXAMPLE = "torchrun --nproc-per-node 8 -m moe_ft run pretrain_gpt.py ... --moe-ft-strategy NAME"
_KEEP_EXAMPLE = "torchrun --nproc-per-node 8 -m moe_ft keep -- pretrain_gpt_moe.py ..."


def add_rank_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add both commands to the help."""
    commands.add_parser(
        "run",
        help="train with a Megatron pretraining script, which stays as it is",
        usage=RUN_USAGE,
        epilog="The flags of moe_ft join those of the script, whose --help lists both. Example: "
        f"{RUN_EXAMPLE}",
    )
    commands.add_parser(
        "keep",
        help="start ranks under torchrun from a process that has imported Megatron already",
        usage=KEEP_USAGE,
        epilog=f"Example: {_KEEP_EXAMPLE}",
    )


def keeps_rank(words: Sequence[str]) -> bool:
    """Return whether a command line runs a rank, and not only asks for help."""
    return words[:1] == ["keep"] and words[1:2] not in (["-h"], ["--help"])


def keep_rank(words: Sequence[str]) -> None:
    """Run a rank as this process, which does not return."""
    main(words)


def runs_script(words: Sequence[str]) -> bool:
    """Return whether a command line runs a script, and not only asks for help."""
    return words[:1] == ["run"] and words[1:2] not in (["-h"], ["--help"])


def run_script(words: Sequence[str]) -> None:
    """Run a script and its arguments as this process; returns when it has ended.

    The launcher touches Megatron's training loop, and this package does not, so that it is found only here.
    """
    importlib.import_module("megatron.fault_tolerance.launch.command").main(words)
