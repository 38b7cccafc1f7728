"""Shares of the state that each rank saves, of a model that need not exist.

In training state/parameters.py reads them from Megatron's buffers; this file repeats the buffers' arithmetic.
Experts are modules of their own: with grouped GEMM Megatron's buffers hold all first layers of a layer's
experts before all second ones.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moe_ft.planning.model_size import ModelShape
from moe_ft.units import UnitId, UnitKind

Owned = npt.NDArray[np.int64]  # [rank, unit], or of experts [group, layer, local expert]
_Tensor = tuple[int, int]  # index of its unit, elements


class Sharding(StrEnum):
    """Division of replicated state among the ranks that hold it."""

    NONE = "none"  # rank 0 all non-experts, the first expert-parallel group all experts
    EQUAL = "equal"  # experts and non-experts in equal parts
    ADAPTIVE = "adaptive"  # experts in equal parts; non-experts where there are fewer experts


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingLayout:
    """The ranks of a stage and who of them saves what.

    Attributes:
        dp: data-parallel ranks, all of which hold the non-experts.
        ep: expert-parallel ranks; dp / ep groups of them hold the same experts. Rank r is rank r % ep
            of group r // ep.
        sharding: of replicated state.
        is_optimizer_distributed: whether each rank owns a slice of the optimizer's state already, which
            it saves whatever the sharding.
    """

    dp: int
    ep: int
    sharding: Sharding = Sharding.EQUAL
    is_optimizer_distributed: bool = True

    @property
    def num_groups(self) -> int:
        """Expert-parallel groups, that is, ranks that hold the same experts."""
        return self.dp // self.ep


def owned_slices(
    units: Sequence[Sequence[int]],
    num_ranks: int,
    layout: SavingLayout,
    *,
    bucket_parameters: int | None = None,
) -> Owned:
    """Return ``[rank, unit]`` the elements that each of the ranks that hold the same units saves.

    The units lie end to end and are cut into equal pieces, one for each rank. The distributed optimizer
    begins with the last tensor and cuts each bucket of its buffer.

    Args:
        units: ``[unit]`` elements of its tensors, in the order of the model.
        num_ranks: ranks that hold them.
        layout: says whether the first rank saves everything, and whether the optimizer is distributed.
        bucket_parameters: elements that fill a bucket of the distributed optimizer; None for one bucket.
    """
    owned = np.zeros((num_ranks, len(units)), np.int64)
    if layout.sharding is Sharding.NONE and not layout.is_optimizer_distributed:
        owned[0] = [sum(tensors) for tensors in units]
        return owned
    tensors = [(index, count) for index, counts in enumerate(units) for count in counts]
    if layout.is_optimizer_distributed:
        tensors.reverse()
    else:
        bucket_parameters = None
    for bucket in _buckets(tensors, bucket_parameters):
        _cut(bucket, owned)
    return owned


def owned_experts(
    shape: ModelShape,
    num_layers: int,
    layout: SavingLayout,
    *,
    bucket_parameters: int | None = None,
) -> Owned:
    """Return ``[group, layer, local expert]`` the elements that a rank of the group saves of an expert.

    Where there are more experts than groups, all of an expert belongs to one rank or to two.

    Args:
        num_layers: MoE layers of the stage.
        layout: of its ranks, whose expert-parallel size divides the experts.
        bucket_parameters: as of `owned_slices`.
    """
    num_local = shape.num_experts // layout.ep
    units = [shape.expert_tensors] * (num_layers * num_local)
    owned = owned_slices(units, layout.num_groups, layout, bucket_parameters=bucket_parameters)
    return owned.reshape(layout.num_groups, num_layers, num_local)


def owned_others(num_parameters: int, layout: SavingLayout) -> list[int]:
    """Return ``[rank]`` the parameters outside experts that each saves, without adaptive sharding."""
    return [int(count) for count in owned_slices([[num_parameters]], layout.dp, layout)[:, 0]]


def saved_parameters(
    shape: ModelShape,
    units: Mapping[UnitId, int],
    layout: SavingLayout,
    *,
    bucket_parameters: int | None = None,
) -> list[int]:
    """Return ``[rank]`` the parameters of a stage that each saves in a snapshot of everything.

    Args:
        units: of the stage, with their parameters.
        bucket_parameters: as of `owned_slices`.
    """
    num_layers = len({unit.layer_name for unit in units if unit.kind is UnitKind.EXPERT})
    experts = owned_experts(shape, num_layers, layout, bucket_parameters=bucket_parameters)
    by_group = experts.sum(axis=(1, 2))
    others = sum(count for unit, count in units.items() if unit.kind is not UnitKind.EXPERT)
    return [
        int(by_group[rank // layout.ep]) + count
        for rank, count in enumerate(owned_others(others, layout))
    ]


def _buckets(tensors: Sequence[_Tensor], bucket_parameters: int | None) -> Iterator[list[_Tensor]]:
    """Yield tensors in runs that end when they have enough elements."""
    bucket: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor[1]
        if bucket_parameters is not None and size >= bucket_parameters:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _cut(bucket: Sequence[_Tensor], owned: Owned) -> None:
    """Add an equal piece of the tensors, which lie end to end, to each rank."""
    units, counts = np.array(bucket, np.int64).T
    ends = np.cumsum(counts)
    cuts = ends[-1] * np.arange(len(owned) + 1)[:, None] // len(owned)
    pieces = np.diff(np.clip(cuts, ends - counts, ends), axis=0)
    np.add.at(owned.T, units, pieces.T)
