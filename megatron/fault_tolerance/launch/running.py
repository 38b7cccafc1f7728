"""Running a pretraining script with Megatron's functions wrapped before the script imports them.

moe_ft/commands/run.py reads the command line.
"""

import runpy
import sys
from functools import partial, wraps
from pathlib import Path

import megatron.training
from megatron.training import arguments, training
from torch.distributed.elastic.multiprocessing import errors

from megatron.fault_tolerance.launch.arguments import parse_args, words_of_moe_ft
from megatron.fault_tolerance.launch.environment import WholeErrorFile, prepare_environment
from megatron.fault_tolerance.launch.pretraining import pretrain
from moe_ft.keeper.forked_rank import run_script
from moe_ft.loop.refusing import refuse
from moe_ft.saying import say


@partial(errors.record, error_handler=WholeErrorFile())
def run(name: str, *, is_module: bool = False) -> None:
    """Run a script, which finds its name, arguments and folder as if Python had started it.

    Args:
        name: the path of a file, or the name of a module.
    """
    prepare_environment()
    wrap_megatron()
    errors.get_error_handler = WholeErrorFile  # for the script's own `record`
    words = list(sys.argv)  # the script may change them
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            run_script(name)
    except SystemExit as end:
        if end.code or {"-h", "--help"} & {*words}:
            raise
        check_has_trained(words)
        raise
    check_has_trained(words)


def wrap_megatron() -> None:
    """Wrap what scripts call, for the whole process; they have not imported it yet."""
    original = arguments.parse_args
    arguments.parse_args = wraps(original)(partial(parse_args, original))
    training.pretrain = megatron.training.pretrain = pretrain


def check_has_trained(words: list[str]) -> None:
    """Refuse --moe-ft-* flags that had no effect, because the script never called `pretrain`."""
    if training._STARTUP_TIMESTAMPS["pretrain_entry"] is not None:
        return
    name = Path(words[0]).name
    if unused := words_of_moe_ft(words):
        refuse(
            f"{name} has ended without a call of megatron.training.pretrain, so {', '.join(unused)} had no "
            "effect. Train with pretrain, or use megatron.fault_tolerance.Checkpointer in another loop."
        )
    say(f"{name} has ended without a call of megatron.training.pretrain: moe_ft did nothing")
