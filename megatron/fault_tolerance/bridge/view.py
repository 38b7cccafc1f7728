"""Megatron's arguments, read from and written to the configuration and the train state of Megatron-Bridge.

Most fields have the names of Megatron's flags; bridge/fields.py has those of other names, and says from which
section a name is read. Nothing is taken from the defaults of Megatron's parser: a name that nobody has here
is not there.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

from megatron.fault_tolerance.bridge.fields import RENAMED, Field, fields_of
from megatron.fault_tolerance.bridge.refusals import value_at
from megatron.fault_tolerance.seams.settings import own_parser
from moe_ft.config.flag_table import flag_classes

# Megatron's argument -> field of Bridge's TrainState, which is alive: the loop counts in it.
_STATE = {
    "iteration": "step",
    "num_floating_point_operations_so_far": "floating_point_operations_so_far",
    **{
        name: name
        for name in (
            *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
            *("do_train", "do_valid", "do_test"),
        )
    },
}
_DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "fp8",
}
_WRITTEN_AS_TEXT = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}  # in a layout of stages


def _activates(config: Any, name: str, *, is_gated: bool) -> bool:
    function = getattr(config.model.activation_func, "__name__", "")
    return function == name and bool(config.model.gated_linear_unit) == is_gated


def _padded_vocabulary(config: Any) -> int | None:
    model = config.model
    size: int | None = model.vocab_size
    if size is None or not model.should_pad_vocab:
        return size
    multiple: int = model.make_vocab_size_divisible_by * model.tensor_model_parallel_size
    return -(-size // multiple) * multiple


def _layout(config: Any) -> str | None:
    """Return which layers the stages have, as --pipeline-model-parallel-layout writes it."""
    layout = config.model.pipeline_model_parallel_layout
    rows = getattr(layout, "input_data", layout)  # as given, also where Megatron Core has read it
    if rows is None or isinstance(rows, str):
        return rows
    names = ([getattr(layer, "name", layer) for layer in row] for row in rows)
    return "|".join("".join(_LETTERS.get(name, name[0]) for name in row) for row in names)


# Arguments that Megatron makes of several flags, or writes in other ways.
_FROM_CONFIG: Mapping[str, Callable[[Any], Any]] = {
    "data_parallel_size": lambda config: config.data_parallel_size,
    "decoder_seq_length": lambda config: config.model.seq_length,
    "fp4_param_gather": lambda config: config.ddp.fp4_param_gather or config.model.fp4_param,
    "fp8_param_gather": lambda config: config.ddp.fp8_param_gather or config.model.fp8_param,
    "group_query_attention": (
        lambda config: config.model.num_query_groups not in (None, config.model.num_attention_heads)
    ),
    "inprocess_restart": lambda config: bool(
        config.inprocess_restart and config.inprocess_restart.enabled
    ),
    "max_position_embeddings": lambda config: config.model.seq_length,
    "num_layers_per_virtual_pipeline_stage": (
        lambda config: config.model.virtual_pipeline_model_parallel_size
    ),
    "padded_vocab_size": _padded_vocabulary,
    "pipeline_model_parallel_layout": _layout,
    "quick_geglu": lambda config: _activates(config, "quick_gelu", is_gated=True),
    "squared_relu": lambda config: _activates(config, "squared_relu", is_gated=False),
    "swiglu": lambda config: _activates(config, "silu", is_gated=True),
    "use_megatron_fsdp": lambda config: (
        config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp
    ),
}
# Arguments that Bridge lacks, at least in some version, with the values that it acts by.
_WITHOUT: Mapping[str, Any] = {
    "curr_iteration": 0,
    "fake_process_group": False,
    "perform_rl_step": False,
    "phase_transition_iterations": None,
    "step_batch_size_schedule": None,
    "yaml_cfg": None,
}
_RENAMED = {flag: place.split(".")[1] for flag, place in RENAMED.items()}
_NEGATED = frozenset(flag for flag, place in RENAMED.items() if place.startswith("not "))


class BridgeArgs(argparse.Namespace):
    """Arguments that `get_args` of Megatron returns in a job of Bridge. Owned by the training thread."""

    def __init__(self, config: Any, state: Any, words: Sequence[str] = ()) -> None:
        """Read nothing yet but the words, which are --moe-ft-* flags.

        Args:
            config: Bridge's ConfigContainer, after `runtime_config_update`.
            state: Bridge's GlobalState.
        """
        own = {
            **_WITHOUT,
            **vars(own_parser().parse_args(list(words))),
            "rank": get_rank_safe(),
            "world_size": get_world_size_safe(),
            "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        }
        object.__setattr__(self, "_parts", (config, state, places(config), own))

    def __getattr__(self, name: str) -> Any:
        config, state, found, own = object.__getattribute__(self, "_parts")
        if "." in name:  # a field without a flag
            return value_at(config, name)
        if name in _STATE:
            return getattr(state.train_state, _STATE[name])
        if name in _FROM_CONFIG:
            return _FROM_CONFIG[name](config)
        if name in own:
            return own[name]
        if name not in found:
            raise AttributeError(f"neither Megatron-Bridge nor moe_ft has a setting {name}")
        value = getattr(found[name], _RENAMED.get(name, name))
        if name in _WRITTEN_AS_TEXT:
            return _DTYPES.get(value, value)
        return not value if name in _NEGATED else value

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        _, state, found, own = object.__getattribute__(self, "_parts")
        if name in _STATE:
            setattr(state.train_state, _STATE[name], value)
        elif name in own or name not in found:
            own[name] = value
        else:
            value = not value if name in _NEGATED else value
            setattr(found[name], _RENAMED.get(name, name), value)

    @override
    def __delattr__(self, name: str) -> None:
        del object.__getattribute__(self, "_parts")[-1][name]

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """A copy, to be read by `vars`."""
        _, _, found, own = object.__getattribute__(self, "_parts")
        names = (*found, *own, *_FROM_CONFIG, *_STATE)
        return {name: getattr(self, name) for name in names if hasattr(self, name)}


def places(config: Any) -> dict[str, Any]:
    """Return what has the field of each of Megatron's arguments: the section, or settings in it.

    A field of the table in bridge/fields.py is not the flag that has its name.
    """
    found: dict[str, Any] = {}
    for each in fields_of(config):
        if _is_argument(each):
            found.setdefault(each.flag or each.name, each.of)
    return found


def _is_argument(field: Field) -> bool:
    return bool(field.flag) or field.name not in flag_classes()
