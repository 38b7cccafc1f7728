"""Shares of each expert that the ranks holding it save, in a model that need not exist.

In training state/parameters.py finds this out from Megatron's buffers; this is their arithmetic. Experts are
modules of their own: with grouped GEMM Megatron's buffers hold all first layers of a layer's experts before
all second ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError
from moe_ft.planning.model_size import ModelShape

Owned = npt.NDArray[np.int64]  # [group, layer, local expert]
_Tensor = tuple[tuple[int, int], int]  # (layer, local expert), elements


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

    def __post_init__(self) -> None:
        if self.dp < 1 or self.ep < 1 or self.dp % self.ep:
            raise PlanError(f"ep={self.ep} must divide dp={self.dp}, both at least 1")

    @property
    def num_groups(self) -> int:
        """Expert-parallel groups, that is, ranks that hold the same experts."""
        return self.dp // self.ep


def owned_experts(
    shape: ModelShape,
    num_layers: int,
    layout: SavingLayout,
    *,
    bucket_parameters: int | None = None,
) -> Owned:
    """Return ``[group, layer, local expert]`` the elements that a rank of the group saves of an expert.

    The experts of a stage that a rank holds lie end to end and are cut into equal pieces, one for each group,
    so that all of an expert is one rank's, or two ranks', where there are more experts than groups. The
    distributed optimizer begins with the last one, and cuts each bucket of its buffer.

    Args:
        shape: of the model.
        num_layers: MoE layers of the stage.
        layout: of its ranks, whose expert-parallel size divides the experts.
        bucket_parameters: after which a bucket of the distributed optimizer is full; None: there is one.
    """
    num_local = shape.num_experts // layout.ep
    owned = np.zeros((layout.num_groups, num_layers, num_local), np.int64)
    if layout.sharding is Sharding.NONE and not layout.is_optimizer_distributed:
        owned[0] = shape.expert_parameters
        return owned
    tensors: list[_Tensor] = [
        ((layer, local), count)
        for layer in range(num_layers)
        for local in range(num_local)
        for count in shape.expert_tensors
    ]
    if layout.is_optimizer_distributed:
        tensors.reverse()
    else:
        bucket_parameters = None
    for bucket in _buckets(tensors, bucket_parameters):
        _cut(bucket, owned)
    return owned


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
    """Add to each group an equal piece of the tensors, which lie end to end."""
    num_groups = len(owned)
    total = sum(count for _, count in bucket)
    start = group = 0
    for (layer, local), count in bucket:
        end = start + count
        while start < end:
            limit = total * (group + 1) // num_groups
            if limit == start:
                group += 1
                continue
            piece = min(end, limit) - start
            owned[group, layer, local] += piece
            start += piece
