"""A checkpoint of moe_ft of any size, of a model of Mixtral's shape, with random numbers.

Two tensor-parallel times two data-parallel ranks with the distributed optimizer, which each save half of
every parameter that they hold. Layout, files, indexes and manifest come from the code that makes those of a
run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_ft.engine.memory.layout import FileLayout, lay_out
from moe_ft.engine.persist.manifests import write_manifest
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.entries import GlobalPlace, ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity, Start
from moe_ft.format.index import Index
from moe_ft.format.records import IterationRecord, OptimizerRecord
from moe_ft.units import Level, UnitId, UnitKind

ITERATION = 1000
KEYS = ("param", "exp_avg", "exp_avg_sq")
_TP, _DP = 2, 2
_HIDDEN, _FFN, _EXPERTS, _HEADS, _GROUPS, _VOCABULARY = 512, 1792, 8, 8, 2, 4096  # Mixtral's, by 8
_POOL_ELEMENTS = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A tensor of the model; that of an expert has its number."""

    unit: UnitId
    key: str
    shape: tuple[int, ...]
    dim: int = -1  # that tensor parallelism divides
    num_halves: int = 1
    expert: int = -1

    @property
    def parameter(self) -> str:
        """Name of the rank's parameter."""
        if self.expert < 0:
            return self.key
        return self.key.replace(".experts.experts.", f".experts.local_experts.{self.expert}.")

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on a rank."""
        return tuple(
            size // _TP if dim == self.dim else size for dim, size in enumerate(self.shape)
        )

    def places(self, tp_rank: int) -> Iterator[GlobalPlace]:
        """Yield the places of a rank's blocks in the tensor of the model."""
        stack, index = ((), ()) if self.expert < 0 else ((_EXPERTS,), (self.expert,))
        for half in range(self.num_halves if self.dim >= 0 else 1):
            offset, start, extent = [0] * len(self.shape), [0] * len(self.shape), [*self.shape]
            if self.dim >= 0:
                length = self.shape[self.dim] // _TP // self.num_halves
                offset[self.dim] = (_TP * half + tp_rank) * length
                start[self.dim], extent[self.dim] = half * length, length
            yield GlobalPlace(
                key=self.key,
                shape=(*stack, *self.shape),
                offset=(*index, *offset),
                start=tuple(start),
                extent=tuple(extent),
            )


def _layer(layer: int) -> Iterator[_Tensor]:
    name = f"decoder.layers.{layer}"
    unit = UnitId(kind=UnitKind.NON_EXPERT, layer=layer)
    attention = f"{name}.self_attention"
    rows = _HIDDEN + 2 * _HIDDEN // _HEADS * _GROUPS
    yield _Tensor(unit=unit, key=f"{attention}.linear_qkv.layer_norm_weight", shape=(_HIDDEN,))
    yield _Tensor(unit=unit, key=f"{attention}.linear_qkv.weight", shape=(rows, _HIDDEN), dim=0)
    yield _Tensor(unit=unit, key=f"{attention}.linear_proj.weight", shape=(_HIDDEN,) * 2, dim=1)
    yield _Tensor(unit=unit, key=f"{name}.pre_mlp_layernorm.weight", shape=(_HIDDEN,))
    router = UnitId(kind=UnitKind.ROUTER, layer=layer)
    yield _Tensor(unit=router, key=f"{name}.mlp.router.weight", shape=(_EXPERTS, _HIDDEN))
    for expert in range(_EXPERTS):
        unit, key = (
            UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert),
            f"{name}.mlp.experts.experts",
        )
        yield _Tensor(
            unit=unit,
            key=f"{key}.linear_fc1.weight",
            shape=(2 * _FFN, _HIDDEN),
            dim=0,
            num_halves=2,
            expert=expert,
        )
        yield _Tensor(
            unit=unit,
            key=f"{key}.linear_fc2.weight",
            shape=(_HIDDEN, _FFN),
            dim=1,
            expert=expert,
        )


def _model(num_layers: int) -> list[_Tensor]:
    ends = (
        (UnitKind.EMBEDDING, "embedding.word_embeddings.weight", (_VOCABULARY, _HIDDEN), 0),
        (UnitKind.FINAL_NORM, "decoder.final_layernorm.weight", (_HIDDEN,), -1),
        (UnitKind.OUTPUT, "output_layer.weight", (_VOCABULARY, _HIDDEN), 0),
    )
    outside = [
        _Tensor(unit=UnitId(kind=kind), key=key, shape=shape, dim=dim)
        for kind, key, shape, dim in ends
    ]
    return [*outside, *(each for layer in range(num_layers) for each in _layer(layer))]


def _bytes_of(model: list[_Tensor]) -> int:
    return sum(4 * len(KEYS) * torch.Size(each.shape).numel() for each in model)


def write_checkpoint(directory: Path, num_bytes: int) -> int:
    """Write a checkpoint of about so many bytes to a new persist directory; return its size."""
    per_layer = _bytes_of(_model(2)) - _bytes_of(_model(1))
    num_layers = max(1, round((num_bytes - _bytes_of(_model(0))) / per_layer))
    model, storage = _model(num_layers), Storage(str(directory))
    storage.make_root()
    who = _identity(num_layers)
    tag = file_tag(who)
    pool = torch.randn(_POOL_ELEMENTS, generator=torch.Generator().manual_seed(1))
    for rank in range(_TP * _DP):
        _write_rank(storage, rank, model, who, tag, pool)
    write_manifest(storage, ITERATION, tag, _TP * _DP)
    return _bytes_of(model)


def _write_rank(
    storage: Storage, rank: int, model: list[_Tensor], who: Identity, tag: str, pool: torch.Tensor
) -> None:
    entries: dict[UnitId, list[TensorEntry]] = {}
    for each in model:
        numel = torch.Size(each.local_shape).numel()
        start, end = (numel * (rank // _TP + more) // _DP for more in (0, 1))
        entries.setdefault(each.unit, []).extend(
            TensorEntry(each.parameter, key, start, end, "F32", 0) for key in KEYS
        )
    layout = lay_out((unit, Level.FULL, tensors) for unit, tensors in entries.items())
    units: dict[str, UnitEntry] = {}
    data = rank_path(ITERATION, rank, tag, "safetensors")
    storage.write(data, _pieces(layout, pool, units))
    index = Index(
        format=FORMAT,
        identity=who,
        rank=rank,
        node="node",
        iteration=ITERATION,
        file=data.rpartition("/")[2],
        file_bytes=layout.num_bytes,
        header_bytes=len(layout.header),
        header_checksum=checksum(layout.header),
        units=units,
        parameters={
            each.parameter: ParameterEntry(
                shape=each.local_shape, dtype="BF16", places=tuple(each.places(rank % _TP))
            )
            for each in model
        },
        records=(_record(),),
    )
    storage.write_atomically(rank_path(ITERATION, rank, tag, "json"), encode(index))


def _pieces(
    layout: FileLayout, pool: torch.Tensor, units: dict[str, UnitEntry]
) -> Iterator[memoryview]:
    """Yield the bytes of a file, and note its units."""
    yield memoryview(layout.header)
    end = len(layout.header)
    for number, place in enumerate(layout.units):
        yield memoryview(bytes(place.offset - end))
        content = bytearray(place.num_bytes)
        for tensor in place.tensors:
            count = tensor.end - tensor.start
            first = (number * 1000) % (_POOL_ELEMENTS - count)
            target = torch.frombuffer(
                content, dtype=torch.float32, count=count, offset=tensor.offset
            )
            target.copy_(pool[first : first + count])
        units[str(place.unit)] = UnitEntry(
            offset=place.offset,
            num_bytes=place.num_bytes,
            iteration=ITERATION,
            level=place.level.value,
            checksum=checksum(memoryview(content)),
            tensors=place.tensors,
        )
        yield memoryview(content)
        end = place.offset + place.num_bytes
    yield memoryview(bytes(layout.num_bytes - end))


def _identity(num_layers: int) -> Identity:
    settings = {
        "--num-layers": num_layers,
        "--hidden-size": _HIDDEN,
        "--ffn-hidden-size": _FFN,
        "--moe-ffn-hidden-size": _FFN,
        "--num-attention-heads": _HEADS,
        "--group-query-attention": True,
        "--num-query-groups": _GROUPS,
        "--kv-channels": _HIDDEN // _HEADS,
        "--num-experts": _EXPERTS,
        "--moe-router-topk": 2,
        "--max-position-embeddings": 4096,
        "--position-embedding-type": "rope",
        "--rotary-base": 1000000,
        "--normalization": "RMSNorm",
        "--layernorm-epsilon": 1e-5,
        "--swiglu": True,
        "--untie-embeddings-and-output-weights": True,
        "--padded-vocab-size": _VOCABULARY,
        "--vocab-size": _VOCABULARY,
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--tensor-model-parallel-size": _TP,
    }
    return Identity(
        job_id="benchmark",
        lineage="benchmark",
        history=(Start(number=0, resumed_at=0, name="benchmark"),),
        fingerprint=settings,
        world_size=_TP * _DP,
        strategy="dense",
    )


def _record() -> IterationRecord:
    state = {"tensor": {"dtype": "U8", "shape": [2], "data": "0102"}}
    words = {"tensor": {"dtype": "I64", "shape": [1], "data": "0100000000000000"}}
    rng: dict[str, Any] = {
        "python": {"version": 3, "words": words, "gauss": None},
        "numpy": {"name": "MT19937", "keys": words, "position": 1, "has_gauss": 0, "cached": 0.0},
        **dict.fromkeys(("torch", "device"), state),
        "tracker": {"model": state},
    }
    group = {"lr": 1e-3, "wd_mult": 1.0, "betas": [0.9, 0.95]}
    return IterationRecord(
        iteration=ITERATION,
        grad_norm=1.0,
        grad_norms_by_group={},
        num_tokens=None,
        optimizers=(OptimizerRecord(groups=(group,), steps={"*": float(ITERATION)}),),
        scheduler={"num_steps": ITERATION},
        consumed_train_samples=ITERATION,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        num_floating_point_operations=1.0,
        num_microbatches=1,
        rng=rng,
        buffers={},
        extra_state={},
        tokens_per_expert={},
    )
