"""Fixes for loading checkpoints into Megatron's distributed optimizer with torch's own Adam.

Without Apex and Transformer Engine, megatron-core 0.19.2 cannot `--load` a torch_dist checkpoint.
"""

import functools
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer

_installed = False


def install() -> None:
    """Wrap the three methods of DistributedOptimizer that loading calls, permanently."""
    global _installed
    if _installed or distrib_optimizer.HAVE_APEX_OR_TE:
        return
    _installed = True
    optimizer_type = distrib_optimizer.DistributedOptimizer
    optimizer_type.sharded_state_dict = _with_moments(optimizer_type.sharded_state_dict)
    optimizer_type.load_state_dict = _with_own_steps(optimizer_type.load_state_dict)
    optimizer_type._set_main_param_and_optimizer_states = _with_any_step(
        optimizer_type._set_main_param_and_optimizer_states
    )


def _with_moments(original: Any) -> Any:
    """Create the moments before Megatron looks for their step count, into which it loads."""

    @functools.wraps(original)
    def sharded_state_dict(
        optimizer: Any, model_state: Any, is_loading: bool = False, **kwargs: Any
    ) -> Any:
        if is_loading and not optimizer.is_stub_optimizer and not optimizer.optimizer.state:
            optimizer._init_optimizer_states_with_dummy_values()
        return original(optimizer, model_state, is_loading, **kwargs)

    return sharded_state_dict


def _with_own_steps(original: Any) -> Any:
    """Give every parameter the loaded step count, in a separate tensor.

    Megatron loads the count into the parameter groups, where its own Adam keeps it. It leaves torch's Adam
    with an old count, or with one tensor for all parameters, which each of them would advance.
    """

    @functools.wraps(original)
    def load_state_dict(optimizer: Any, state_dict: Any) -> None:
        original(optimizer, state_dict)
        torch_optimizer = optimizer.optimizer
        for group in torch_optimizer.param_groups:
            step = group.pop("step", None)
            states = (torch_optimizer.state.get(parameter, {}) for parameter in group["params"])
            for state in (state for state in states if "step" in state and step is not None):
                state["step"] = torch.tensor(float(step))

    return load_state_dict


def _with_any_step(original: Any) -> Any:
    """Load checkpoints for any layout too, which have no step of each parameter."""

    @functools.wraps(original)
    def set_states(optimizer: Any, parameter: Any, tensors: Any) -> None:
        original(optimizer, parameter, {"step": None, **tensors})

    return set_states
