"""Places of a rank's tensors in those of the whole model, as Megatron itself describes them.

Megatron's modules say how their tensors are divided in ``sharded_state_dict``: by tensor, pipeline and expert
parallelism, SwiGLU's halves separately, tied embeddings under one name. These places go into every index, so
that state can be put together again without the layout that wrote it (moe_ft/convert/). No collectives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from moe_ft.format.entries import GlobalPlace, ModelPlaces
from moe_ft.state.parameters import HomePart, LocalParameter, home_part
from moe_ft.state.quantized import is_quantized
from moe_ft.state.slices import dtype_name
from moe_ft.state.tensors import buffer_places

# Names of layers have their numbers, and experts are stacked in their layer: Megatron's own format of models
# whose layers differ. A checkpoint that says so can be loaded into every model.
CONTENT_METADATA: Mapping[str, bool] = MappingProxyType(
    {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
)


@dataclass(frozen=True, slots=True)
class Places:
    """Places of a rank's tensors, keys of objects that Megatron saves with them; the problem if it cannot."""

    of: Mapping[torch.Tensor, tuple[GlobalPlace, ...]]
    objects: tuple[str, ...] = ()
    problem: str = ""


def find_places(model: Sequence[torch.nn.Module], dp_cp_group: Any) -> Places:
    """Return the places of the parameters and buffers of a rank, as far as Megatron saves them.

    Training needs none of it: a model that Megatron cannot describe has no places, and a problem.
    """
    try:
        return _find_places(model, dp_cp_group)
    except Exception as error:  # of any kind: modules may refuse in their own way
        return Places({}, problem=f"{type(error).__name__}: {error}")


def _find_places(model: Sequence[torch.nn.Module], dp_cp_group: Any) -> Places:
    found: dict[torch.Tensor, tuple[GlobalPlace, ...]] = {}
    objects = []
    for chunk in model:
        module: Any = chunk
        while hasattr(module, "module"):
            module = module.module
        if not hasattr(module, "sharded_state_dict"):
            continue
        metadata = {**CONTENT_METADATA, "dp_cp_group": dp_cp_group}
        for sharded in nested_values(module.sharded_state_dict(metadata=metadata)):
            if isinstance(sharded, ShardedTensor | ShardedTensorFactory):
                places = tuple(_places_of(sharded))
                found[sharded.data] = (*found.get(sharded.data, ()), *places)
            elif isinstance(sharded, ShardedObject):
                objects.append(sharded.unique_key)
        for parameter in module.parameters():
            if (part := home_part(parameter)) is not None:
                found[parameter] = tuple(_of_home(part, each) for each in found[part.like])
    return Places(found, tuple(objects))


def with_places(parameters: Sequence[LocalParameter], places: Places) -> list[LocalParameter]:
    """Return parameters whose entries have the places."""
    return [
        replace(
            local,
            entry=msgspec.structs.replace(
                local.entry,
                dtype=dtype_name(local.parameter.dtype),
                places=places.of.get(local.parameter, ()),
            ),
        )
        for local in parameters
    ]


def model_places(model: Sequence[torch.nn.Module], places: Places) -> ModelPlaces:
    """Return what Megatron saves besides parameters."""
    found = {}
    for name, (module, key) in buffer_places(model).items():
        buffer = module._buffers[key]
        if buffer is not None and buffer in places.of:
            found[name] = places.of[buffer]
    return ModelPlaces(buffers=found, objects=places.objects, problem=places.problem)


def _of_home(part: HomePart, of_slot: GlobalPlace) -> GlobalPlace:
    """Return the place of an expert from that of a slot: experts are stacked along the first axis."""
    return msgspec.structs.replace(
        of_slot,
        shape=(part.num_experts, *of_slot.shape[1:]),
        offset=(part.expert, *of_slot.offset[1:]),
    )


def _places_of(sharded: ShardedTensor | ShardedTensorFactory) -> Iterator[GlobalPlace]:
    whole = sharded.data
    if isinstance(sharded, ShardedTensorFactory) and is_quantized(whole):
        # It cuts the numbers, which would make copies of them: have it cut memory that nobody touches.
        whole = torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
        sharded = replace(sharded, data=whole)
    parts = (
        nested_values(sharded.build()) if isinstance(sharded, ShardedTensorFactory) else [sharded]
    )
    for part in parts:
        start = _corner(whole, part.data)
        if start is not None:
            yield GlobalPlace(
                key=part.key,
                shape=tuple(part.global_shape),
                offset=tuple(part.global_offset),
                start=start,
                extent=tuple(part.data.shape),
            )


def _corner(whole: torch.Tensor, part: torch.Tensor) -> tuple[int, ...] | None:
    """Return where a part of a tensor begins in it; None unless it is a block of it."""
    if part is whole:
        return (0,) * whole.dim()
    shares = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    if not shares or part.stride() != whole.stride():
        return None
    rest, corner = int(part.storage_offset() - whole.storage_offset()), []
    for stride in whole.stride():
        corner.append(rest // stride)
        rest %= stride
    return tuple(corner)
