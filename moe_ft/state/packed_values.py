"""Values of a record in memory and in files: copies of tensors, and JSON values that lose no bit."""

import math
from typing import Any

import torch

from moe_ft.format.encoding import convert_leaves
from moe_ft.format.records import RecordTensor
from moe_ft.state.slices import DTYPES, dtype_name


def to_json(value: Any) -> Any:
    """Return scalars, tensors, lists and dicts as JSON values without losing a bit."""
    return convert_leaves(value, _leaf_to_json)


def _leaf_to_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        packed = pack(value)
        data = packed.data.hex()
        return {"tensor": {"dtype": packed.dtype, "shape": list(packed.shape), "data": data}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"other": repr(value)}  # a setting such as an enum, which the command line gives again


def from_json(value: Any) -> Any:
    """Return the values that `to_json` was given, but lists for tuples."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"tensor"}:
        packed = value["tensor"]
        return unpack(
            RecordTensor(packed["dtype"], tuple(packed["shape"]), bytes.fromhex(packed["data"]))
        )
    if set(value) == {"float"}:
        return float(value["float"])
    return {key: from_json(item) for key, item in value.items()}


def pack(tensor: torch.Tensor) -> RecordTensor:
    """Return a small tensor's bytes with its type and shape."""
    data = tensor.detach().to("cpu").contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    return RecordTensor(dtype_name(data.dtype), tuple(data.shape), raw)


def unpack(packed: RecordTensor) -> torch.Tensor:
    """Return the tensor that `pack` was given, on the CPU."""
    if not packed.data:
        return torch.empty(packed.shape, dtype=DTYPES[packed.dtype])
    flat = torch.frombuffer(bytearray(packed.data), dtype=DTYPES[packed.dtype])
    return flat.reshape(packed.shape)


def on_cpu(value: Any) -> Any:
    """Return nested dicts and lists with every tensor on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.to("cpu")
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return [on_cpu(item) for item in value] if isinstance(value, list) else value


def copied(value: Any) -> Any:
    """Return a copy of a tensor, and anything else as it is."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
