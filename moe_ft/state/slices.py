"""Tensors of a rank's slice of each parameter, which a snapshot copies and a restore writes.

torch's, Transformer Engine's and Apex's Adam keep ``exp_avg`` and ``exp_avg_sq`` per parameter, Muon one
``momentum_buffer``. SOAP and some kinds of Muon also keep tensors that have another shape than the parameter:
they cannot be cut with it, so the rank that saves its first element saves them whole. The place of ``step``
differs, so steps are part of the record (state/record.py). Reading never creates missing moments, because
that would change a fresh run.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from moe_ft.format import packings
from moe_ft.format.entries import UNCUT, TensorEntry
from moe_ft.state import offloaded
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.quantized import is_quantized
from moe_ft.state.tensors import kind_of, raw_tensor
from moe_ft.units import Level, UnitPart

MASTER_KEYS = ("param", "master_param")
WEIGHT_KEYS = (*MASTER_KEYS, "weight")
_STATE_KEYS = {
    "adam": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
    "sgd": ("momentum_buffer",),
    "soap": ("exp_avg", "exp_avg_sq"),
}
# By safetensors' name.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, each.torch_name) for name, each in packings.DTYPES.items()
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a type."""
    return _NAMES[dtype]


def is_precision_aware(optimizer: Any) -> bool:
    """Return whether Transformer Engine's FusedAdam holds the master weights."""
    config = getattr(optimizer, "config", None)
    return not offloaded.is_hybrid(getattr(optimizer, "optimizer", None)) and bool(
        getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False)
    )


def follows_masters(local: LocalParameter) -> bool:
    """Return whether the weight that forward uses is taken from the masters, and written into them.

    FP8 parameters are cast from masters. Where the gather of MXFP8 parameters uses the memory of gradients
    and overlaps with forward, Megatron writes all other weights only as the next iteration begins, too.
    """
    if local.optimizer is None:
        return False
    is_staged = getattr(local.optimizer.config, "reuse_grad_buf_for_mxfp8_param_ag", False)
    return is_staged or is_quantized(local.parameter)


def describe(
    local: LocalParameter, level: Level, part: UnitPart = UnitPart.WHOLE
) -> list[TensorEntry]:
    """Return the tensors of a parameter's slice at a level, without offsets, from shapes alone.

    The result includes moments that do not exist yet.

    Args:
        part: of the unit, if its weights and moments are saved separately.
    """
    if local.start == local.end:
        return []
    found = [
        TensorEntry(local.name, key, local.start, local.end, dtype_name(dtype), 0)
        for key, dtype in _keys(local, level)
        if part is UnitPart.WHOLE or (key in WEIGHT_KEYS) == (part is UnitPart.WEIGHTS)
    ]
    if level is Level.FULL and part is not UnitPart.WEIGHTS and local.start == 0:
        found += [
            TensorEntry(local.name, key, 0, prod(shape), dtype_name(torch.float32), 0)
            for key, shape in uncut_shapes(local).items()
        ]
    return found


def _keys(local: LocalParameter, level: Level) -> Iterator[tuple[str, torch.dtype]]:
    model_dtype = local.parameter.dtype
    if level is Level.COMPUTE or local.optimizer is None:
        yield "weight", model_dtype
        return
    config = local.optimizer.config
    if is_precision_aware(local.optimizer):
        # The state is kept raw: the master may be a 16-bit remainder, which is useless without the weight.
        yield "weight", model_dtype
        if model_dtype is not torch.float32:
            remainders = getattr(local.optimizer.optimizer, "store_param_remainders", False)
            is_split = remainders and model_dtype is torch.bfloat16
            yield "master_param", torch.int16 if is_split else config.main_params_dtype
        yield "exp_avg", config.exp_avg_dtype
        yield "exp_avg_sq", config.exp_avg_sq_dtype
        return
    yield "param", torch.float32
    if kind_of(local.optimizer) == "sgd" and not config.sgd_momentum:
        return
    for key in _moments(local.optimizer):
        # With some FP8 recipes Megatron keeps the masters itself, while moments are still in few bits.
        # Optimizers that are offloaded to the CPU keep everything in fp32, whatever the flags say.
        is_native = getattr(config, "use_precision_aware_optimizer", False)
        is_native = is_native and not offloaded.is_hybrid(local.optimizer.optimizer)
        yield key, getattr(config, f"{key}_dtype") if is_native else torch.float32


def _moments(inner: Any) -> tuple[str, ...]:
    """Return the keys of the moments that have a number for each of a parameter."""
    keys = _STATE_KEYS[kind_of(inner)]
    is_adaptive = getattr(inner.optimizer, "moment2_method", None) == "adamuon"
    return (*keys, "moment2_buffer") if is_adaptive else keys


def uncut_shapes(local: LocalParameter) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a parameter's optimizer tensors that are saved whole, by key."""
    if local.optimizer is None or local.parameter.dim() != 2:
        return {}
    torch_optimizer = local.optimizer.optimizer
    rows, columns = local.parameter.shape
    found: dict[str, tuple[int, ...]] = {}
    if kind_of(local.optimizer) == "soap":
        found = {
            f"{name}{side}": (size, size)
            for side, size in (("L", rows), ("R", columns))
            for name in ("", "Q_")
        }
    elif (method := getattr(torch_optimizer, "moment2_method", None)) == "normuon":
        found = {"moment2_buffer": (rows, 1) if rows >= columns else (1, columns)}
    elif method == "namo":
        found = {"moment2_buffer": (1,)}
    return {UNCUT + key: shape for key, shape in found.items()}


def live_tensor(local: LocalParameter, key: str) -> torch.Tensor | None:
    """Return the live tensor of a slice, flat; None if it does not exist yet.

    It shares memory with the model or the optimizer, so copies of it must finish before the next optimizer
    step.
    """
    whole = whole_tensor(local, key)
    return None if whole is None else own_slice(local, key, whole)


def whole_tensor(local: LocalParameter, key: str) -> torch.Tensor | None:
    """Return the tensor of the model or the optimizer that a slice is cut from, as it is now.

    A weight that follows masters is these: a copy rounds them to the type that `describe` names.
    """
    if key == "param" or (key == "weight" and follows_masters(local)):
        if local.master is None or local.optimizer is None:
            return local.master
        stepped = offloaded.stepped_tensor(local.optimizer.optimizer, local.master)
        return offloaded.held_by(local.optimizer, local.master, "param", stepped)
    if key == "weight":
        return local.parameter
    if local.master is None:
        return None
    state = local.optimizer.optimizer.state.get(local.master, {})
    found: torch.Tensor | None = state.get(key.removeprefix(UNCUT))
    found = offloaded.held_by(local.optimizer, local.master, key, found)
    return None if found is None else raw_tensor(found)


def own_slice(local: LocalParameter, key: str, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a whole tensor, flat."""
    flat = whole.detach().reshape(-1)  # a copy of what SOAP has transposed
    if key.startswith(UNCUT):
        return flat
    is_of_optimizer = key != "weight" or follows_masters(local)
    if is_of_optimizer and local.is_sharded:  # the distributed optimizer holds slices only
        return flat[: local.end - local.start]  # a home may be longer
    return flat[local.start - local.offset : local.end - local.offset]


def make_state(local: LocalParameter, key: str, dtype: torch.dtype) -> None:
    """Create an optimizer tensor that a restore is about to fill. Only restores call this."""
    master = local.master
    assert master is not None
    torch_optimizer = local.optimizer.optimizer
    state = offloaded.state_to_fill(torch_optimizer, master)
    shape = uncut_shapes(local).get(key)
    key = key.removeprefix(UNCUT)
    keeps_few_bits = getattr(local.optimizer.config, "use_precision_aware_optimizer", False)
    if key not in state and keeps_few_bits and hasattr(torch_optimizer, "initialize_state"):
        # This also creates the scales. Only BF16 weights have remainders; other masters are whole.
        has_remainders = getattr(torch_optimizer, "store_param_remainders", False)
        torch_optimizer.initialize_state(master, has_remainders and master.dtype is torch.bfloat16)
    elif key not in state or not state[key].is_contiguous():  # whose flat view would be a copy
        stepped = offloaded.stepped_tensor(torch_optimizer, master)
        is_hybrid = offloaded.is_hybrid(torch_optimizer)
        # Masters may be parked on the host, where no step finds moments that were made there.
        device = stepped.device if is_hybrid else local.parameter.device
        state[key] = torch.zeros(
            stepped.shape if shape is None else shape, dtype=dtype, device=device
        )
    offloaded.note_state(local.optimizer)


def drop_state(local: LocalParameter) -> None:
    """Remove a parameter's optimizer tensors, because the snapshot was taken before they existed."""
    if local.optimizer is not None and local.master is not None:
        offloaded.drop_state(local.optimizer.optimizer, local.master)
