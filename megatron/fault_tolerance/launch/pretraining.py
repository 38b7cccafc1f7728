"""Megatron's `pretrain` with the seams of moe_ft around it, and a script that is run with it.

arguments.py adds the flags; seams/hooks.py has the seams. moe_ft/commands/run.py reads the command line that
runs a script: Megatron's functions are wrapped before the script imports them.
"""

import argparse
import inspect
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import megatron.training
from megatron.training import arguments, get_args, training
from megatron.training.training import pretrain as stock_pretrain
from torch.distributed.elastic.multiprocessing import errors

from megatron.fault_tolerance.launch.arguments import (
    parse_args,
    prepare_parsers,
    unread_flags,
)
from megatron.fault_tolerance.launch.environment import (
    WholeErrorFile,
    prepare_environment,
    prepare_restarts,
)
from megatron.fault_tolerance.repair.seam import installed
from megatron.fault_tolerance.seams import elastic
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.settings import (
    check_model,
    checked_config,
    is_off,
    lines_on_gpus,
    lines_on_megatron,
    void_settings,
    warn,
)
from moe_ft import saying
from moe_ft.cluster.forked_rank import run_script
from moe_ft.cluster.target import BRIDGE
from moe_ft.command_lines import flags_of_moe_ft
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import HELP_ALL
from moe_ft.errors import ConfigError
from moe_ft.loop.listener_order import listeners_of
from moe_ft.loop.refusing import EXIT_NOT_SAVED, refuse, refusing
from moe_ft.saying import choose_format, say

END_GRACE_S = 2.0
_NEW_CALL = (
    "pretrain(pretrain_cfg_container_from_args(args, model_config), dataset_provider, "
    "ModelType.encoder_or_decoder, forward_step)"
)
_PARSE = "args = parse_and_validate_args(extra_args_provider=..., args_defaults=...)"

prepare_parsers()  # also in the process that ranks are forked from, which imports this and parses nothing


@wraps(stock_pretrain)
def pretrain(*args: Any, **kwargs: Any) -> Any:
    """Train as `megatron.training.pretrain` does, under the --moe-ft-* flags that Megatron's arguments hold.

    Without any it calls Megatron's function and does nothing else. The process ends with EXIT_REFUSED if the
    flags cannot work, with EXIT_BUSY if storage must be read first and is away, or memory of a node is
    taken, and with EXIT_NOT_SAVED if the last state should be on storage and is not.
    """
    call = partial(stock_pretrain, *args, **kwargs)
    with refusing():
        is_on = is_asked_for()
    if not is_on:
        _say_once("off: --moe-ft-strategy is none, and no other --moe-ft-* flag is set")
        return call()
    with refusing():
        check_call(args, kwargs)
        megatron_args = get_args()
        check_all_read(megatron_args)
        warn(megatron_args, lines_on_megatron(megatron_args))
        prepare_restarts()
        config = checked_config(megatron_args)
        check_model(megatron_args, config)
        elastic.check_fitted(config.elastic.elastic)
        warn(megatron_args, void_settings(megatron_args, config, sys.argv))
    return train(config, megatron_args, call)


def is_asked_for() -> bool:
    """Return whether the command line or Megatron's arguments, if they are set, hold any --moe-ft-* value."""
    settings = argparse.Namespace() if (args := _set_arguments()) is None else args
    return not is_off(settings) or bool(unread_flags(_command_line(), settings))


def _set_arguments() -> argparse.Namespace | None:
    """Return Megatron's arguments; None before they are set."""
    try:
        args: argparse.Namespace = get_args()
    except AssertionError:
        return None
    return args


def _command_line() -> list[str]:
    """Return all words: the script may have changed sys.argv; the original begins with the interpreter."""
    return [*sys.orig_argv, *sys.argv]


def train(
    config: MoeFtConfig,
    args: argparse.Namespace,
    call: Callable[..., Any],
    loop: MegatronLoop | None = None,
) -> Any:
    """Call a function that trains with the seams installed, and return its result.

    Args:
        args: Megatron's, or what stands for them in another loop.
        call: Megatron's `pretrain` with its arguments, or another loop's.
        loop: None for Megatron's own.
    """
    choose_format(config.observability.log_format)
    warnings = lines_on_gpus(config, args, args.world_size)
    on_sigterm = not _waits_for_sigterm(args)
    loop = MegatronLoop() if loop is None else loop
    listeners = listeners_of(config, loop, args.rank, on_sigterm=on_sigterm, warnings=warnings)
    result, end = None, None
    with refusing():  # only the built model or the disks may tell
        try:
            with installed(config, args, listeners) as arguments_of_repair, Patches() as patches:
                # It parses once more for two flags of its own, while others may wait for a replacement.
                patches.set(arguments, "parse_args", lambda *_, **__: args)
                result = call(**arguments_of_repair)
        except SystemExit as exit_:  # an --exit-* flag, or a failed validation of results
            if exit_.code:
                raise
            end = exit_
    ignore_exit_signal(args)
    if not listeners.loop.is_saved:
        time.sleep(END_GRACE_S)  # the first rank to end has the launcher end all others
        raise SystemExit(EXIT_NOT_SAVED)
    elastic.release(args.rank)
    if end is not None:
        raise end
    return result


def ignore_exit_signal(args: argparse.Namespace) -> None:
    """Ignore the signal of a planned end, which has come: who sends it again would end a rank that exits.

    SIGTERM keeps its meaning: launchers end with it ranks that do not exit.
    """
    if args.exit_signal_handler and args.exit_signal != signal.SIGTERM:
        signal.signal(args.exit_signal, signal.SIG_IGN)


def _waits_for_sigterm(args: argparse.Namespace) -> bool:
    """Return whether SIGTERM means a planned end, which Megatron makes after the iteration."""
    return bool(args.exit_signal_handler) and args.exit_signal == signal.SIGTERM


def _say_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        say(line)


def check_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ConfigError if `pretrain` is called as older Megatrons want it, or before flags are parsed."""
    try:
        given = inspect.signature(stock_pretrain).bind(*args, **kwargs).arguments
        problem = (
            "is called with a provider first, as in older Megatrons"
            if callable(given.get("cfg_container", args[0] if args else None))
            else ""
        )
    except TypeError as error:
        problem = f"is called in a way that it does not take ({error})"
    if problem:
        raise ConfigError(
            f"pretrain {problem}. The script needs this change: {_PARSE}, then {_NEW_CALL}; "
            "a script with a model provider passes it as model_provider=..., and no model_config."
        )
    if _set_arguments() is None:
        raise ConfigError(
            f"pretrain is called before Megatron's arguments are set. Add {_PARSE} before the call."
        )


def check_all_read(args: argparse.Namespace) -> None:
    """Raise ConfigError if the command line has --moe-ft-* flags that Megatron's arguments do not hold."""
    if unread := unread_flags(_command_line(), args):
        raise ConfigError(
            f"{', '.join(unread)} would be ignored: the script has made its arguments without Megatron's "
            "parser, or without the command line. Call megatron.fault_tolerance.add_arguments(parser) on the "
            "parser that reads the command line, and keep what it reads in Megatron's arguments."
        )


@partial(errors.record, error_handler=WholeErrorFile())
def run(name: str, *, is_module: bool = False) -> None:
    """Run a script or a module, which finds its name, arguments and folder as if Python had started it."""
    prepare_environment()
    wrap_megatron()
    run_prepared(name, is_module=is_module, check=check_has_trained)


def run_prepared(name: str, *, is_module: bool, check: Callable[[list[str]], None]) -> None:
    """Run a script or a module in a process that is ready for it.

    Args:
        check: is called at the end with the name and the arguments, unless the script has failed.
    """
    errors.get_error_handler = WholeErrorFile  # for the script's own `record`
    words = list(sys.argv)  # the script may change them
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            run_script(name)
    except SystemExit as end:
        if end.code or {"-h", "--help", HELP_ALL} & {*words}:
            raise
        check(words)
        raise
    check(words)


def wrap_megatron() -> None:
    """Wrap what scripts call, for the whole process; they have not imported it yet."""
    original = arguments.parse_args
    arguments.parse_args = wraps(original)(partial(parse_args, original))
    training.pretrain = megatron.training.pretrain = pretrain


def check_has_trained(words: list[str]) -> None:
    """Refuse --moe-ft-* flags that had no effect, because the script never called `pretrain`."""
    if training._STARTUP_TIMESTAMPS["pretrain_entry"] is not None:
        return
    problem = f"{Path(words[0]).name} ended without calling megatron.training.pretrain"
    remedy = (
        "Put the flags of moe_ft in front of a script of Megatron-Bridge: moe_ft run FLAGS... -- SCRIPT."
        if BRIDGE in sys.modules
        else "Train with pretrain, or use megatron.fault_tolerance.Checkpointer in another loop."
    )
    if unused := flags_of_moe_ft(words):
        refuse(f"{problem}, so {', '.join(unused)} had no effect. {remedy}")
    saying.warn(f"{problem}: moe_ft did nothing. {remedy}")
