"""Rules on Megatron's arguments, checked before any process group or model is built.

Each message names the flag, its value, the rule and the remedy. Flags that are not supported are in
refusals.py; rules on --moe-ft-* values alone are in moe_ft/config. Megatron checks the other rules on its own
flags.
"""

import argparse
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from megatron.fault_tolerance.program.refusals import check_refusals
from moe_ft.config.precision import PrecisionConfig
from moe_ft.errors import ConfigError
from moe_ft.format.packings import Packing
from moe_ft.planning.parallel_sizes import check_experts, check_world_size

TESTED_MEGATRON_VERSIONS = ("0.19.2",)

# The parts of the state that --moe-ft-state-dtype can name.
_PARTS_OF_OPTIMIZERS = {"adam": ("master", "exp_avg", "exp_avg_sq"), "lion": ("master", "exp_avg")}


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ConfigError on the first rule that Megatron's parsed arguments break."""
    check_megatron_version(args.moe_ft_allow_untested_megatron)
    _check_sizes(args)
    check_refusals(args)
    _check_local_norm(args)
    _check_transformer_engine(args)
    _check_data(args)
    check_event_log(args.moe_ft_event_log)


def check_state_dtype(args: argparse.Namespace, precision: PrecisionConfig) -> None:
    """Raise ConfigError if a part of the state cannot be kept in the format that a flag names for it."""
    kept = {
        "master": args.main_params_dtype,
        "exp_avg": args.exp_avg_dtype,
        "exp_avg_sq": args.exp_avg_sq_dtype,
    }
    for part, packing in precision.packings.items():
        if packing is Packing.EXACT:
            continue
        given = f"--moe-ft-state-dtype={precision.state_dtype}"
        if part not in _PARTS_OF_OPTIMIZERS.get(args.optimizer, ("master",)):
            raise ConfigError(
                f"{given}: --optimizer {args.optimizer} keeps no {part}. Leave it out of the list."
            )
        if kept[part] != "fp32":
            flag = "main-params" if part == "master" else part.replace("_", "-")
            raise ConfigError(
                f"{given}: the optimizer itself keeps {part} in {kept[part]} (--{flag}-dtype), and "
                "snapshots hold that as it is. Leave it out of the list."
            )
        if part == "master" and args.use_precision_aware_optimizer:
            raise ConfigError(
                f"{given}: with --use-precision-aware-optimizer masters are the optimizer's own, and "
                "snapshots hold them as they are. Leave master out of the list."
            )
        if packing is Packing.SPLIT and not args.bf16:
            raise ConfigError(
                f"{given}: masters can be split only where forward uses BF16 weights. Add --bf16, or use "
                "master=exact."
            )


def settings_without_effect(args: argparse.Namespace, command_line: Sequence[str]) -> list[str]:
    """Return one line for each flag of moe_ft that has no effect with Megatron's arguments.

    Args:
        command_line: as given: shows a flag that is given with its default value.
    """
    is_given = any(word.partition("=")[0] == "--moe-ft-sharding" for word in command_line)
    if not is_given or not args.use_distributed_optimizer or args.moe_ft_strategy == "none":
        return []
    return [
        f"--moe-ft-sharding={args.moe_ft_sharding} changes nothing with --use-distributed-optimizer: every "
        "rank saves the slices that the optimizer has given it (only frozen parameters are replicated)"
    ]


def check_megatron_version(allow_untested: bool) -> None:
    """Raise ConfigError for a version that moe_ft was not tested with, unless it is allowed."""
    # Not megatron.core.__version__, which contains the revision of any git tree around it.
    installed = importlib.metadata.version("megatron-core")
    if installed not in TESTED_MEGATRON_VERSIONS and not allow_untested:
        raise ConfigError(
            f"megatron-core {installed} is installed, moe_ft was tested with "
            f"{', '.join(TESTED_MEGATRON_VERSIONS)} and its seams may not fit. Install a tested "
            f"version (pip install megatron-core=={TESTED_MEGATRON_VERSIONS[-1]}), or take the "
            "risk with --moe-ft-allow-untested-megatron."
        )


_SIZES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)


def _check_sizes(args: argparse.Namespace) -> None:
    for flag in _SIZES:
        size = getattr(args, flag[2:].replace("-", "_"))
        if size is not None and size < 1:
            raise ConfigError(f"{flag}={size} must be at least 1. Give a number of ranks.")
    check_world_size(args, args.world_size)
    check_experts(args.num_experts, args.expert_model_parallel_size, args.moe_router_topk)
    if args.num_experts and args.transformer_impl == "local" and args.add_bias_linear:
        raise ConfigError(
            f"--num-experts={args.num_experts} with --transformer-impl=local needs "
            "--disable-bias-linear: Megatron's local experts fail to add a bias. Add the flag, or use "
            "--transformer-impl transformer_engine."
        )


def _check_local_norm(args: argparse.Namespace) -> None:
    if (
        args.sequence_parallel
        and args.transformer_impl == "local"
        and args.layernorm_zero_centered_gamma
    ):
        raise ConfigError(
            "--apply-layernorm-1p is not supported by the local implementation's norm. Leave it out, "
            "or use --transformer-impl transformer_engine."
        )


def _check_transformer_engine(args: argparse.Namespace) -> None:
    if importlib.util.find_spec("transformer_engine"):
        return
    needing = {"layernorm", "moe_act", "mla_up_proj"} & set(args.recompute_modules or ())
    if needing and args.recompute_granularity == "selective":
        raise ConfigError(
            f"--recompute-modules {' '.join(sorted(needing))} needs the package transformer-engine, "
            "which is not installed. Recompute core_attn, moe, mlp or shared_experts instead."
        )
    if args.transformer_impl == "transformer_engine":
        raise ConfigError(
            "--transformer-impl=transformer_engine needs the package transformer-engine, which is "
            "not installed. Install it (pip install moe-ft[te], on a machine with a GPU), or use "
            "--transformer-impl local."
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
    for flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        _check_prefixes("--" + flag.replace("_", "-"), getattr(args, flag) or [])


def check_event_log(directory: str | None) -> None:
    """Raise ConfigError unless the directory of the event log, if there is one, exists or can be made."""
    if directory is None:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(directory, os.W_OK | os.X_OK) else "no right to write there"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(
            f"--moe-ft-event-log={directory} cannot be written ({problem}): it must be a directory, or a "
            "path where one can be created. Name another one."
        )


def _check_prefixes(flag: str, words: list[str]) -> None:
    """Check every dataset prefix of a blend, which may have weights between the prefixes."""
    for word in words:
        if _is_number(word) or "://" in word:
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


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
