"""Checkpoints on storage of a small model whose every tensor is known, divided over four ranks.

Two tensor-parallel times two data-parallel ranks, which each save half of every parameter that they hold.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
import torch

from moe_ft.engine.memory.layout import UnitPlace, lay_out
from moe_ft.engine.persist.manifests import write_manifest
from moe_ft.files.storage import Storage, file_tag, rank_path
from moe_ft.format.encoding import FORMAT, checksum, encode
from moe_ft.format.entries import GlobalPlace, ModelPlaces, ParameterEntry, TensorEntry, UnitEntry
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.format.records import IterationRecord, OptimizerRecord
from moe_ft.state.packed_values import pack
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_identity, make_record

KEYS = ("param", "exp_avg", "exp_avg_sq")
ITERATION = 4
LAYER = "decoder.layers.0"
OBJECT = f"{LAYER}.self_attention.linear_qkv._extra_state/shard_0_1"
BIAS = torch.tensor([0.5, -0.25])
BIAS_NAME = "chunk0.module.decoder.layers.0.mlp.router.expert_bias"

Change = Callable[[Index], Index]


@dataclass(frozen=True)
class Known:
    """A tensor of the model: its key there, its shape, and how tensor parallelism divides it."""

    unit: UnitId
    parameter: str
    key: str
    shape: tuple[int, ...]
    dim: int = -1
    num_halves: int = 1
    expert: int = -1

    @property
    def name(self) -> str:
        """The name that conversions give it."""
        return self.key.replace(".experts.experts.", f".experts.experts.{self.expert}.")

    def value(self, key: str) -> torch.Tensor:
        """Return the numbers of a key of its state."""
        seed = sum(f"{self.parameter} {key}".encode())
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed))

    def places(self, tp_rank: int) -> Iterator[GlobalPlace]:
        """Yield the places of a rank's blocks."""
        whole = (0,) * len(self.shape)
        stack = () if self.expert < 0 else (2,)
        index = () if self.expert < 0 else (self.expert,)
        num = 1 if self.dim < 0 else 2 * self.num_halves
        length = self.shape[self.dim] // num
        for half in range(self.num_halves):
            offset, start, extent = list(whole), list(whole), list(self.shape)
            if self.dim >= 0:
                offset[self.dim] = (2 * half + tp_rank) * length
                start[self.dim], extent[self.dim] = half * length, length
            yield GlobalPlace(
                key=self.key,
                shape=(*stack, *self.shape),
                offset=(*index, *offset),
                start=tuple(start),
                extent=tuple(extent),
            )

    def local(self, tp_rank: int, key: str) -> torch.Tensor:
        """Return the tensor that a rank has."""
        blocks = []
        for place in self.places(tp_rank):
            block = self.value(key)
            for dim, offset in enumerate(place.offset[len(place.offset) - len(self.shape) :]):
                block = block.narrow(dim, offset, place.extent[dim])
            blocks.append(block)
        return torch.cat(blocks, dim=max(self.dim, 0)).contiguous()


_ATTENTION = UnitId(kind=UnitKind.NON_EXPERT, layer=0)
MODEL = (
    Known(
        UnitId(kind=UnitKind.EMBEDDING),
        "embedding.word_embeddings.weight",
        "embedding.word_embeddings.weight",
        (8, 6),
        dim=0,
    ),
    Known(
        _ATTENTION,
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.self_attention.linear_qkv.layer_norm_weight",
        (6,),
    ),
    Known(
        _ATTENTION,
        f"{LAYER}.self_attention.linear_proj.weight",
        f"{LAYER}.self_attention.linear_proj.weight",
        (6, 10),
        dim=1,
    ),
    *(
        Known(
            UnitId(kind=UnitKind.EXPERT, layer=0, expert=expert),
            f"{LAYER}.mlp.experts.local_experts.{expert}.linear_fc1.weight",
            f"{LAYER}.mlp.experts.experts.linear_fc1.weight",
            (12, 6),
            dim=0,
            num_halves=2,
            expert=expert,
        )
        for expert in range(2)
    ),
)


def known_tensors() -> dict[tuple[str, str], torch.Tensor]:
    """Return all tensors by name and key; weights are those of the masters in BF16."""
    found = {(each.name, key): each.value(key) for each in MODEL for key in KEYS}
    found |= {(each.name, "weight"): each.value("param").bfloat16() for each in MODEL}
    return found


def identity(**settings: object) -> Identity:
    """Return who wrote the model: four ranks with the distributed optimizer."""
    fingerprint = {
        "--bf16": True,
        "--use-distributed-optimizer": True,
        "--tensor-model-parallel-size": 2,
        "--num-layers": 1,
        **settings,
    }
    return msgspec.structs.replace(make_identity(world_size=4), fingerprint=fingerprint)


def persist_model(
    storage: Storage,
    iteration: int = ITERATION,
    *,
    who: Identity | None = None,
    change: Change = lambda index: index,
) -> None:
    """Write a checkpoint of the model.

    Args:
        change: what to change in each index before it is written.
    """
    who = who or identity()
    tag = file_tag(who)
    for rank in range(4):
        path = rank_path(iteration, rank, tag, "safetensors")
        index, content = _rank_state(rank, iteration, who, path.rpartition("/")[2])
        storage.write(path, [memoryview(content)])
        storage.write_atomically(rank_path(iteration, rank, tag, "json"), encode(change(index)))
    write_manifest(storage, iteration, tag, 4)


def _rank_state(rank: int, iteration: int, who: Identity, file: str) -> tuple[Index, bytes]:
    tp_rank, dp_rank = rank % 2, rank // 2
    locals_ = {
        (each.parameter, key): each.local(tp_rank, key).view(-1) for each in MODEL for key in KEYS
    }
    entries: dict[UnitId, list[TensorEntry]] = {}
    for each in MODEL:
        numel = locals_[each.parameter, "param"].numel()
        start, end = (0, numel // 2 + 1) if dp_rank == 0 else (numel // 2 + 1, numel)
        entries.setdefault(each.unit, []).extend(
            TensorEntry(each.parameter, key, start, end, "F32", 0) for key in KEYS
        )
    layout = lay_out((unit, Level.FULL, tensors) for unit, tensors in entries.items())
    content = bytearray(layout.header.ljust(layout.num_bytes, b"\0"))
    for place in layout.units:
        for tensor in place.tensors:
            part = locals_[tensor.parameter, tensor.key][tensor.start : tensor.end]
            raw = part.contiguous().view(torch.uint8).numpy().tobytes()
            at = place.offset + tensor.offset
            content[at : at + len(raw)] = raw
    index = Index(
        format=FORMAT,
        identity=who,
        rank=rank,
        node="node-a",
        iteration=iteration,
        file=file,
        file_bytes=layout.num_bytes,
        header_bytes=len(layout.header),
        header_checksum=checksum(layout.header),
        units={str(place.unit): _unit(place, iteration, bytes(content)) for place in layout.units},
        parameters=_parameters(tp_rank),
        records=(_record(iteration),),
        model=ModelPlaces(
            buffers={
                BIAS_NAME: (GlobalPlace(f"{LAYER}.mlp.router.expert_bias", (2,), (0,), (0,), (2,)),)
            },
            objects=(OBJECT,),
        ),
    )
    return index, bytes(content)


def _unit(place: UnitPlace, iteration: int, content: bytes) -> UnitEntry:
    return UnitEntry(
        offset=place.offset,
        num_bytes=place.num_bytes,
        iteration=iteration,
        level=place.level.value,
        checksum=checksum(content[place.offset : place.offset + place.num_bytes]),
        tensors=place.tensors,
    )


def _parameters(tp_rank: int) -> dict[str, ParameterEntry]:
    return {
        each.parameter: ParameterEntry(
            shape=tuple(each.local(tp_rank, "param").shape),
            dtype="BF16",
            places=tuple(each.places(tp_rank)),
        )
        for each in MODEL
    }


def _record(iteration: int) -> IterationRecord:
    state = {"tensor": {"dtype": "U8", "shape": [2], "data": "0102"}}
    words = {"tensor": {"dtype": "I64", "shape": [1], "data": "0100000000000000"}}
    numpy_state = {"name": "MT19937", "keys": words, "position": 1, "has_gauss": 0, "cached": 0.0}
    return msgspec.structs.replace(
        make_record(iteration),
        buffers={BIAS_NAME: pack(BIAS)},
        optimizers=(
            OptimizerRecord(
                groups=({"lr": 1e-3, "wd_mult": 1.0, "betas": [0.9, 0.95]},),
                steps={"*": float(iteration)},
            ),
        ),
        rng={
            "python": {"version": 3, "words": words, "gauss": None},
            "numpy": numpy_state,
            "torch": state,
            "device": state,
            "tracker": {"model": state},
        },
    )
