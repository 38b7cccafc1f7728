"""A digest of the training state of one rank: two runs are bitwise equal if their digests are.

`sha256` covers parameters and optimizer tensors, `sha256_all` also buffers, RNG states, the scheduler,
the loss scale, the optimizer's scalars and the consumed samples.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from moe_ft.format.encoding import convert_leaves
from moe_ft.state.quantized import is_quantized, quantized_parts
from moe_ft.state.tensors import (
    NamedTensors,
    inner_optimizers,
    named_buffers,
    named_optimizer_tensors,
    named_parameters,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateDigest:
    """Hexadecimal SHA-256 digests of one rank's state."""

    sha256: str
    sha256_all: str


def digest_state(
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    counters: Mapping[str, int],
) -> StateDigest:
    """Return the digests of this rank's current state.

    With --overlap-param-gather the parameters that other ranks own are those of the last gather.
    """
    digest = hashlib.sha256()
    _add_tensors(digest, _plain(named_parameters(model)))
    _add_tensors(digest, named_optimizer_tensors(model, optimizer))
    weights_and_moments = digest.hexdigest()
    _add_tensors(digest, named_buffers(model))
    _add_tensors(digest, _rng_states())
    scalars = {
        "numpy": _as_json(np.random.get_state()),
        "python": _as_json(random.getstate()),
        "optimizers": [_scalars(inner) for inner in inner_optimizers(optimizer)],
        "scheduler": _as_json(scheduler.state_dict()),
        "counters": dict(counters),
    }
    digest.update(json.dumps(scalars, sort_keys=True).encode())
    return StateDigest(sha256=weights_and_moments, sha256_all=digest.hexdigest())


def _plain(tensors: NamedTensors) -> NamedTensors:
    """Yield FP8 parameters as what they are, bytes and scales, and others as they come."""
    for name, tensor in tensors:
        if is_quantized(tensor):
            yield from ((f"{name}/{part}", each) for part, each in quantized_parts(tensor))
        else:
            yield name, tensor


def _add_tensors(digest: Any, tensors: NamedTensors) -> None:
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        data = tensor.detach().to("cpu").contiguous()
        digest.update(f"{name} {data.dtype} {list(data.shape)}".encode())
        # As bytes, because numpy has no bfloat16.
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)


def _rng_states() -> NamedTensors:
    yield "torch", torch.get_rng_state()
    yield "device", torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        yield f"tracker/{name}", state if isinstance(state, torch.Tensor) else state.get_state()


def _scalars(optimizer: Any) -> Any:
    """Return the optimizer's loss scaler and its parameter groups without parameters."""
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.optimizer.param_groups
    ]
    scaler = getattr(optimizer, "grad_scaler", None)
    return _as_json({"groups": groups, "scaler": scaler.state_dict() if scaler else None})


def _as_json(value: Any) -> Any:
    """Return tensors, arrays and tuples as JSON values, and floats exactly."""
    return convert_leaves(value, _leaf_as_json)


def _leaf_as_json(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return _as_json(value.tolist())
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, int | str | bool):
        return value
    return repr(value)
