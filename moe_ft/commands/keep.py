"""`moe_ft keep`: what torchrun starts, so that a restart of a rank imports nothing again."""

import argparse
from collections.abc import Sequence

from moe_ft.keeper.target import USAGE
from moe_ft.keeper.worker import main

EXAMPLE = "torchrun --nproc-per-node 8 -m moe_ft keep -- pretrain_gpt_moe.py ..."


def add_keep_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the help; `keep_rank` runs it, since its arguments are the script's."""
    commands.add_parser(
        "keep",
        help="start ranks under torchrun from a process that has imported Megatron already",
        usage=USAGE,
        epilog=f"Example: {EXAMPLE}",
    )


def keeps_rank(words: Sequence[str]) -> bool:
    """Return whether a command line runs a rank, and not only asks for help."""
    return words[:1] == ["keep"] and words[1:2] not in (["-h"], ["--help"])


def keep_rank(words: Sequence[str]) -> None:
    """Run a rank as this process, which does not return."""
    main(words)
