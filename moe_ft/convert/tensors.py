"""Tensors of the whole model in a source: names, shapes, ages, and what the slices of ranks make of them.

A `GlobalTensor` has the name that Megatron's checkpoints give it, with global numbers of layers and, unlike
there, of experts: Megatron stacks the experts of a layer in one tensor. The weights of a layer of a GPT are

    decoder.layers.L.input_layernorm.{weight,bias}               Transformer Engine's layers, with MLA
    decoder.layers.L.self_attention.linear_qkv.weight, .bias     rows per query group: its queries, key, value
    decoder.layers.L.self_attention.linear_qkv.layer_norm_{weight,bias}      the norm before attention
    decoder.layers.L.self_attention.{q,k}_layernorm.weight
    decoder.layers.L.self_attention.linear_{q,q_down,q_up,kv_down,kv_up}_proj.weight          MLA
    decoder.layers.L.self_attention.linear_proj.{weight,bias}
    decoder.layers.L.mlp.linear_fc1.layer_norm_{weight,bias}     the norm before a dense MLP or a local one
    decoder.layers.L.pre_mlp_layernorm.{weight,bias}             the same, Transformer Engine's MoE layers
    decoder.layers.L.mlp.linear_fc{1,2}.{weight,bias}            dense MLP; with SwiGLU gate above up in fc1
    decoder.layers.L.mlp.router.{weight,expert_bias}
    decoder.layers.L.mlp.experts.experts.E.linear_fc{1,2}.weight             one expert, fc1 as above
    decoder.layers.L.mlp.shared_experts.linear_fc{1,2}.weight, .gate_weight

and outside of layers

    embedding.word_embeddings.weight, embedding.position_embeddings.weight   padded vocabulary
    decoder.final_layernorm.{weight,bias}
    output_layer.weight                                          unless tied to the embedding
    mtp.layers.D.{enorm,hnorm,final_layernorm}.weight, mtp.layers.D.eh_proj.weight
    mtp.layers.D.transformer_layer.*                             as a layer of the decoder

Each has some of the kinds of `KINDS`. They are read one at a time: besides it, one block of it is in memory.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

import msgspec
import torch

from moe_ft.convert.source import RankState, Source
from moe_ft.engine.snapshots.staging import unpack_into
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.format.entries import GlobalPlace, TensorEntry, tensor_bytes
from moe_ft.state.packed_values import unpack
from moe_ft.state.slices import DTYPES
from moe_ft.units import Part, UnitId, UnitKind, parse_unit

# Kinds of a tensor, and the keys that they have in an index. The fp32 master weights are the state; weights
# follow from them, and have entries of their own only where there are no masters.
KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "master": ("param", "master_param"),
        "weight": ("weight",),
        "exp_avg": ("exp_avg",),
        "exp_avg_sq": ("exp_avg_sq",),
        "momentum_buffer": ("momentum_buffer",),
    }
)
_KIND_OF = {key: kind for kind, keys in KINDS.items() for key in keys}
_STACK = ".experts.experts."
_LAYER = re.compile(r"(?P<stack>decoder|mtp)\.layers\.(?P<layer>\d+)\.")
_EXPERT = re.compile(r"\.experts\.experts\.(?P<expert>\d+)\.")
_OUTSIDE = MappingProxyType(
    {
        "embedding.": UnitKind.EMBEDDING,
        "decoder.final_layernorm.": UnitKind.FINAL_NORM,
        "output_layer.": UnitKind.OUTPUT,
    }
)


@dataclass(frozen=True, slots=True)
class Slice:
    """A flat range of a rank's tensor in one of its units."""

    rank: int
    unit: str
    entry: TensorEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Blocks of a tensor that the same ranks hold.

    Attributes:
        local_shape: of the tensor that these ranks have.
        slices: by kind, flat ranges of the ranks' tensor; they may overlap.
    """

    local_shape: tuple[int, ...]
    places: tuple[GlobalPlace, ...]
    slices: Mapping[str, tuple[Slice, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalTensor:
    """A tensor of the whole model.

    Attributes:
        shape: of the tensor; of one expert.
        dtype: safetensors' name of the type of its weights.
        key, stacked_shape: the tensor in Megatron's checkpoints that it is, or is one expert of.
        index: of the expert in that tensor; empty for other tensors.
        iterations: by kind, of the state that it is from; "weight" is always there.
        buffer: name in the records, if it is no parameter; else empty.
        blocks: that together are the tensor.
    """

    name: str
    unit: UnitId
    shape: tuple[int, ...]
    dtype: str
    key: str
    stacked_shape: tuple[int, ...]
    index: tuple[int, ...]
    iterations: Mapping[str, int]
    buffer: str = ""
    blocks: tuple[Block, ...] = field(default=(), repr=False)

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def has_own_weight(self) -> bool:
        """True if the source has its weights besides its masters; else they follow from the masters."""
        ages = (self.iterations.get("weight"), self.iterations.get("master", ...))
        return ages[0] == ages[1] and all("weight" in block.slices for block in self.blocks)


def find_tensors(source: Source) -> tuple[GlobalTensor, ...]:
    """Return the tensors of the model, ordered by unit and name."""
    unit_of: dict[str, UnitId] = {}
    slices: dict[str, dict[int, list[Slice]]] = {}
    for rank, state in enumerate(source.ranks):
        for name, unit in state.index.units.items():
            for entry in unit.tensors:
                unit_of[entry.parameter] = parse_unit(name).whole
                by_rank = slices.setdefault(entry.parameter, {})
                by_rank.setdefault(rank, []).append(Slice(rank, name, entry))
    _check_is_described(source, unit_of)
    found: dict[tuple[str, tuple[int, ...]], list[tuple[str, int, tuple[GlobalPlace, ...]]]] = {}
    for rank, state in enumerate(source.ranks):
        for parameter, description in state.index.parameters.items():
            by_tensor: dict[tuple[str, tuple[int, ...]], list[GlobalPlace]] = {}
            for place in description.places or ():
                index = place.offset[: len(place.shape) - len(place.extent)]
                by_tensor.setdefault((place.key, index), []).append(place)
            for tensor, places in by_tensor.items():
                found.setdefault(tensor, []).append((parameter, rank, tuple(places)))
    tensors = [
        _parameter(source.ranks, unit_of[holders[0][0]], index, holders, slices)
        for (_, index), holders in found.items()
    ]
    return tuple(sorted((*tensors, *_buffers(source)), key=lambda each: (each.unit, each.name)))


def _check_is_described(source: Source, unit_of: Mapping[str, UnitId]) -> None:
    """Raise an error for parameters that have no place, were never saved, or are not described."""
    entries = [each for state in source.ranks for each in state.index.parameters.items()]
    names = {name for name, _ in entries}
    placed = {name for name, entry in entries if entry.places}
    if unknown := sorted(set(unit_of) - names):
        raise CorruptStateError(
            f"{source.place} holds {unknown[0]}, of which its indexes say nothing"
        )
    problems = (state.index.model_places.problem for state in source.ranks)
    if problem := next(filter(None, problems), ""):
        raise ConfigError(
            f"{source.place} must say where its tensors belong in the whole model, and Megatron could not, "
            f"when the job started: {problem}. Change the flags of the model, and "
            "start the job again."
        )
    if lost := sorted(names - placed):
        raise ConfigError(
            f"{source.place} must say where the parts of {lost[0]} belong in the whole model, and does not"
            + (f", nor of {len(lost) - 1} others" if len(lost) > 1 else "")
            + ": an earlier version of moe_ft wrote it, or Megatron does not save it. Start the job again "
            "with this version, and convert the next checkpoint."
        )
    if unsaved := sorted(names - set(unit_of)):
        raise ConfigError(
            f"{source.place} must hold every tensor, and lacks {unsaved[0]}"
            + (f" and {len(unsaved) - 1} others" if len(unsaved) > 1 else "")
            + ": it was not saved yet, or is not trained, and has the value that the run began with. Train "
            "until every expert was saved (`inspect` shows them), or let the run end, which saves all."
        )


def _parameter(
    ranks: Sequence[RankState],
    unit: UnitId,
    index: tuple[int, ...],
    holders: Sequence[tuple[str, int, tuple[GlobalPlace, ...]]],
    slices: Mapping[str, Mapping[int, Sequence[Slice]]],
) -> GlobalTensor:
    """Return one tensor from the parameters of the ranks that hold blocks of it."""
    parameter, first, (place, *_) = holders[0]
    name = (
        place.key.replace(_STACK, f"{_STACK}{'.'.join(map(str, index))}.") if index else place.key
    )
    groups: dict[tuple[GlobalPlace, ...], list[Slice]] = {}
    local_shapes: dict[tuple[GlobalPlace, ...], tuple[int, ...]] = {}
    for held, rank, places in holders:
        groups.setdefault(places, []).extend(slices.get(held, {}).get(rank, ()))
        local_shapes[places] = ranks[rank].index.parameters[held].shape
    shape = place.shape[len(index) :]
    blocks = tuple(
        Block(local_shape=local_shapes[places], places=places, slices=_by_kind(found))
        for places, found in groups.items()
    )
    _check_is_covered(name, shape, blocks)
    return GlobalTensor(
        name=name,
        unit=unit,
        shape=shape,
        dtype=ranks[first].index.parameters[parameter].dtype or "",
        key=place.key,
        stacked_shape=place.shape,
        index=index,
        iterations=_iterations(name, ranks, blocks),
        blocks=blocks,
    )


def _by_kind(slices: Sequence[Slice]) -> dict[str, tuple[Slice, ...]]:
    found: dict[str, list[Slice]] = {}
    for each in slices:
        if each.entry.key not in _KIND_OF:
            raise ConfigError(
                f"{each.entry.parameter}: {each.entry.key} is state of an unknown kind"
            )
        found.setdefault(_KIND_OF[each.entry.key], []).append(each)
    return {
        kind: tuple(sorted(parts, key=lambda part: (part.entry.start, -part.entry.end, part.rank)))
        for kind, parts in found.items()
    }


def _check_is_covered(name: str, shape: tuple[int, ...], blocks: Sequence[Block]) -> None:
    """Raise CorruptStateError unless the blocks are the whole tensor, and slices are whole blocks."""
    there = {(place.offset, place.extent) for block in blocks for place in block.places}
    if (num := sum(prod(extent) for _, extent in there)) != prod(shape):
        raise CorruptStateError(f"{name}: blocks have {num} of its {prod(shape)} elements")
    for block in blocks:
        if not block.slices:
            raise CorruptStateError(
                f"{name}: no rank has saved its block at {block.places[0].offset}"
            )
        for kind, slices in block.slices.items():
            end = 0
            for each in slices:
                if each.entry.start > end:
                    break
                end = max(end, each.entry.end)
            if end < prod(block.local_shape):
                raise CorruptStateError(
                    f"{name}: no rank has saved {kind} of its block at {block.places[0].offset} from element "
                    f"{end} on"
                )


def _iterations(name: str, ranks: Sequence[RankState], blocks: Sequence[Block]) -> dict[str, int]:
    """Return the age of each kind that all blocks have."""
    kinds = [set(block.slices) for block in blocks]
    found: dict[str, int] = {}
    for kind in sorted(set.intersection(*kinds)):
        slices = [each for block in blocks for each in block.slices[kind]]
        if any(each.entry.is_absent for each in slices):
            continue  # moments that do not exist yet
        versions = {ranks[each.rank].index.units[each.unit].version for each in slices}
        if len(versions) > 1:
            raise ConfigError(
                f"{name} must be of one iteration, and ranks have it of iterations "
                f"{sorted(iteration for _, iteration in versions)}. Convert the next checkpoint, or one that "
                "`inspect` shows whole."
            )
        found[kind] = versions.pop()[1]
    if "master" not in found and "weight" not in found:
        raise CorruptStateError(
            f"{name}: ranks have saved neither weights nor masters of all of it"
        )
    return {"weight": found.get("master", found.get("weight", 0)), **found}


def _buffers(source: Source) -> Iterator[GlobalTensor]:
    """Yield the buffers that Megatron's checkpoints hold, such as the routers' biases."""
    seen: set[str] = set()
    for rank, state in enumerate(source.ranks):
        record = state.index.records[-1]
        for name, places in state.index.model_places.buffers.items():
            (place,) = places
            if place.key in seen or name not in record.buffers:
                continue
            seen.add(place.key)
            yield GlobalTensor(
                name=place.key,
                unit=_unit_named(place.key),
                shape=place.shape,
                dtype=record.buffers[name].dtype,
                key=place.key,
                stacked_shape=place.shape,
                index=(),
                iterations={"weight": source.iteration},
                buffer=f"{rank}/{name}",
            )


def tensor_named(
    name: str, shape: tuple[int, ...], dtype: str, *, num_experts: int
) -> GlobalTensor:
    """Return a tensor by its name alone, as of a model that has no records."""
    key = name
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()
    if expert := _EXPERT.search(name):
        key = name.replace(expert[0], _STACK)
        index, stack = (int(expert["expert"]),), (num_experts,)
    return GlobalTensor(
        name=name,
        unit=_unit_named(name),
        shape=shape,
        dtype=dtype,
        key=key,
        stacked_shape=(*stack, *shape),
        index=index,
        iterations={},
        buffer=name if name.endswith(".expert_bias") else "",
    )


def _unit_named(key: str) -> UnitId:
    match, expert = _LAYER.match(key), _EXPERT.search(key)
    if match is None:
        kinds = (kind for start, kind in _OUTSIDE.items() if key.startswith(start))
        return UnitId(kind=next(kinds, UnitKind.OTHER))
    is_router = ".router." in key
    kind = UnitKind.ROUTER if is_router else UnitKind.EXPERT if expert else UnitKind.NON_EXPERT
    return UnitId(
        kind=kind,
        block="mtp" if match["stack"] == "mtp" else "layer",
        layer=int(match["layer"]),
        expert=int(expert["expert"]) if expert else -1,
        part=Part.WHOLE,
    )


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
