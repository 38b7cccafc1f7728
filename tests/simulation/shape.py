"""Sizes of a simulated model, its layout, and where each rank has which elements."""

from dataclasses import dataclass
from functools import cache

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
        dp: ranks of a stage.
        ep: of them, those that divide the experts; the others repeat them.
        layers: of each stage.
        experts: of each layer.
        is_sharded: whether the optimizer's state is divided over the ranks of a stage.
        skips: whether some iterations have gradients that overflow, and no step.
    """

    stages: int = 1
    dp: int = 2
    ep: int = 2
    layers: int = 1
    experts: int = 4
    is_sharded: bool = True
    skips: bool = False

    @property
    def num_ranks(self) -> int:
        return self.stages * self.dp

    def stage_of(self, rank: int) -> int:
        return rank // self.dp

    def ranks_of(self, stage: int) -> list[int]:
        return list(range(stage * self.dp, (stage + 1) * self.dp))

    def expert_peers(self, rank: int) -> list[int]:
        return [each for each in self.ranks_of(self.stage_of(rank)) if (each - rank) % self.ep == 0]

    def places(self, rank: int) -> StatePlaces:
        peers, alone = self.expert_peers(rank), GroupPlace(rank=0, size=1)
        return StatePlaces(
            dp=GroupPlace(rank=rank % self.dp, size=self.dp),
            expt_dp=GroupPlace(rank=peers.index(rank), size=len(peers)),
            tp=alone,
            expt_tp=alone,
        )


@dataclass(frozen=True)
class Weight:
    """A parameter of the model on one rank.

    Attributes:
        start, end: the slice whose master weights and moments this rank has.
        at: of its first element in the rank's weights.
        own_at: of its slice in the rank's masters.
    """

    unit: UnitId
    name: str
    size: int
    start: int
    end: int
    at: int
    own_at: int

    @property
    def is_expert(self) -> bool:
        return self.unit.kind is UnitKind.EXPERT


_SIZES = {
    UnitKind.EMBEDDING: 20,
    UnitKind.NON_EXPERT: 24,
    UnitKind.ROUTER: 6,
    UnitKind.EXPERT: 14,
    UnitKind.FINAL_NORM: 3,
    UnitKind.OUTPUT: 18,
}


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
    totals = {
        is_expert: sum(_SIZES[each.kind] for each in units if _is_expert(each) == is_expert)
        for is_expert in (False, True)
    }
    row, at, own_at = {False: 0, True: 0}, 0, 0
    found = []
    for unit in units:
        size, is_expert = _SIZES[unit.kind], _is_expert(unit)
        start, end = 0, size
        if shape.is_sharded:
            place = places.expt_dp if is_expert else places.dp
            share = -(-totals[is_expert] // place.size)
            low, high = place.rank * share, (place.rank + 1) * share
            start = min(max(low - row[is_expert], 0), size)
            end = min(max(high - row[is_expert], 0), size)
            row[is_expert] += size
        found.append(Weight(unit, f"{unit}.weight", size, start, end, at, own_at))
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
def own_constants(shape: Shape, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights = weights_of(shape, rank)
    parts = [[each[w.start : w.end] for each in constants(w.name, w.size)] for w in weights]
    first, second, third = (np.concatenate(row) for row in zip(*parts, strict=True))
    return first, second, third


@cache
def moves(shape: Shape, source: int, target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which elements of a rank's own slices are where in another rank's weights."""
    known = {each.name: each for each in weights_of(shape, target)}
    sources: list[int] = []
    targets: list[int] = []
    for each in weights_of(shape, source):
        if each.name in known and each.start < each.end:
            sources += range(each.own_at, each.own_at + each.end - each.start)
            targets += range(known[each.name].at + each.start, known[each.name].at + each.end)
    return torch.tensor(sources, dtype=torch.int64), torch.tensor(targets, dtype=torch.int64)
