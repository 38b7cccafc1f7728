"""The tensors behind a rank's slice of each parameter: what a snapshot copies and a restore writes.

Layouts of optimizer state: torch's, Transformer Engine's and Apex's Adam keep ``exp_avg`` and ``exp_avg_sq``
per parameter. Where ``step`` lives differs, so steps are part of the record (state/record.py). Moments that
do not exist yet are never made by reading: that would change a fresh run.
"""

from collections.abc import Iterator
from typing import Any

import torch

from moe_ft.format.entries import TensorEntry
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.tensors import raw_tensor
from moe_ft.units import Level, Part

MASTER_KEYS = ("param", "master_param")
WEIGHT_KEYS = (*MASTER_KEYS, "weight")
_STATE_KEYS = {"adam": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}
_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a type."""
    return _SAFETENSORS_NAMES[dtype]


def is_precision_aware(optimizer: Any) -> bool:
    """Return whether master weights live inside of Transformer Engine's FusedAdam."""
    config = getattr(optimizer, "config", None)
    return bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))


def describe(local: LocalParameter, level: Level, part: Part = Part.WHOLE) -> list[TensorEntry]:
    """Return the tensors of a parameter's slice at a level, without offsets, from shapes alone.

    Moments are described whether they exist yet or not.

    Args:
        local: the parameter.
        level: of the snapshot.
        part: of the unit, where its weights and moments are saved apart.
    """
    if local.start == local.end:
        return []
    return [
        TensorEntry(local.name, key, local.start, local.end, dtype_name(dtype), 0)
        for key, dtype in _keys(local, level)
        if part is Part.WHOLE or (key in WEIGHT_KEYS) == (part is Part.WEIGHTS)
    ]


def _keys(local: LocalParameter, level: Level) -> Iterator[tuple[str, torch.dtype]]:
    model_dtype = local.parameter.dtype
    if level is Level.COMPUTE or local.optimizer is None:
        yield "weight", model_dtype
        return
    config = local.optimizer.config
    if is_precision_aware(local.optimizer):
        # Raw states: the master may be a 16-bit remainder that needs the weight beside it.
        yield "weight", model_dtype
        if model_dtype is not torch.float32:
            remainders = getattr(local.optimizer.optimizer, "store_param_remainders", False)
            is_split = remainders and model_dtype is torch.bfloat16
            yield "master_param", torch.int16 if is_split else config.main_params_dtype
        yield "exp_avg", config.exp_avg_dtype
        yield "exp_avg_sq", config.exp_avg_sq_dtype
        return
    yield "param", torch.float32
    if config.optimizer == "sgd" and not config.sgd_momentum:
        return
    for key in _STATE_KEYS[config.optimizer]:
        # With some FP8 recipes masters are Megatron's own, and moments in few bits all the same.
        is_native = getattr(config, "use_precision_aware_optimizer", False)
        yield key, getattr(config, f"{key}_dtype") if is_native else torch.float32


def live_tensor(local: LocalParameter, key: str) -> torch.Tensor | None:
    """Return the live tensor of a slice, flat; None if it does not exist yet.

    It shares memory with the model or the optimizer: whoever copies it must be done before the next
    optimizer step.
    """
    whole = whole_tensor(local, key)
    return None if whole is None else own_slice(local, key, whole)


def whole_tensor(local: LocalParameter, key: str) -> torch.Tensor | None:
    """Return the tensor that a slice is cut from, as the model or the optimizer has it now."""
    if key == "weight":
        return local.parameter
    if key == "param":
        return local.master
    found: torch.Tensor | None = local.optimizer.optimizer.state.get(local.master, {}).get(key)
    return None if found is None else raw_tensor(found)


def own_slice(local: LocalParameter, key: str, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, flat."""
    flat = whole.detach().view(-1)
    is_cut = key != "weight" and local.is_sharded  # the distributed optimizer holds slices only
    return flat if is_cut else flat[local.start : local.end]


def make_state(local: LocalParameter, key: str, dtype: torch.dtype) -> None:
    """Make an optimizer tensor that a restore is about to fill; only ever called by a restore."""
    master = local.master
    assert master is not None
    torch_optimizer = local.optimizer.optimizer
    state = torch_optimizer.state[master]
    keeps_few_bits = getattr(local.optimizer.config, "use_precision_aware_optimizer", False)
    if key not in state and keeps_few_bits and hasattr(torch_optimizer, "initialize_state"):
        # With all of its scales. Remainders belong to BF16 weights; other masters are whole.
        has_remainders = getattr(torch_optimizer, "store_param_remainders", False)
        torch_optimizer.initialize_state(master, has_remainders and master.dtype is torch.bfloat16)
    elif key not in state:
        state[key] = torch.zeros_like(master, dtype=dtype)


def drop_state(local: LocalParameter) -> None:
    """Remove a parameter's optimizer tensors: they did not exist when the snapshot was taken."""
    if local.optimizer is not None and local.master is not None:
        local.optimizer.optimizer.state.pop(local.master, None)
