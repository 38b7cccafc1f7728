"""Defects of stock Megatron that the flags of a job show: what they cost, and what it fails with later.

Names of flags in, lines for people out: no torch, and of Megatron only the text. moe_ft/convert/model.py
finds the damage in a checkpoint.
"""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_ft.command_lines import as_flag, flag_value
from moe_ft.errors import ConfigError

FLAG = "--dist-ckpt-optim-fully-reshardable"
_FLAG_NAME = "dist_ckpt_optim_fully_reshardable"
SHIFTED_MASTERS = (
    f"Megatron 0.19 saves the fp32 masters and the moments of later gradient buckets from shifted places "
    f"with {FLAG} and --overlap-grad-reduce"
)
# Of 2026-08-25; no released version has it.
SHARED_RANDOM_STATE = (
    "Megatron keeps one random state for all expert-parallel ranks in a checkpoint, so all but the first "
    "continue with random numbers of experts that are not theirs (--moe-router-force-load-balancing and "
    "dropout in experts draw them); PR 6858 to Megatron-LM mends it"
)
# PR 6666 to Megatron-LM brought it after 2026-08-22, PR 6920 of 2026-08-27 describes it: no release has it.
NOT_GATHERED = (
    "Megatron of late August 2026 does not gather weights after loading with a layer-wise optimizer, so "
    "data-parallel ranks continue with different ones, without an error (PR 6920)"
)
SHIFTED_REMEDY = f"save without {FLAG} or without --overlap-grad-reduce"

_AFTER_LOADING = "quantize_and_sync_model_params_from_main_params"
_SWITCHES = (
    *("no_save_optim", "overlap_grad_reduce", "use_distributed_optimizer"),
    *("no_load_rng", "finetune", _FLAG_NAME),
)
_TEXTS = ("save", "load", "lr_decay_style", "optimizer", "ckpt_format")
_NUMBERS = (
    *("lr", "lr_warmup_init", "lr_warmup_fraction", "expert_model_parallel_size"),
    *("train_iters", "lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters"),
    *("train_samples", "lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples"),
)


def lines_on_defects(args: argparse.Namespace) -> list[str]:
    """Return one line for each defect that damages what a job saves with `--save`."""
    names = ("save", "use_distributed_optimizer", "overlap_grad_reduce", _FLAG_NAME)
    is_saved = args.ckpt_format == "torch_dist" and not args.no_save_optim
    if is_saved and args.save and args.optimizer == "soap":
        return [
            f"--optimizer=soap with --save={args.save}: Megatron asserts that state has the shape of the "
            "weights, which SOAP's factors do not have, so the first save ends the job. Instead, save with "
            "--no-save-optim or with --moe-ft-persist-dir"
        ]
    if not is_saved or not all(getattr(args, name, None) for name in names):
        return []
    return [
        f"{FLAG} with --save={args.save}: {SHIFTED_MASTERS}, unless there is one bucket. Whoever loads such "
        f"a checkpoint trains on with wrong masters. Instead, {SHIFTED_REMEDY}. Checkpoints of moe_ft are "
        "not affected"
    ]


def lines_on_load(args: Any) -> list[str]:
    """Return one line for each defect that damages what a job continues with from `--load`."""
    has_state = args.load and not args.finetune and not args.no_load_rng
    lines = []
    if has_state and (args.expert_model_parallel_size or 1) > 1 and _shares_random_state():
        lines.append(
            f"--load={args.load}: {SHARED_RANDOM_STATE}. Instead, continue from state of moe_ft, which has "
            "those of every rank"
        )
    if args.load and is_layer_wise(args) and _leaves_out_gathering():
        lines.append(
            f"--load={args.load}: {NOT_GATHERED}. Instead, continue from state of moe_ft, after which "
            "weights are gathered, or use a release of Megatron"
        )
    return lines


def is_layer_wise(args: Any) -> bool:
    """Return whether each data-parallel rank steps whole parameters; Megatron's validation may be due."""
    name = args.optimizer or "adam"
    asked = args.use_distributed_optimizer and name not in ("adam", "sgd")
    return bool(
        asked
        or name.startswith("dist_")
        or getattr(args, "use_layer_wise_distributed_optimizer", False)
    )


def _text_of(*parts: str) -> str:
    """Return a file of the Megatron that an import would take; empty if it has none such."""
    spec = find_spec("megatron.core")
    place = Path((spec and spec.origin) or ".").parent.parent.joinpath(*parts)
    return place.read_text(encoding="utf-8") if place.is_file() else ""


def _leaves_out_gathering() -> bool:
    """Return whether Megatron looks for what to gather only where layer-wise optimizers do not have it."""
    text = _text_of("core", "optimizer", "optimizer.py")
    finding = text.partition("def _unique_model_chunks(")[2].partition("\n    def ")[0]
    layer_wise = _text_of("core", "optimizer", "layer_wise_optimizer.py")
    is_mended = "self.model_chunks" in finding or "_unique_model_chunks" in layer_wise
    return bool(finding) and f"def {_AFTER_LOADING}(" not in layer_wise and not is_mended


def _shares_random_state() -> bool:
    """Return whether the Megatron that an import would take has one random state for a pipeline place."""
    text = _text_of("training", "checkpointing.py")
    function = text.partition("def get_rng_state(")[2].partition("\nclass ")[0]
    return bool(re.search(r"\(pp_size, tp_size\),\s*\(pp_rank, tp_rank\),\s*replica_id=", function))


def check_schedule(args: Any) -> None:
    """Check what Megatron's scheduler asserts without a word, once the model is built.

    Raises:
        ConfigError: with flag, value, rule and remedy.
    """
    kind = "iters" if args.train_iters else "samples"
    warmup, wsd = (getattr(args, f"lr_{name}_{kind}") for name in ("warmup", "wsd_decay"))
    decay = getattr(args, f"lr_decay_{kind}")
    flag = f"--train-{kind}" if decay is None else f"--lr-decay-{kind}"
    length = getattr(args, f"train_{kind}") if decay is None else decay
    problem = ""
    lowers_it = hasattr(args, "lr_warmup_steps")  # Megatron-Bridge, before the assertion
    if length and warmup and warmup >= length and not lowers_it:
        problem = (
            f"--lr-warmup-{kind}={warmup:g} must be less than {flag}={length:g}, where decay ends"
        )
    elif (args.lr_warmup_fraction or 0) >= 1:
        problem = f"--lr-warmup-fraction={args.lr_warmup_fraction:g} must be less than 1"
    elif args.lr is not None and (args.lr_warmup_init or 0) > args.lr:
        problem = f"--lr-warmup-init={args.lr_warmup_init:g} must be at most --lr={args.lr:g}"
    elif args.lr_decay_style == "WSD" and wsd is None:
        raise ConfigError(f"--lr-decay-style=WSD needs --lr-wsd-decay-{kind}. Add it.")
    if problem:
        raise ConfigError(f"{problem}. Lower the first, or raise the second.")


def read_saves(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments that the functions above read, of a command line that starts training."""
    given = {
        **{name: as_flag(name) in words for name in _SWITCHES},
        **{name: flag_value(words, as_flag(name)) or None for name in _TEXTS},
        **{name: _number(flag_value(words, as_flag(name))) for name in _NUMBERS},
    }
    return argparse.Namespace(**{**given, "ckpt_format": given["ckpt_format"] or "torch_dist"})


def _number(text: str) -> float | None:
    """Return a number, None for what a start of training refuses."""
    with suppress(ValueError):
        return float(text)
    return None
