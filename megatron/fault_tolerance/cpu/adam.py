"""Fixes for Megatron's optimizers on a CPU, with torch's own Adam.

Without Apex and Transformer Engine, megatron-core 0.19.2 cannot `--load` a torch_dist checkpoint. Without a
GPU, its --optimizer-cpu-offload finds nothing to offload.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, override

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch.overrides import TorchFunctionMode

_installed = False


def install() -> None:
    """Wrap three methods of DistributedOptimizer that loading calls, and one that offloads, permanently."""
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
    HybridDeviceOptimizer._get_sub_optimizer_param_groups = _on_two_devices(
        HybridDeviceOptimizer._get_sub_optimizer_param_groups
    )


class _TwoDevices(TorchFunctionMode):
    """Lets tensors appear on a GPU, except for what `cpu` returns and what is made from that."""

    def __init__(self) -> None:
        super().__init__()
        self._on_host: dict[int, torch.Tensor] = {}

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_on_host = bool(args) and id(args[0]) in self._on_host
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not is_on_host
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and (is_on_host or func == torch.Tensor.cpu):
            self._on_host[id(found)] = found
        return found


def _on_two_devices(original: Any) -> Any:
    """Divide parameters by --optimizer-offload-fraction, as if all were on a GPU."""

    @functools.wraps(original)
    def divide(optimizer: Any, offload_fraction: float) -> Any:
        with _TwoDevices():
            return original(optimizer, offload_fraction)

    return divide


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
