"""Reading tensors of the whole model: the slices of ranks put together, verified and unpacked.

One tensor at a time is in memory, and besides it one block of it.
"""

from math import prod

import msgspec
import torch

from moe_ft.convert.source import Source
from moe_ft.convert.tensors import Block, GlobalTensor, Slice
from moe_ft.engine.snapshots.staging import unpack_into
from moe_ft.errors import ConfigError
from moe_ft.format.entries import tensor_bytes
from moe_ft.state.packed_values import unpack
from moe_ft.state.slices import DTYPES


def read_tensor(source: Source, tensor: GlobalTensor, kind: str = "weight") -> torch.Tensor:
    """Return a tensor of the model on the CPU, in one of its kinds; its weights in their own type."""
    if kind not in tensor.iterations:
        raise ConfigError(
            f"{source.place} has no {kind} of {tensor.name}: the optimizer had not made a step yet, or keeps "
            "none. Convert a later checkpoint, or give --what weights."
        )
    if tensor.buffer:
        rank, _, name = tensor.buffer.partition("/")
        return unpack(source.ranks[int(rank)].index.records[-1].buffers[name])
    # Weights follow from masters, unless the optimizer that holds the masters keeps few bits of them.
    saved = kind if all(kind in block.slices for block in tensor.blocks) else "master"
    own = tensor.dtype if kind == "weight" else tensor.blocks[0].slices[saved][0].entry.dtype
    dtype = DTYPES[own]
    if _is_all_of(tensor):
        return _read_block(source, tensor.blocks[0], saved).to(dtype)
    found = torch.empty(tensor.shape, dtype=dtype)
    for block in tensor.blocks:
        local = _read_block(source, block, saved)
        for place in block.places:
            into = found
            for dim, offset in enumerate(place.offset[len(tensor.index) :]):
                into = into.narrow(dim, offset, place.extent[dim])
            part = local
            for dim, start in enumerate(place.start):
                part = part.narrow(dim, start, place.extent[dim])
            into.copy_(part)
    return found


def _is_all_of(tensor: GlobalTensor) -> bool:
    """Return whether some ranks have the tensor as it is."""
    first, *others = tensor.blocks
    extents = {place.extent for place in first.places}
    return not others and first.local_shape == tensor.shape and extents == {tensor.shape}


def _read_block(source: Source, block: Block, kind: str) -> torch.Tensor:
    """Return the tensor that some ranks have, put together from the slices that each of them saved."""
    slices = block.slices[kind]
    numel, end = prod(block.local_shape), 0
    local = torch.empty(numel, dtype=DTYPES[slices[0].entry.dtype])
    for each in slices:
        if each.entry.end > end:
            _read_slice(source, each, local[each.entry.start : each.entry.end])
            end = each.entry.end
    return local.view(block.local_shape)


def _read_slice(source: Source, each: Slice, target: torch.Tensor) -> None:
    entry, state = each.entry, source.ranks[each.rank]
    scales = (scale for inner in state.index.records[-1].optimizers for scale in inner.scales)
    if entry.dtype == "I16" or f"{entry.parameter}/{entry.key}" in scales:
        raise ConfigError(
            f"{state.place}: {entry.key} of {entry.parameter} is kept in few bits by the optimizer "
            "(--use-precision-aware-optimizer), in a form that only it can read. Give --what weights."
        )
    content = state.read(each.unit, entry.offset, tensor_bytes(entry))
    unpack_into(target, msgspec.structs.replace(entry, offset=0), content)
