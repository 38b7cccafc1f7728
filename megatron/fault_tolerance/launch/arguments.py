"""The --moe-ft-* flags on the parser of a pretraining script, and the checks that need no model.

seams/settings.py reads and checks the settings; pretraining.py does so again with the arguments that the
script trains with.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.launch.environment import prepare_environment, prepare_restarts
from megatron.fault_tolerance.seams import elastic
from megatron.fault_tolerance.seams.flag_classes import SCRIPT_FLAGS, untested_lines
from megatron.fault_tolerance.seams.megatron_loop import megatron_parser
from megatron.fault_tolerance.seams.refusals import check_yaml
from megatron.fault_tolerance.seams.settings import (
    add_moe_ft_flags,
    checked_config,
    is_off,
    own_parser,
)
from megatron.fault_tolerance.seams.versions import later
from moe_ft.command_lines import FLAG_PREFIX, flags_of_moe_ft
from moe_ft.config.fields import flag_of
from moe_ft.config.flag_table import flag_classes
from moe_ft.loop.refusing import refuse, refusing
from moe_ft.saying import warn
from moe_ft.spelling import explained

# Variables that defaults of flags are read from, each with what it is for Megatron without it. They differ
# from rank to rank, so a parser that is made before has numbers in their place.
_STAND_INS = {-71: ("RANK", "0"), -72: ("LOCAL_RANK", "0"), -73: ("WORLD_SIZE", "1")}
ExtraArgs = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of moe_ft to a parser of Megatron's, as an ``extra_args_provider`` does.

    Where there is no GPU this also makes the process train on the CPU. A --moe-ft-* flag that is misspelled
    ends the process, even where the script ignores unknown flags.
    """
    if flag_of("strategy") in parser._option_string_actions:
        return parser
    prepare_environment()
    add_moe_ft_flags(parser)
    if cpu_device.is_active():
        cpu_device.set_cpu_defaults(parser)
    parser.error = partial(_refuse, parser)  # type: ignore[method-assign]  # argparse prints all of the usage
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        found, others = parse(*args, **kwargs)
        if unknown := [word for word in others if word.startswith(FLAG_PREFIX)]:
            _refuse(parser, f"unrecognized arguments: {' '.join(unknown)}")
        setattr(found, SCRIPT_FLAGS, _script_flags(parser))
        if os.environ.get("RANK", "0") == "0" and not is_off(found):
            _warn_once(*untested_lines(found, parser, getattr(found, SCRIPT_FLAGS)))
        return found, others

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    return parser


def parse_args(
    original: Callable[..., argparse.Namespace],
    extra_args_provider: ExtraArgs | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """Call Megatron's function of this name, and check what no script changes afterwards."""

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        # First, as it may add the flags itself.
        return add_arguments(parser if extra_args_provider is None else extra_args_provider(parser))

    with refusing():
        if flags_of_moe_ft(sys.argv):
            check_yaml(sys.argv[1:])
        args = original(add, ignore_unknown_args)
        if elastic.fit(args):
            args = original(add, ignore_unknown_args)
        if not is_off(args) and not args.use_checkpoint_args:
            prepare_restarts()
            checked_config(args)
    return args


def unread_flags(command_line: Sequence[str], args: argparse.Namespace) -> list[str]:
    """Return the --moe-ft-* flags of a command line whose values the arguments do not hold.

    A value that the script itself has set counts as read, except a default.
    """
    parser = own_parser()
    given, _ = parser.parse_known_args(list(command_line))
    return [
        action.option_strings[0]
        for action in parser._actions
        if (value := getattr(given, action.dest)) != action.default
        if getattr(args, action.dest, action.default) == action.default != value
    ]


def _script_flags(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    known = {each.dest for each in (*own_parser()._actions, *megatron_parser()._actions)}
    return tuple(sorted({each.dest for each in parser._actions} - known))


def prepare_parsers() -> None:
    """Do once in a process what its parsers would do again and again: before ranks are forked from it.

    Each of Megatron's parsers reads the sources of its settings for the help texts of the flags, which takes
    most of the time of a parser. The values of the flags do not depend on that. The parsers of a rank, one
    that parses and one for the defaults, are made here too.
    """
    flag_classes()
    factory: Any = later("megatron.training.argument_utils", "ArgumentGroupFactory")
    read = getattr(factory, "_get_field_docstrings", None)
    if read is not None:  # else a version that has another way
        known = functools.cache(lambda settings: read(factory.__new__(factory), settings))
        factory._get_field_docstrings = lambda _, settings: dict(known(settings))
    add: ExtraArgs = megatron_arguments.add_megatron_arguments
    spares: list[argparse.ArgumentParser] = []

    @functools.wraps(add)
    def add_once(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if not spares or len(parser._actions) != 1:  # a script has added some before
            return add(parser)
        made = vars(spares.pop()).items()  # its flags are in objects that its groups share
        shared = (list, dict, argparse._ActionsContainer)
        vars(parser).update({name: each for name, each in made if isinstance(each, shared)})
        for action in parser._actions:
            if isinstance(action.default, int) and action.default in _STAND_INS:
                action.default = int(os.environ.get(*_STAND_INS[action.default]))
        return parser

    before = dict(os.environ)
    os.environ |= {variable: str(number) for number, (variable, _) in _STAND_INS.items()}
    try:
        spares += [add(argparse.ArgumentParser(allow_abbrev=False)) for _ in range(2)]
    finally:
        for variable, _ in _STAND_INS.values():
            os.environ.pop(variable)
        os.environ |= before
    megatron_arguments.add_megatron_arguments = add_once


@functools.cache  # Megatron parses several times
def _warn_once(*lines: str) -> None:
    for line in lines:
        warn(line)


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    refuse(f"{explained(message, parser)} The flags are listed by --help.")
