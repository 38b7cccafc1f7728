"""A script of Megatron-Bridge that `moe_ft run` runs, with flags of moe_ft in front of it.

launch.py wraps the training of Bridge. moe_ft/commands/run.py reads the command line.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import megatron.training
from megatron.training import training
from torch.distributed.elastic.multiprocessing import errors

from megatron.fault_tolerance.bridge.refusals import check_overrides
from megatron.fault_tolerance.launch.environment import (
    WholeErrorFile,
    prepare_environment,
    take_slurms_variables,
)
from megatron.fault_tolerance.launch.pretraining import run_prepared
from moe_ft.cluster.member import own_assignment
from moe_ft.cluster.target import RUN
from moe_ft.command_lines import flags_of_moe_ft
from moe_ft.loop.refusing import refuse, refusing

_LAUNCH = "megatron.fault_tolerance.bridge.launch"


@partial(errors.record, error_handler=WholeErrorFile())
def run(name: str, flags: Sequence[str], *, is_module: bool = False) -> None:
    """Run a script or a module, in whose process Bridge's `pretrain` trains under moe_ft.

    Args:
        flags: of moe_ft, which the script does not see.
    """
    take_slurms_variables()
    prepare_environment(flags)
    with refusing():
        check_overrides(sys.argv[1:])  # before imports that take long; again when training begins
    bridge = importlib.import_module(_LAUNCH)  # only now: it imports Bridge
    bridge.wrap(flags)
    stock = training.pretrain  # whose parameters are looked at
    refusal = wraps(stock)(partial(_refuse_megatron, flags))
    training.pretrain = megatron.training.pretrain = refusal
    target = ("-m", name) if is_module else (os.path.realpath(name),)
    os.execve = partial(_execute, os.execve, [*RUN, *flags, "--", *target])
    check = partial(_check_has_trained, flags, bridge.has_trained)
    try:
        run_prepared(name, is_module=is_module, check=check)
    except _Again as again:
        os.environ |= again.environment
        sys.argv = [target[-1], *again.arguments]
        run_prepared(target[-1], is_module=is_module, check=check)


class _Again(BaseException):
    """End of a script that is to run again in the same process, with more variables."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__("the script executes itself")
        self.arguments = arguments
        self.environment = environment


def _check_has_trained(
    flags: Sequence[str], has_trained: Callable[[], bool], words: Sequence[str]
) -> None:
    """Refuse flags that had no effect, because the script never called Bridge's `pretrain`.

    Args:
        words: name and arguments of the script.
    """
    if not has_trained():
        refuse(
            f"{Path(words[0]).name} ended without calling pretrain of megatron.bridge.training.pretrain, so "
            f"{', '.join(flags_of_moe_ft(flags))} had no effect. Train with it, or start the script without "
            "moe_ft."
        )


def _refuse_megatron(flags: Sequence[str], *args: Any, **kwargs: Any) -> NoReturn:
    """Stand in for the `pretrain` of Megatron-LM, which takes its flags from the arguments of the script."""
    refuse(
        f"{', '.join(flags_of_moe_ft(flags))} in front of the script mean a job of Megatron-Bridge, and the "
        "script calls megatron.training.pretrain. Put the flags after the script."
    )


def _execute(
    execve: Callable[..., NoReturn],
    run_words: Sequence[str],
    path: str,
    words: Sequence[str],
    environment: Mapping[str, str],
) -> NoReturn:
    """Execute a program as `os.execve` does; if it is the script itself, again under moe_ft.

    Bridge's run_recipe.py does so for recipes of its benchmarks, to have variables set before it imports. A
    forked rank has imported already, and a program in its place would not know its agent: it stays.
    """
    words = list(words)
    if words[:1] == [sys.executable] and os.path.realpath("".join(words[1:2])) == run_words[-1]:
        if own_assignment() is not None:
            raise _Again(words[2:], environment)
        words[1:2] = run_words
    execve(path, words, environment)
