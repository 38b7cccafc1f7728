"""Names of every parameter, buffer and optimizer tensor that a rank holds.

Reads the live model chunks and the (chained, distributed) optimizer; changes nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from moe_ft.state import offloaded

# Kinds of optimizers by classes that they, or their bases, have.
_KINDS = {
    "OrthogonalizedOptimizer": "muon",
    "SOAP": "soap",
    "Lion": "lion",
    "SGD": "sgd",
    "Adam": "adam",
    "FusedAdam": "adam",
}
NamedTensors = Iterator[tuple[str, torch.Tensor]]


def named_parameters(model: Sequence[torch.nn.Module]) -> NamedTensors:
    """Yield (name, parameter) of all model chunks; names start with the chunk's index.

    Slots of experts are left out: they are copies of what lies in homes.
    """
    for chunk_index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            if not getattr(parameter, "moe_ft_slot", False):
                yield f"chunk{chunk_index}.{name}", parameter


def named_buffers(model: Sequence[torch.nn.Module]) -> NamedTensors:
    """Yield (name, buffer) of all model chunks, persistent or not."""
    for chunk_index, chunk in enumerate(model):
        for name, buffer in chunk.named_buffers():
            yield f"chunk{chunk_index}.{name}", buffer


def buffer_places(
    model: Sequence[torch.nn.Module],
) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the module and the key of every buffer that is state, persistent or not, by name.

    Buffers of rotary embeddings are not state: the tables of sines, megabytes in each layer of multi-latent
    attention, follow from the flags.
    """
    places = all_buffers(model)
    return {name: place for name, place in places.items() if not is_derived(place[0])}


def all_buffers(
    model: Sequence[torch.nn.Module],
) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return the module and the key of every buffer, state or not, by name."""
    return {
        f"chunk{index}.{module_name}{'.' if module_name else ''}{key}": (module, key)
        for index, chunk in enumerate(model)
        for module_name, module in chunk.named_modules()
        for key in module._buffers
    }


def is_derived(module: torch.nn.Module) -> bool:
    """Return whether a module's buffers follow from the flags."""
    return isinstance(module, RotaryEmbedding)


def raw_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor as they are in memory.

    Transformer Engine's FP8 tensors appear as fp32; their bytes and their scale are attributes.
    """
    raw: torch.Tensor = getattr(tensor, "_data", tensor)
    return raw


def inverse_scale(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the ``[1]`` factor for the numbers of one of Transformer Engine's FP8 tensors."""
    found: torch.Tensor | None = getattr(tensor, "_scale_inv", None)
    return found


def state_scales(torch_optimizer: Any, master: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the live scales of a parameter's optimizer tensors in few bits, by name.

    Transformer Engine's FusedAdam has one per key of the state; FP8 tensors have another one.
    """
    found = dict(getattr(torch_optimizer, "_scales", {}).get(master, {}))
    for key, value in torch_optimizer.state.get(master, {}).items():
        if isinstance(value, torch.Tensor) and (scale := inverse_scale(value)) is not None:
            found[f"{key}._scale_inv"] = scale
    return found


def all_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yield Megatron's outermost optimizer and all that it chains, chains before what is in them."""
    yield optimizer
    for each in getattr(optimizer, "chained_optimizers", ()):
        if each is not optimizer:
            yield from all_optimizers(each)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers with parameters that Megatron's outermost one chains, also in chains in it."""
    return [
        each
        for each in all_optimizers(optimizer)
        if each in getattr(each, "chained_optimizers", (each,))
        and not getattr(each, "is_stub_optimizer", False)
    ]


def kind_of(inner: Any) -> str:
    """Return what an inner optimizer is: of matrices, "muon" or "soap"; else "adam", "lion" or "sgd".

    Its configuration names the one of matrices also where it is another one, for the rest of the parameters.
    """
    names = (each.__name__ for each in type(inner.optimizer).__mro__)
    named = getattr(getattr(inner, "config", None), "optimizer", "adam")
    return next((_KINDS[name] for name in names if name in _KINDS), str(named))


def layer_wise_chains(optimizer: Any) -> list[Any]:
    """Return the chains in which each data-parallel rank steps whole parameters, others than other ranks."""
    return [each for each in all_optimizers(optimizer) if hasattr(each, "dp_cp_params_list")]


def named_optimizer_tensors(model: Sequence[torch.nn.Module], optimizer: Any) -> NamedTensors:
    """Yield (parameter name/key, tensor) of every optimizer tensor on this rank.

    The keys are "param" for the fp32 master weights and the optimizer's own ("exp_avg", "step", ...)
    for the rest; a tensor that does not exist yet is not yielded. With the distributed optimizer each
    tensor is this rank's slice.
    """
    names = {parameter: name for name, parameter in named_parameters(model)}
    for inner in inner_optimizers(optimizer):
        offloaded.settle([inner])
        for parameter, master, _ in owned_parameters(inner):
            state = inner.optimizer.state.get(master, {})
            tensors = state if master is parameter else {"param": master, **state}
            for key, value in tensors.items():
                if isinstance(value, torch.Tensor):
                    held = offloaded.held_by(inner, master, key, value)
                    assert held is not None
                    yield f"{names[parameter]}/{key}", raw_tensor(held)
            for key, value in state_scales(inner.optimizer, master).items():
                yield f"{names[parameter]}/{key}.scale", value


def owned_parameters(
    optimizer: Any,
) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, tuple[int, int] | None]]:
    """Yield (model parameter, master parameter, slice) of one optimizer.

    The slice is the flat range that the distributed optimizer has assigned to this rank, None in others.
    """
    groups = optimizer.optimizer.param_groups
    if hasattr(optimizer, "model_param_group_index_map"):  # DistributedOptimizer
        for parameter, (group, order) in optimizer.model_param_group_index_map.items():
            range_ = optimizer._get_model_param_range_map(parameter)["param"]
            yield parameter, groups[group]["params"][order], (range_.start, range_.end)
        return
    model_of = _model_of_masters(optimizer)
    for group in groups:
        for master in group["params"]:
            yield model_of.get(master, master), master, None


def _model_of_masters(optimizer: Any) -> dict[torch.Tensor, torch.nn.Parameter]:
    """Return the model parameter of each fp32 copy in Float16OptimizerWithFloat16Params."""
    half_groups = getattr(optimizer, "float16_groups", [])
    master_groups = getattr(optimizer, "fp32_from_float16_groups", [])
    return {
        master: parameter
        for halves, masters in zip(half_groups, master_groups, strict=True)
        for parameter, master in zip(halves, masters, strict=True)
    }
