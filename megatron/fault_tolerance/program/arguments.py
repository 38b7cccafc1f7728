"""Command line: stock Megatron's flags, the --moe-ft-* flags of moe_ft/config/flags.py, --text-dir.

validation.py checks how the flags fit together.
"""

import argparse
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from megatron.core.optimizer import distrib_optimizer
from megatron.core.transformer.enums import AttnBackend
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.program.data import check_splits
from megatron.fault_tolerance.program.flag_classes import untested_flags
from megatron.fault_tolerance.program.refusals import check_refusals, check_yaml
from megatron.fault_tolerance.program.text_dataset import (
    BYTE_VOCABULARY,
    TextSource,
    prepare_cached,
)
from megatron.fault_tolerance.program.validation import (
    check_arguments,
    check_state_dtype,
    settings_without_effect,
)
from moe_ft.config import flags
from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.recovery.site import say
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts

# Features of stock Megatron that need a GPU, turned off without one.
_CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "attention_backend": AttnBackend.unfused,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "num_workers": 0,
}
# Features that need the kernels of Transformer Engine or Apex.
_UNFUSED_DEFAULTS = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
}


def parse_arguments(command_line: Sequence[str]) -> tuple[argparse.Namespace, MoeFtConfig]:
    """Parse, check and complete the command line, and set Megatron's global arguments.

    Nothing is built and no process group exists yet. Every rank calls this with the same command
    line. With --text-dir this prepares the text (once per node) and passes it on as --data-path.

    Args:
        command_line: the arguments without the program's name.

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
    config = config_from_arguments(args)
    check_arguments(args)
    untested = _untested(args, parser)
    config.validate(args.world_size)
    model = ModelFacts(num_experts=args.num_experts or 0)
    registry.check(config, model)
    if config.strategy.is_on:  # known only here, and needed only then
        check_state_dtype(args, config.precision)
        config.memory.resolve_job_id(os.environ)
        config.memory.resolve_node_id(os.environ, socket.gethostname())
    if args.text_dir is not None:
        source = TextSource(paths=(args.text_dir,), tokenizer=args.tokenizer_model)
        prefix = prepare_cached(source, args.data_cache_path)
        sys.argv += ["--data-path", str(prefix), *_tokenizer_flags(args)]
    with refusals_of_megatron():
        args = megatron_arguments.parse_and_validate_args(add_flags)
        check_splits(args)
    check_refusals(args)  # Megatron's validation may have changed them
    iterations = args.train_iters or (args.train_samples or 0) // args.global_batch_size
    registry.check(config, replace(model, num_iterations=iterations))
    void = settings_without_effect(args, command_line)
    warnings = [*untested, *config.warnings(iterations or None), *void]
    for line in warnings if args.rank == 0 else ():
        say(f"warning: {line}")
    return args, config


def _parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return Megatron's parsed arguments and its parser."""
    parsers = []

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(add_flags(parser))
        return parsers[0]

    return megatron_arguments.parse_args(add), parsers[0]


def _untested(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return a line that names the untested flags of the command line, or no line."""
    flags = untested_flags(args, parser)
    return [f"no test of moe_ft runs with {', '.join(flags)}"] if flags else []


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser, and adapt its defaults to a machine without a GPU."""
    data = parser.add_argument_group("text data")
    data.add_argument(
        "--text-dir",
        metavar="DIR",
        help="train on the text files in a directory: they are tokenized once (bytes, or the "
        "Hugging Face tokenizer of --tokenizer-model) and cached under --data-cache-path",
    )
    parts = flags.part_types(registry.option_types()).values()
    flags.add_flags(parser, parts, {"strategy": registry.names()})
    # Megatron has no default, and divides by the value even without evaluation.
    parser.set_defaults(eval_interval=1000)
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        parser.set_defaults(**_UNFUSED_DEFAULTS)
    if cpu_device.is_active():
        parser.set_defaults(**_CPU_DEFAULTS)
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would print all of Megatron's usage
    return parser


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}. The flags are listed by --help.")


def config_from_arguments(args: argparse.Namespace) -> MoeFtConfig:
    """Collect the --moe-ft-* values of a parsed command line."""
    return flags.config_from(args, registry.option_types())


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
