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

Each has some of the kinds of `KINDS`. They are read one at a time: besides it, what one rank has saved of it
is in memory. planning/transfer.py plans how it is put together.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch

from moe_ft.convert.source import RunState
from moe_ft.engine.snapshots.staging import unpack_into
from moe_ft.errors import ConfigError, CorruptStateError, PlanError
from moe_ft.format.entries import UNCUT, GlobalPlace, ParameterEntry, TensorEntry, tensor_bytes
from moe_ft.planning.relayout import blocks_of
from moe_ft.planning.transfer import Block, Box, Dims, Move, Part, boxes_of, cut, plan_transfer
from moe_ft.recovery.readers import StateReader
from moe_ft.state.packed_values import unpack
from moe_ft.state.slices import DTYPES
from moe_ft.units import UnitId, UnitKind, parse_unit

# Kinds of a tensor, and the keys that they have in an index. The fp32 master weights are the state; weights
# follow from them, and have entries of their own only where there are no masters.
KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "master": ("param", "master_param"),
        "weight": ("weight",),
        "exp_avg": ("exp_avg",),
        "exp_avg_sq": ("exp_avg_sq",),
        "momentum_buffer": ("momentum_buffer",),
        "moment2_buffer": ("moment2_buffer",),
    }
)
_Name = tuple[str, Dims]  # Megatron's key and the place in what is stacked
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


class Slice(NamedTuple):
    """A flat range of a rank's tensor in one of its units."""

    rank: int
    unit: str
    entry: TensorEntry


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
        parts: by kind, what ranks have saved of it; the owner of each is a `Slice`.
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
    parts: Mapping[str, Sequence[Part]] = field(
        default_factory=lambda: MappingProxyType({}), repr=False
    )

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def has_own_weight(self) -> bool:
        """True if the source has its weights besides its masters; else they follow from the masters."""
        ages = (self.iterations.get("weight"), self.iterations.get("master", ...))
        return ages[0] == ages[1] and (not self.parts or "weight" in self.parts)

    def dtype_of(self, kind: str) -> str:
        """Return safetensors' name of the type in which a kind is saved."""
        dtype: str = self.parts[kind][0].owner.entry.dtype
        return dtype


def find_tensors(source: RunState) -> tuple[GlobalTensor, ...]:
    """Return the tensors of the model, ordered by unit and name."""
    unit_of = {
        entry.parameter: parse_unit(name).whole
        for state in source.ranks
        for name, unit in state.index.units.items()
        for entry in unit.tensors
    }
    _check_is_described(source, unit_of)
    described: dict[_Name, tuple[str, ParameterEntry, GlobalPlace]] = {}
    parts: dict[_Name, dict[str, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for rank, state in enumerate(source.ranks):
        parameters = state.index.parameters
        for parameter, entry in parameters.items():
            for block, place in zip(_blocks(entry, ""), entry.places or (), strict=True):
                named = block.tensor.key, block.tensor.stacked_at
                described.setdefault(named, (parameter, entry, place))
        for name, unit in state.index.units.items():
            for saved in unit.tensors:
                if saved.parameter not in parameters or saved.key.startswith(UNCUT):
                    continue
                kind, own = _kind_of(saved), Slice(rank, name, saved)
                blocks = _blocks(parameters[saved.parameter], kind)
                for part in cut(own, blocks, saved.start, saved.end):
                    tensor = part.block.tensor
                    parts[tensor.key, tensor.stacked_at][kind].append(part)
    tensors = [
        _parameter(source.ranks, unit_of[parameter], named, entry.dtype or "", place, parts[named])
        for named, (parameter, entry, place) in described.items()
    ]
    return tuple(sorted((*tensors, *_buffers(source)), key=lambda each: (each.unit, each.name)))


def _blocks(entry: ParameterEntry, kind: str) -> list[Block]:
    return blocks_of(entry.places or (), entry.shape, kind)


def _kind_of(entry: TensorEntry) -> str:
    if entry.key not in _KIND_OF:
        raise ConfigError(f"{entry.parameter}: {entry.key} is state of an unknown kind")
    return _KIND_OF[entry.key]


def _check_is_described(source: RunState, unit_of: Mapping[str, UnitId]) -> None:
    """Raise an error for parameters that have no place, were never saved, or are not described."""
    entries = [each for state in source.ranks for each in state.index.parameters.items()]
    names = {name for name, _ in entries}
    placed = {name for name, entry in entries if entry.places}
    if unknown := sorted(set(unit_of) - names):
        raise CorruptStateError(
            f"{source.place} holds {unknown[0]}, which its indexes do not mention"
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
    ranks: Sequence[StateReader],
    unit: UnitId,
    named: _Name,
    dtype: str,
    place: GlobalPlace,
    parts: Mapping[str, Sequence[Part]],
) -> GlobalTensor:
    """Return one tensor from what ranks have saved of it; one of the places says what it is part of."""
    key, index = named
    name = key.replace(_STACK, f"{_STACK}{'.'.join(map(str, index))}.") if index else key
    tensor = GlobalTensor(
        name=name,
        unit=unit,
        shape=place.shape[len(index) :],
        dtype=dtype,
        key=key,
        stacked_shape=place.shape,
        index=index,
        iterations=_iterations(name, ranks, parts),
        parts=parts,
    )
    for kind in parts:
        _moves(tensor, kind)
    return tensor


def _iterations(
    name: str, ranks: Sequence[StateReader], parts: Mapping[str, Sequence[Part]]
) -> dict[str, int]:
    """Return the age of each kind."""
    found: dict[str, int] = {}
    for kind, slices in sorted(parts.items()):
        if any(part.owner.entry.is_absent for part in slices):
            continue  # moments that do not exist yet
        versions = {ranks[rank].index.units[unit].version for (rank, unit, _), *_ in slices}
        if len(versions) > 1:
            raise ConfigError(
                f"{name} must be of one iteration, and ranks have it of iterations "
                f"{sorted(iteration for _, iteration in versions)}. Convert the next checkpoint, or one that "
                "`inspect` shows whole."
            )
        found[kind] = versions.pop()[1]
    if "master" not in found and "weight" not in found:
        raise CorruptStateError(f"{name}: ranks have saved neither its weights nor its masters")
    return {"weight": found.get("master", found.get("weight", 0)), **found}


def _moves(tensor: GlobalTensor, kind: str) -> list[Move]:
    """Return the moves that put a kind of a tensor together; raises CorruptStateError if some is missing."""
    parts, zero = tensor.parts[kind], (0,) * len(tensor.shape)
    block = Block(parts[0].block.tensor, zero, tensor.shape, tensor.shape, zero)
    wanted = [Part(None, block, 0, tensor.numel)]
    try:
        plan = plan_transfer(parts, wanted, lambda _: ("",), lambda *_: 0, lambda owner: owner.rank)
    except PlanError as error:
        raise CorruptStateError(f"{tensor.name}: {error}") from error
    if missing := plan.missing.get(None):
        raise CorruptStateError(
            f"{tensor.name}: no rank has saved {missing} of its {tensor.numel} elements of {kind}"
        )
    return [move for _, move in plan.moves.get(None, ())]


def _buffers(source: RunState) -> Iterator[GlobalTensor]:
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
    )


def read_tensor(source: RunState, tensor: GlobalTensor, kind: str = "weight") -> torch.Tensor:
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
    saved = kind if kind in tensor.parts else "master"
    dtype = DTYPES[tensor.dtype if kind == "weight" else tensor.dtype_of(saved)]
    moves: dict[Slice, list[Move]] = defaultdict(list)
    for move in _moves(tensor, saved):
        moves[move.source.owner].append(move)
    found = torch.empty(tensor.numel, dtype=dtype)
    for own, its in moves.items():
        flat = torch.empty(own.entry.end - own.entry.start, dtype=DTYPES[own.entry.dtype])
        _read_slice(source, own, flat)
        for move in its:
            for ours, theirs in boxes_of(move, own.entry.start, 0):
                _view(found, theirs).copy_(_view(flat, ours))
    return found.view(tensor.shape)


def _view(flat: torch.Tensor, box: Box) -> torch.Tensor:
    return torch.as_strided(flat, box.lengths, box.strides, box.at)


def _read_slice(source: RunState, each: Slice, target: torch.Tensor) -> None:
    entry, state = each.entry, source.ranks[each.rank]
    scales = (scale for inner in state.index.records[-1].optimizers for scale in inner.scales)
    if entry.dtype == "I16" or f"{entry.parameter}/{entry.key}" in scales:
        raise ConfigError(
            f"{state.where}: {entry.key} of {entry.parameter} is kept in few bits by the optimizer "
            "(--use-precision-aware-optimizer), in a form that only it can read. Give --what weights."
        )
    content = state.read_part(each.unit, entry.offset, tensor_bytes(entry))
    unpack_into(target, msgspec.structs.replace(entry, offset=0), content)
