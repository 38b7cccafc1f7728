"""State that modules keep outside of parameters and buffers: FP8 scales and histories of Transformer Engine.

Its modules offer this state as `get_extra_state`, which waits for the GPU and pickles, and restore it by
unpickling. This file uses neither. With delayed scaling the state is a few tensors in the module's
`fp8_meta`, which are cloned on the device and copied back; everything else there follows from the flags.
Other recipes have no such state.

A module with any other extra state is refused, because keeping it would require unpickling files.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from moe_ft.errors import ConfigError, SnapshotError

_METAS = ("scaling_fwd", "scaling_bwd")
_TENSORS = ("scale", "scale_inv", "amax_history")

Tensors = Mapping[str, torch.Tensor]  # by "scaling_fwd.scale" and the like

# Recovered state of modules that create their tensors in their first forward pass.
_waiting: WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


def modules_with_extra_state(model: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Return the modules that keep state outside of parameters and buffers, by name."""
    default = torch.nn.Module.get_extra_state
    return {
        f"chunk{index}.{name}": module
        for index, chunk in enumerate(model)
        for name, module in chunk.named_modules()
        # Megatron's own modules define it and return None.
        if _is_fp8(module)
        or type(module).get_extra_state is not default
        and not type(module).get_extra_state.__module__.startswith("megatron.core.")
    }


def check_at_start(modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise ConfigError if a module already has state that cannot be kept."""
    for name, module in modules.items():
        if problem := _problem(name, module):
            raise ConfigError(problem)


def clone_state(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a module's FP8 tensors, on their device, without waiting.

    Raises:
        SnapshotError: if the module has state of another kind.
    """
    if problem := _problem(name, module):
        raise SnapshotError(problem)
    live = {key: tensor.detach().clone() for key, tensor in _tensors(module).items()}
    return live or dict(_waiting.get(module, {}))


def put_back(module: torch.nn.Module, tensors: Tensors) -> None:
    """Copy tensors into a module, or keep them until it has created its own.

    Args:
        tensors: result of `clone_state`, on any device.
    """
    live = _tensors(module)
    if live or not tensors:
        _copy(live, tensors)
        return
    is_new = module not in _waiting
    _waiting[module] = dict(tensors)
    if is_new:
        _wait_for_tensors(module)


def _wait_for_tensors(module: Any) -> None:
    """Copy the waiting state each time the module creates tensors, up to the end of that forward pass."""
    make = module.init_fp8_meta_tensors

    def made(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        _copy(_tensors(module), _waiting[module])

    def is_over(*_: Any) -> None:
        if _tensors(module):
            _waiting.pop(module, None)
            del module.init_fp8_meta_tensors
            hook.remove()

    module.init_fp8_meta_tensors = made
    hook = module.register_forward_hook(is_over)


def _is_fp8(module: Any) -> bool:
    return isinstance(getattr(module, "fp8_meta", None), dict)


def _tensors(module: Any) -> dict[str, torch.Tensor]:
    """Return a module's live tensors, none before its first forward pass in FP8."""
    if not _is_fp8(module):
        return {}
    found: dict[str, Any] = {}
    for meta in _METAS:
        holder = module.fp8_meta.get(meta)
        if isinstance(getattr(holder, "amax_history", None), torch.Tensor):  # delayed scaling
            found |= {f"{meta}.{name}": getattr(holder, name, None) for name in _TENSORS}
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


@torch.no_grad()
def _copy(live: Tensors, tensors: Tensors) -> None:
    for key, tensor in live.items():
        if key not in tensors:
            continue
        # The length of the history may differ in this start. Keep the rows that Transformer Engine keeps when
        # it changes the length itself.
        num_rows = min(len(tensor), len(tensors[key]))
        tensor[:num_rows].copy_(tensors[key][:num_rows])


def _problem(name: str, module: torch.nn.Module) -> str:
    """Return why a module's extra state cannot be kept; empty if it can."""
    if _is_fp8(module):
        return ""
    state: Any = module.get_extra_state()
    is_empty = state.numel() == 0 if isinstance(state, torch.Tensor) else not state
    if is_empty:
        return ""
    return (
        f"{name} ({type(module).__name__}) has extra state that moe_ft cannot keep: only the FP8 tensors of "
        "Transformer Engine's modules are kept, anything else would have to be pickled. Train without this "
        "module (with FP8, --use-transformer-engine-op-fuser has such ones), or with "
        "--moe-ft-strategy none."
    )
