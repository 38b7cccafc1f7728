"""Megatron's arguments, read from and written to the configuration and the train state of Megatron-Bridge.

Most fields have the names of Megatron's flags. Nothing is taken from the defaults of Megatron's parser: a
name that nobody has here is not there.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
from megatron.bridge.utils.common_utils import get_rank_safe, get_world_size_safe

from megatron.fault_tolerance.seams.settings import own_parser

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
# Sections of ConfigContainer in the order in which a name is looked up: some names are in several.
_SECTIONS = (
    *("validation", "train", "checkpoint", "scheduler", "optimizer", "ddp", "dist", "rng"),
    *("rerun_state_machine", "model", "dataset", "logger", "tokenizer"),
)
_DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "fp8",
}
_WRITTEN_AS_TEXT = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_NAN = "check_for_nan_in_loss"
_FROM_CONFIG: Mapping[str, Callable[[Any], Any]] = {
    "num_experts": lambda config: config.model.num_moe_experts,
    "untie_embeddings_and_output_weights": (
        lambda config: not config.model.share_embeddings_and_output_weights
    ),
    "swiglu": lambda config: config.model.gated_linear_unit,
    "inprocess_restart": lambda config: bool(
        config.inprocess_restart and config.inprocess_restart.enabled
    ),
    "num_layers_per_virtual_pipeline_stage": (
        lambda config: config.model.virtual_pipeline_model_parallel_size
    ),
    "use_megatron_fsdp": lambda config: (
        config.dist.use_megatron_fsdp or config.ddp.use_megatron_fsdp
    ),
    "no_save_optim": lambda config: not config.checkpoint.save_optim,
    "no_load_rng": lambda config: not config.checkpoint.load_rng,
    "data_parallel_size": lambda config: config.data_parallel_size,
    "accumulate_allreduce_grads_in_fp32": lambda config: config.ddp.grad_reduce_in_fp32,
    "decoder_seq_length": lambda config: config.model.seq_length,
    "check_for_nan_in_loss_and_grad": lambda config: (
        config.rerun_state_machine.check_for_nan_in_loss
    ),
}
# What Bridge has no word for, and does not do.
_WITHOUT: Mapping[str, Any] = {
    "curr_iteration": 0,
    "data_cache_path": None,
    "decrease_batch_size_if_needed": False,
    "deterministic_mode": False,
    "fake_process_group": False,
    "full_validation": False,
    "log_params_norm": False,
    "perform_rl_step": False,
    "phase_transition_iterations": None,
    "step_batch_size_schedule": None,
    "train_samples": None,
    "yaml_cfg": None,
    "hybrid_context_parallel": False,
    "ckpt_assume_constant_structure": False,
}


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
        sections = [getattr(config, name) for name in _SECTIONS]
        object.__setattr__(self, "_parts", (config, state, sections, own))

    def __getattr__(self, name: str) -> Any:
        config, state, sections, own = object.__getattribute__(self, "_parts")
        if name in _STATE:
            return getattr(state.train_state, _STATE[name])
        if name in _FROM_CONFIG:
            return _FROM_CONFIG[name](config)
        for section in () if name in ("rank", "world_size") else sections:
            if hasattr(section, name):
                value = getattr(section, name)
                return _DTYPES.get(value, value) if name in _WRITTEN_AS_TEXT else value
        if name in own:
            return own[name]
        raise AttributeError(name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        config, state, sections, own = object.__getattribute__(self, "_parts")
        if name in _STATE:
            setattr(state.train_state, _STATE[name], value)
        elif name == "check_for_nan_in_loss_and_grad":
            config.rerun_state_machine.check_for_nan_in_loss = value
        else:
            section = next((each for each in sections if hasattr(each, name)), None)
            if section is None or name in ("rank", "world_size"):
                own[name] = value
            else:
                setattr(section, name, value)

    @override
    def __delattr__(self, name: str) -> None:
        del object.__getattribute__(self, "_parts")[-1][name]

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """A copy, to be read by `vars`."""
        config, state, sections, own = object.__getattribute__(self, "_parts")
        found = {name: value for each in reversed(sections) for name, value in vars(each).items()}
        derived = {name: make(config) for name, make in _FROM_CONFIG.items()}
        counters = {name: getattr(state.train_state, field) for name, field in _STATE.items()}
        return {**own, **found, **derived, **counters}
