"""Settings of moe_ft, read from Megatron's arguments and checked together with them.

The rules themselves are in validation.py, refusals.py and moe_ft/config.
"""

import argparse
import os
import socket
from collections.abc import Sequence

from megatron.fault_tolerance.seams.refusals import SEAM_REFUSALS
from megatron.fault_tolerance.seams.validation import (
    check_arguments,
    check_state_dtype,
    check_upstream_log,
    settings_without_effect,
)
from moe_ft.config import flags
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.rules import Rule
from moe_ft.recovery.site import say
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts


def add_moe_ft_flags(parser: argparse.ArgumentParser) -> None:
    """Add the --moe-ft-* flags to a parser, and make its --help work."""
    parts = flags.part_types(registry.option_types()).values()
    flags.add_flags(parser, parts, {"strategy": registry.names()})
    _mend_help(parser)


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape the percent signs that keep megatron-core 0.19.2 from printing its help."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % vars(action)
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")


def own_parser() -> argparse.ArgumentParser:
    """Return a parser of the --moe-ft-* flags alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_moe_ft_flags(parser)
    return parser


def config_from_arguments(args: argparse.Namespace) -> MoeFtConfig:
    """Collect the --moe-ft-* values of a parsed command line."""
    return flags.config_from(args, registry.option_types())


def is_off(args: argparse.Namespace) -> bool:
    """Return whether all --moe-ft-* values are their defaults, or no parser has read any."""
    return config_from_arguments(args) == config_from_arguments(argparse.Namespace())


def checked_config(
    args: argparse.Namespace, refusals: Sequence[Rule] = SEAM_REFUSALS
) -> MoeFtConfig:
    """Return the settings, checked without the model: it may still change. Nothing is built yet.

    Args:
        args: Megatron's arguments, before or after its own validation.
        refusals: the rules on flags that the program does not support.

    Raises:
        ConfigError: with one line that names flag, value, rule and remedy.
    """
    check_arguments(args, refusals)
    config = config_from_arguments(args)
    config.validate(args.world_size)
    check_upstream_log(args)
    if config.strategy.is_on:  # known only here, and needed only then
        check_state_dtype(args, config.precision)
        config.memory.resolve_job_id(os.environ)
        config.memory.resolve_node_id(os.environ, socket.gethostname())
    return config


def check_model(args: argparse.Namespace, config: MoeFtConfig) -> None:
    """Raise ConfigError if the strategy does not fit the model and the length of the run."""
    registry.check(
        config,
        ModelFacts(num_experts=args.num_experts or 0, num_iterations=planned_iterations(args)),
    )


def planned_iterations(args: argparse.Namespace) -> int:
    """Return the number of iterations of the whole run; 0 where it is not known."""
    if args.train_iters:
        return int(args.train_iters)
    return int((args.train_samples or 0) // args.global_batch_size) if args.global_batch_size else 0


def void_settings(
    args: argparse.Namespace, config: MoeFtConfig, command_line: Sequence[str]
) -> list[str]:
    """Return one line for each setting of moe_ft that changes nothing."""
    lines = config.warnings(planned_iterations(args) or None)
    return [*lines, *settings_without_effect(args, command_line)]


def warn(args: argparse.Namespace, lines: Sequence[str]) -> None:
    """Print lines on rank 0."""
    for line in lines if args.rank == 0 else ():
        say(f"warning: {line}")
