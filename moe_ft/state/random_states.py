"""States of all random numbers that training draws: python, numpy, torch, the device, Megatron's tracker."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import finite_or_name
from moe_ft.format.records import RandomStates
from moe_ft.state.packed_values import copied, from_json, on_cpu, to_json


def capture_rng() -> dict[str, Any]:
    """Copy the random number states. Training thread; waits for no GPU."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": {
            name: copied(state) if isinstance(state, torch.Tensor) else state.get_state()
            for name, state in get_cuda_rng_tracker().get_states().items()
        },
    }


def encode_rng(values: Mapping[str, Any]) -> RandomStates:
    """Return what was captured, with all tensors on the CPU, in the form that records have."""
    version, words, gauss = values["python"]
    name, keys, position, has_gauss, cached = values["numpy"]
    return {
        "python": {
            "version": version,
            "words": to_json(torch.tensor(words, dtype=torch.int64)),
            "gauss": None if gauss is None else finite_or_name(float(gauss)),
        },
        "numpy": {
            "name": name,
            "keys": to_json(torch.from_numpy(keys.astype(np.int64))),
            "position": position,
            "has_gauss": has_gauss,
            "cached": finite_or_name(float(cached)),
        },
        "torch": to_json(values["torch"]),
        "device": to_json(values["device"]),
        "tracker": {key: to_json(state) for key, state in values["tracker"].items()},
    }


def current_rng() -> RandomStates:
    """Return the random number states as they are now, in the form that records have."""
    return encode_rng(on_cpu(capture_rng()))


def seeded_states(seed: int) -> RandomStates:
    """Return the states that Megatron makes of a seed on this rank; those of now stay as they are."""
    before = current_rng()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    found = current_rng()
    apply_rng(before)
    return found


def rng_values(rng: RandomStates) -> dict[str, Any]:
    """Return the random number states under the names that Megatron's checkpoints give them.

    Raises CorruptStateError if they are none.
    """
    try:
        return _rng_values(rng)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptStateError(f"random states cannot be read: {error!r}") from error


def _rng_values(rng: RandomStates) -> dict[str, Any]:
    python, numpy_state = rng["python"], rng["numpy"]
    gauss = python["gauss"]
    words = tuple(from_json(python["words"]).tolist())
    return {
        "random_rng_state": (python["version"], words, None if gauss is None else float(gauss)),
        "np_rng_state": (
            numpy_state["name"],
            from_json(numpy_state["keys"]).numpy().astype(np.uint32),
            numpy_state["position"],
            numpy_state["has_gauss"],
            float(numpy_state["cached"]),
        ),
        "torch_rng_state": from_json(rng["torch"]),
        "cuda_rng_state": from_json(rng["device"]),
        "rng_tracker_states": {name: from_json(state) for name, state in rng["tracker"].items()},
    }


def apply_rng(rng: RandomStates) -> None:
    """Restore the random number states. Call this when nothing else draws before the next iteration."""
    values = rng_values(rng)
    restore_rng(
        {
            "python": values["random_rng_state"],
            "numpy": values["np_rng_state"],
            "torch": values["torch_rng_state"],
            "device": values["cuda_rng_state"],
            "tracker": values["rng_tracker_states"],
        }
    )


def restore_rng(values: Mapping[str, Any]) -> None:
    """Restore what `capture_rng` has copied."""
    random.setstate(values["python"])
    np.random.set_state(values["numpy"])
    torch.set_rng_state(values["torch"])
    torch.cuda.set_rng_state(values["device"])
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    restored = values["tracker"]
    tracker.set_states({name: _like(states.get(name), value) for name, value in restored.items()})


def _like(current: Any, state: torch.Tensor) -> Any:
    """Return a tracker state in the form that the tracker uses: a tensor or a CUDA generator."""
    if isinstance(current, torch.Generator):
        current.set_state(state)
        return current
    return state
