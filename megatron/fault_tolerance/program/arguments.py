"""Command line: stock Megatron's flags, the --moe-ft-* flags of moe_ft/config/flags.py, --text-dir.

validation.py checks how the flags fit together.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from megatron.core.optimizer import distrib_optimizer
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.cpu.defaults import UNFUSED_DEFAULTS, set_cpu_defaults
from megatron.fault_tolerance.program.data import check_splits
from megatron.fault_tolerance.program.text_dataset import (
    BYTE_VOCABULARY,
    TextSource,
    prepare_cached,
)
from megatron.fault_tolerance.program.validation import REFUSALS, check_program
from megatron.fault_tolerance.seams.flag_classes import untested_flags, untested_line
from megatron.fault_tolerance.seams.refusals import check_refusals, check_yaml
from megatron.fault_tolerance.seams.settings import (
    add_moe_ft_flags,
    check_model,
    checked_config,
    void_settings,
    warn,
)
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.stock_defects import lines_on_defects
from moe_ft.errors import ConfigError


def parse_arguments(command_line: Sequence[str]) -> tuple[argparse.Namespace, MoeFtConfig]:
    """Parse, check and complete the command line, and set Megatron's global arguments.

    Nothing is built and no process group exists yet. Every rank calls this with the same command
    line. With --text-dir this prepares the text (once per node) and passes it on as --data-path.

    Returns:
        Megatron's arguments after its own validation, and the settings of moe_ft.

    Raises:
        ConfigError: with one line that names flag, value, rule and remedy, also if Megatron's own
            validation refuses the command line.
    """
    check_yaml(command_line)
    # Megatron parses sys.argv and nothing else.
    sys.argv = [sys.argv[0], *command_line]
    args, parser = _parse()
    config = checked_config(args, REFUSALS)
    check_program(args)
    check_model(args, config)
    untested = untested_line(untested_flags(args, parser))
    if args.text_dir is not None:
        source = TextSource(paths=(args.text_dir,), tokenizer=args.tokenizer_model)
        prefix = prepare_cached(source, args.data_cache_path)
        sys.argv += ["--data-path", str(prefix), *_tokenizer_flags(args)]
    with refusals_of_megatron():
        args = megatron_arguments.parse_and_validate_args(add_flags)
        check_splits(args)
    check_refusals(args, REFUSALS)  # Megatron's validation may have changed them
    check_model(args, config)
    warn(args, [*untested, *void_settings(args, config, command_line), *lines_on_defects(args)])
    return args, config


def _parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return Megatron's parsed arguments and its parser."""
    parsers = []

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(add_flags(parser))
        return parsers[0]

    return megatron_arguments.parse_args(add), parsers[0]


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser, and adapt its defaults to a machine without a GPU."""
    data = parser.add_argument_group("text data")
    data.add_argument(
        "--text-dir",
        metavar="DIR",
        help="train on the text files in a directory: they are tokenized once (bytes, or the "
        "Hugging Face tokenizer of --tokenizer-model) and cached under --data-cache-path",
    )
    add_moe_ft_flags(parser)
    # Megatron has no default, and divides by the value even without evaluation.
    parser.set_defaults(eval_interval=1000)
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        parser.set_defaults(**UNFUSED_DEFAULTS)
    if cpu_device.is_active():
        set_cpu_defaults(parser)
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would print all of Megatron's usage
    return parser


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}. The flags are listed by --help.")


def _tokenizer_flags(args: argparse.Namespace) -> list[str]:
    """Return the flags that make Megatron read tokens the way prepare_cached wrote them."""
    if args.tokenizer_model is not None:
        return ["--tokenizer-type", "HuggingFaceTokenizer"]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(BYTE_VOCABULARY)]


@contextmanager
def refusals_of_megatron() -> Iterator[None]:
    """Turn an error of Megatron's own validation into a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except (AssertionError, ValueError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"Megatron refuses these arguments: {reason}. "
            "The flags and their rules are listed by --help and in Megatron's documentation."
        ) from error
