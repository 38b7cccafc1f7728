"""Running a pretraining script with Megatron's functions wrapped before the script imports them.

command.py reads the command line.
"""

import runpy
import sys
from functools import partial, wraps
from pathlib import Path

import megatron.training
from megatron.training import arguments, training
from torch.distributed.elastic.multiprocessing import errors

from megatron.fault_tolerance.launch.arguments import parse_args, words_of_moe_ft
from megatron.fault_tolerance.launch.command import Target
from megatron.fault_tolerance.launch.environment import prepare_environment
from megatron.fault_tolerance.launch.error_file import WholeErrorFile
from megatron.fault_tolerance.launch.pretraining import pretrain
from megatron.fault_tolerance.launch.refusing import refuse
from moe_ft.keeper.forked_rank import run_script
from moe_ft.recovery.site import say


@partial(errors.record, error_handler=WholeErrorFile())
def run(target: Target) -> None:
    """Run a script, which finds its name, arguments and folder as if Python had started it."""
    prepare_environment()
    wrap_megatron()
    errors.get_error_handler = WholeErrorFile  # for the script's own `record`
    words = list(sys.argv)  # the script may change them
    try:
        if target.is_module:
            runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        else:
            run_script(target.name)
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
