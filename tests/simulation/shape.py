"""Sizes of a simulated model, its layout, and where each rank has which elements."""

from dataclasses import dataclass
from functools import cache
from math import prod

import msgspec
import numpy as np
import torch
import xxhash

from moe_ft.state.parameters import GroupPlace, StatePlaces
from moe_ft.units import UnitId, UnitKind


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model and its layout.

    Attributes:
        stages: of the pipeline.
        dp: ranks of a stage, over the ranks that divide its tensors.
        tp: ranks that divide tensors, but those of experts, the router and the norm, which each has whole.
        ep: ranks of a stage that divide the experts; the others repeat them.
        layers: of each stage.
        experts: of each layer.
        is_sharded: whether the optimizer's state is divided over the ranks of a stage.
        skips: whether some iterations have gradients that overflow, and no step.
        is_followed: whether peers make replicas of gradients: the optimizer is torch's Adam.
    """

    stages: int = 1
    dp: int = 2
    tp: int = 1
    ep: int = 2
    layers: int = 1
    experts: int = 4
    is_sharded: bool = True
    skips: bool = False
    is_followed: bool = False

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return self.dp * self.tp

    @property
    def num_ranks(self) -> int:
        return self.stages * self.width

    @property
    def num_layers(self) -> int:
        return self.stages * self.layers

    def stage_of(self, rank: int) -> int:
        return rank // self.width

    def ranks_of(self, stage: int) -> list[int]:
        return list(range(stage * self.width, (stage + 1) * self.width))

    def dense_peers(self, rank: int) -> list[int]:
        """Return the ranks that have the same parts of tensors, but for experts."""
        return [each for each in self.ranks_of(self.stage_of(rank)) if (each - rank) % self.tp == 0]

    def expert_peers(self, rank: int) -> list[int]:
        return [each for each in self.ranks_of(self.stage_of(rank)) if (each - rank) % self.ep == 0]

    def places(self, rank: int) -> StatePlaces:
        peers, alone = self.expert_peers(rank), GroupPlace(rank=0, size=1)
        return StatePlaces(
            dp=GroupPlace(rank=rank % self.width // self.tp, size=self.dp),
            expt_dp=GroupPlace(rank=peers.index(rank), size=len(peers)),
            tp=GroupPlace(rank=rank % self.tp, size=self.tp),
            expt_tp=alone,
        )


@dataclass(frozen=True)
class Weight:
    """A parameter of the model on one rank.

    Attributes:
        start, end: the slice whose master weights and moments this rank has.
        at: of its first element in the rank's weights.
        own_at: of its slice in the rank's masters.
        whole: shape of the parameter in the whole model.
        offset, extent: of the block of it that the rank has.
    """

    unit: UnitId
    name: str
    size: int
    start: int
    end: int
    at: int
    own_at: int
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def is_expert(self) -> bool:
        return self.unit.kind is UnitKind.EXPERT


_SHAPES: dict[UnitKind, tuple[int, ...]] = {
    UnitKind.EMBEDDING: (10, 2),
    UnitKind.NON_EXPERT: (4, 6),
    UnitKind.ROUTER: (6,),
    UnitKind.EXPERT: (7, 2),
    UnitKind.FINAL_NORM: (3,),
    UnitKind.OUTPUT: (6, 3),
}
_DIVIDED = {UnitKind.EMBEDDING: 0, UnitKind.NON_EXPERT: 1, UnitKind.OUTPUT: 0}  # the dimension


def block_of(shape: Shape, rank: int, kind: UnitKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offset and extent of the block that a rank has of a parameter of the whole model."""
    whole = _SHAPES[kind]
    divided = _DIVIDED.get(kind)
    if divided is None:
        return (0,) * len(whole), whole
    extent = tuple(size // shape.tp if dim == divided else size for dim, size in enumerate(whole))
    first = rank % shape.tp * extent[divided]
    return tuple(first if dim == divided else 0 for dim in range(len(whole))), extent


def _units_of(shape: Shape, rank: int) -> list[UnitId]:
    stage = shape.stage_of(rank)
    first, per_rank = stage * shape.layers, shape.experts // shape.ep
    units = [UnitId(kind=UnitKind.EMBEDDING)] if stage == 0 else []
    for layer in range(first, first + shape.layers):
        units += [UnitId(kind=kind, layer=layer) for kind in (UnitKind.NON_EXPERT, UnitKind.ROUTER)]
        begin = rank % shape.ep * per_rank
        units += [
            UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
            for expert in range(begin, begin + per_rank)
        ]
    if stage == shape.stages - 1:
        units += [UnitId(kind=kind) for kind in (UnitKind.FINAL_NORM, UnitKind.OUTPUT)]
    return units


@cache
def weights_of(shape: Shape, rank: int) -> tuple[Weight, ...]:
    """Return the parameters of a rank in the order of the model.

    The distributed optimizer lays all parameters of a kind in a row and cuts that in equal parts.
    """
    units, places = _units_of(shape, rank), shape.places(rank)
    blocks = {kind: block_of(shape, rank, kind) for kind in _SHAPES}
    sizes = {kind: prod(extent) for kind, (_, extent) in blocks.items()}
    totals = {
        is_expert: sum(sizes[each.kind] for each in units if _is_expert(each) == is_expert)
        for is_expert in (False, True)
    }
    row, at, own_at = {False: 0, True: 0}, 0, 0
    found = []
    for unit in units:
        size, is_expert = sizes[unit.kind], _is_expert(unit)
        start, end = 0, size
        if shape.is_sharded:
            place = places.expt_dp if is_expert else places.dp
            share = -(-totals[is_expert] // place.size)
            low, high = place.rank * share, (place.rank + 1) * share
            start = min(max(low - row[is_expert], 0), size)
            end = min(max(high - row[is_expert], 0), size)
            row[is_expert] += size
        offset, extent = blocks[unit.kind]
        name, whole = f"{unit}.weight", _SHAPES[unit.kind]
        found.append(Weight(unit, name, size, start, end, at, own_at, whole, offset, extent))
        at, own_at = at + size, own_at + end - start
    return tuple(found)


def _is_expert(unit: UnitId) -> bool:
    return unit.kind is UnitKind.EXPERT


@cache
def constants(name: str, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first values of a parameter and two directions of its gradients."""
    generator = np.random.default_rng(xxhash.xxh64_intdigest(name.encode()))
    return tuple(generator.standard_normal((3, size)).astype(np.float32))


@cache
def indices_of(weight: Weight) -> np.ndarray:
    """Return the indices in the whole parameter of the elements of a rank's block, in their order."""
    numbers = np.arange(prod(weight.whole)).reshape(weight.whole)
    block = tuple(
        slice(at, at + size) for at, size in zip(weight.offset, weight.extent, strict=True)
    )
    return numbers[block].reshape(-1)


def constants_of(weight: Weight) -> list[np.ndarray]:
    """Return the constants of a rank's block of a parameter."""
    return [each[indices_of(weight)] for each in constants(weight.name, prod(weight.whole))]


@cache
def own_constants(shape: Shape, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights = weights_of(shape, rank)
    parts = [[each[w.start : w.end] for each in constants_of(w)] for w in weights]
    first, second, third = (np.concatenate(row) for row in zip(*parts, strict=True))
    return first, second, third


@cache
def moves(shape: Shape, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements of a rank's own slices are where in another rank's weights."""
    known = {each.name: each for each in weights_of(shape, target)}
    sources: list[int] = []
    targets: list[int] = []
    for each in weights_of(shape, source):
        other = known.get(each.name)
        if other is not None and other.offset == each.offset and each.start < each.end:
            sources += range(each.own_at, each.own_at + each.end - each.start)
            targets += range(other.at + each.start, other.at + each.end)
    return torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
