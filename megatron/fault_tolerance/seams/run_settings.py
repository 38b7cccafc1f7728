"""Settings of a run by flag, as JSON values: its fingerprint, what a replay must share, a script's own flags.

The classes of the flags are flag_classes.py.
"""

import argparse
import itertools
import re
from pathlib import Path
from typing import Any

from megatron.training.arguments import add_megatron_arguments

from megatron.fault_tolerance.seams.flag_classes import names_of
from moe_ft.config.flag_table import FLAGS, OF_SCRIPTS, PATHS, Kind, names_in

# The attribute of Megatron's arguments that names the flags of the script, by ``dest``.
SCRIPT_FLAGS = "moe_ft_script_flags"

_PATH_LISTS = frozenset({"data_path", "train_data_path"})
_OF_THE_END = "--exit-"  # they decide when a run ends, not what an iteration does
# Files that list paths, with weights: what they say counts.
_LISTING_FILES = frozenset({"data_args_path", "per_split_data_args_path"})


def fingerprint(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the training state depends on, by flag, as JSON values.

    State of a run that differs in one of them is another run's. Call it after Megatron's validation.
    """
    return _values_of(args, Kind.FINGERPRINT)


def replay_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that an iteration which is run again must share, by flag, as JSON values.

    Those of the fingerprint are not repeated. Call it after Megatron's validation.
    """
    return _values_of(args, Kind.REPLAY)


def record_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that decide what records hold, and which states are evaluated, by flag, as JSON.

    An iteration of which there is no record can only be run again with the same ones.
    """
    return {
        name: value
        for name, value in _values_of(args, Kind.RECORD).items()
        if not name.startswith(_OF_THE_END)
    }


def script_settings(args: argparse.Namespace) -> dict[str, str]:
    """Return the settings that only a script of one's own reads, by flag, as text.

    They are the flags that the script has added, and those of Megatron that pretrain_gpt_moe.py refuses or
    nothing but other programs reads, where they are not their defaults. Nobody but the script knows what they
    decide: the data, the loss, or the name of a log.
    """
    defaults = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    of_scripts = (names_in(text) for of in OF_SCRIPTS for text in FLAGS[of].values())
    names = {*getattr(args, SCRIPT_FLAGS, ()), *itertools.chain.from_iterable(of_scripts)}
    missing = object()
    return {
        "--" + name.replace("_", "-"): _as_text(value)
        for name in sorted(names)
        if (value := getattr(args, name, missing)) is not missing
        if value != getattr(defaults, name, missing)
    }


def _as_text(value: Any) -> str:
    """Return a value as text that is the same in the next start."""
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def _values_of(args: argparse.Namespace, kind: Kind) -> dict[str, Any]:
    return {  # what a Megatron does not have is left out, so that it is compared with nothing
        "--" + name.replace("_", "-"): _as_used(name, _setting(name, getattr(args, name)), args)
        for name in names_of(kind)
        if hasattr(args, name)
    }


def _as_used(name: str, value: Any, args: argparse.Namespace) -> Any:
    """Return what Megatron's configuration makes of a value, which may be written in several ways."""
    if name == "cp_comm_type" and isinstance(value, list) and len(value) == 1:
        return value[0]
    if name == "microbatch_group_size_per_vp_stage" and value is None:
        return args.pipeline_model_parallel_size
    if name == "moe_expert_capacity_factor" and value is not None and value < 0:
        return None
    if name == "decoupled_lr":  # given or not divides the parameters; the rate itself may change
        return value is not None
    return value


def _setting(name: str, value: Any) -> Any:
    if name in _PATH_LISTS:
        return [_last_part(str(word)) for word in value or ()]
    if name in PATHS and value is not None:
        return _last_part(value)
    if name in _LISTING_FILES and value is not None:
        words = re.findall(r"[^\s\"\[\]{}:,]+", Path(value).read_text(encoding="utf-8"))
        return [_last_part(word) for word in words]
    return _as_json(value)


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _as_json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
