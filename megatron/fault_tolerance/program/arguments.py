"""Command line of pretrain_gpt_moe.py: stock Megatron's flags, those of moe_ft, --text-dir; and its rules.

They are checked before anything is built. A script of your own may support what it does not. Each message
names the flag, its value, the rule and the remedy. seams/refusals.py and seams/settings.py have the rules
that hold for every program.
"""

import argparse
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

from megatron.core.optimizer import distrib_optimizer
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.program import slots
from megatron.fault_tolerance.program.forward_step import check_splits
from megatron.fault_tolerance.program.text_dataset import (
    BYTE_VOCABULARY,
    TextSource,
    prepare_cached,
)
from megatron.fault_tolerance.seams import elastic
from megatron.fault_tolerance.seams.contents import PATH_LISTS, is_number
from megatron.fault_tolerance.seams.flag_classes import untested_lines
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.refusals import (
    SEAM_REFUSALS,
    check_refusals,
    check_yaml,
    refused_flag,
)
from megatron.fault_tolerance.seams.settings import (
    add_moe_ft_flags,
    check_model,
    checked_config,
    lines_on_megatron,
    void_settings,
    warn,
)
from moe_ft.command_lines import as_flag
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.rules import Rule, check_rules
from moe_ft.errors import ConfigError
from moe_ft.spelling import explained

_IGNORED = "pretrain_gpt_moe.py would ignore it"
_UNREAD = "nothing in Megatron reads it, so it would have no effect"
_NOT_GPT = "pretrain_gpt_moe.py trains GPTs only, and would ignore it"

PROGRAM_REFUSALS: tuple[Rule, ...] = (
    # Features that a training program must implement, and this one does not.
    refused_flag("sft", _IGNORED),
    refused_flag("fim_data", _IGNORED),
    refused_flag("dataloader_inter_document_masking", _IGNORED),
    refused_flag("per_dataset_sequences_path", _IGNORED),
    refused_flag("check_for_spiky_loss", _IGNORED),
    refused_flag(
        "logits_load_dir",
        "pretrain_gpt_moe.py has no loss for it, and would train without the teacher",
        "Leave it out, or distill with Megatron's own pretrain_gpt.py",
    ),
    refused_flag(
        "log_straggler",
        _IGNORED,
        "Leave it out; --timing-log-level 2 --timing-log-option all shows the times of every rank",
    ),
    refused_flag(
        "vision_pretraining", _NOT_GPT, "Leave it out, or use Megatron's own program for it"
    ),
    *(
        refused_flag(dest, _NOT_GPT, "Describe the model with --num-layers and --moe-layer-freq")
        for dest in (
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
            "mtp_hybrid_override_pattern",
            "is_hybrid_model",
        )
    ),
    refused_flag(
        "lazy_mpu_init", "Megatron then leaves the process groups to its caller, which builds none"
    ),
    # Flags that nothing reads, although a user would expect an effect.
    refused_flag("apply_residual_connection_post_layernorm", _UNREAD),
    refused_flag("openai_gelu", _UNREAD),
    Rule(
        "sample_rate",
        "--sample-rate",
        lambda args: args.sample_rate != 1.0,
        _UNREAD,
    ),
    # Flags on which Megatron itself fails, later and with a traceback.
    refused_flag(
        "init_method_xavier_uniform",
        "Megatron 0.19.2 passes it to a configuration that does not know it, and fails",
        "Use --init-method-std",
    ),
    Rule(
        "full_validation",
        "--full-validation without --multiple-validation-sets",
        lambda args: args.full_validation and not getattr(args, "multiple_validation_sets", 0),
        "Megatron 0.19.2 fails in the first evaluation, with one validation set",
        "Add --multiple-validation-sets, or use --eval-iters",
    ),
)

REFUSALS = (*SEAM_REFUSALS, *PROGRAM_REFUSALS)
_LOCAL = (
    Rule(
        "num_experts",
        "--num-experts",
        lambda args: (
            args.num_experts
            and args.transformer_impl == "local"
            and args.add_bias_linear
            and args.swiglu
            and args.bias_swiglu_fusion
        ),
        "Megatron 0.19.2 adds no bias of experts in its fused SwiGLU, and fails",
        "Add one of the flags",
        problem="with --swiglu needs --disable-bias-linear or --no-bias-swiglu-fusion",
    ),
    Rule(
        "",
        "--apply-layernorm-1p",
        lambda args: (
            args.sequence_parallel
            and args.transformer_impl == "local"
            and args.layernorm_zero_centered_gamma
        ),
        remedy="Leave it out, or use --transformer-impl transformer_engine",
        problem="is not supported by the local implementation's norm",
    ),
)


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
    if elastic.fit(args):
        args, parser = _parse()
    config = checked_config(args, REFUSALS)
    check_program(args)
    check_model(args, config)
    untested = untested_lines(args, parser) if args.rank == 0 else []  # which prints them
    if args.text_dir is not None:
        source = TextSource(paths=(args.text_dir,), tokenizer=args.tokenizer_model)
        prefix = prepare_cached(source, args.data_cache_path)
        sys.argv += ["--data-path", str(prefix), *_tokenizer_flags(args)]
    with refusals_of_megatron(), Patches() as patches:
        if args.text_dir is None:  # else the command line has become another one
            patches.set(megatron_arguments, "parse_args", lambda *_: args)
        args = megatron_arguments.parse_and_validate_args(add_flags)
        check_splits(args)
    check_refusals(
        args, (*REFUSALS, *slots.SLOT_REFUSALS)
    )  # Megatron's validation may have changed them
    check_model(args, config)
    slots.complete(args)
    warn(args, [*untested, *void_settings(args, config, command_line), *lines_on_megatron(args)])
    return args, config


def _parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
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
        parser.set_defaults(**cpu_device.UNFUSED_DEFAULTS)
    if cpu_device.is_active():
        cpu_device.set_cpu_defaults(parser)
    parser.error = partial(_refuse, parser)  # type: ignore[method-assign]  # argparse prints all of the usage
    return parser


def _refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ConfigError(f"{explained(message, parser)} The flags are listed by --help.")


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
        reason = " ".join(str(error).split()) or _rule_of(error)
        raise ConfigError(
            f"Megatron refuses these arguments: {reason}. "
            "The flags and their rules are listed by --help and in Megatron's documentation."
        ) from error


def _rule_of(error: Exception) -> str:
    """Return the line of Megatron that has raised an error without a text, such as an `assert`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    first, end = last.lineno or 0, last.end_lineno or 0
    lines = (linecache.getline(last.filename, number) for number in range(first, end + 1))
    text = " ".join(" ".join(lines).split()) or type(error).__name__
    return f"{text} ({Path(last.filename).name}, line {first})"


def check_program(args: argparse.Namespace) -> None:
    """Raise ConfigError on the first rule that Megatron's parsed arguments break."""
    check_rules(_LOCAL, args)
    check_refusals(args, slots.SLOT_REFUSALS)
    _check_transformer_engine(args)
    _check_data(args)


def _check_transformer_engine(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("transformer_engine"):
        return
    needing = {"layernorm", "moe_act", "mla_up_proj"} & set(args.recompute_modules or ())
    if needing and args.recompute_granularity not in (None, "full"):
        raise ConfigError(
            f"--recompute-modules {' '.join(sorted(needing))} needs the package transformer-engine, "
            "which is not installed. Recompute core_attn, moe, mlp or shared_experts instead."
        )
    if args.transformer_impl == "transformer_engine":
        raise ConfigError(
            "--transformer-impl=transformer_engine needs the package transformer-engine, which is "
            "not installed. Install it (pip install 'transformer-engine[pytorch]', on a machine with a "
            "GPU), or use --transformer-impl local."
        )


def _check_data(args: argparse.Namespace) -> None:
    given = [
        flag
        for flag, value in (
            ("--text-dir", args.text_dir),
            ("--data-path", args.data_path),
            ("--train-data-path", args.train_data_path),
            ("--data-args-path", args.data_args_path),
            ("--per-split-data-args-path", args.per_split_data_args_path),
            ("--mock-data", args.mock_data),
        )
        if value
    ]
    if args.data_path == []:
        raise ConfigError("--data-path is given without a value: it needs the prefix of a dataset.")
    if not given:
        raise ConfigError(
            "no training data: give --text-dir DIR (a directory of text), --data-path PREFIX "
            "(written by tools/prepare_text.py or Megatron's own tools) or --mock-data."
        )
    if len(given) > 1 and "--text-dir" in given:
        raise ConfigError(f"{' and '.join(given)} exclude each other. Keep one of them.")
    if args.text_dir is not None and args.tokenizer_type is not None:
        raise ConfigError(
            f"--tokenizer-type={args.tokenizer_type} and --text-dir exclude each other: the text is "
            "tokenized as bytes, or with the Hugging Face tokenizer of --tokenizer-model. "
            "Leave --tokenizer-type out."
        )
    for flag in PATH_LISTS:
        _check_prefixes(as_flag(flag), getattr(args, flag) or [])


def _check_prefixes(flag: str, words: list[str]) -> None:
    """Check every dataset prefix of a blend, which may have weights between the prefixes."""
    for word in words:
        if is_number(word) or "://" in word:
            continue
        for suffix in (".idx", ".bin"):
            path = Path(word + suffix)
            if not path.is_file():
                raise ConfigError(
                    f"{flag} {word}: {path} does not exist. Give the prefix of an indexed dataset, "
                    "without .bin or .idx; tools/prepare_text.py writes one."
                )
        if Path(word + ".bin").stat().st_size == 0:
            raise ConfigError(
                f"{flag} {word}: {word}.bin is empty, a dataset must hold at least one token. "
                "Prepare it again with tools/prepare_text.py."
            )
