"""After a restore: every rank gets the slices that other ranks put back, and the weights that forward uses.

Collective; the only part of recovery that uses Megatron's own process groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.state.parameters import LocalParameter, StatePlaces
from moe_ft.state.slices import (
    DTYPES,
    describe,
    drop_state,
    is_precision_aware,
    live_tensor,
    make_state,
)
from moe_ft.state.tensors import inner_optimizers
from moe_ft.units import Level


def gather_state(
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    parameters: Sequence[LocalParameter],
    places: StatePlaces,
    groups: Any,
) -> None:
    """Exchange restored slices and refresh the weights. Called by all ranks.

    Args:
        model: model chunks, wrapped by Megatron's DistributedDataParallel.
        optimizer: Megatron's outermost optimizer.
        parameters: of this rank.
        places: this rank's places in its groups.
        groups: Megatron's ProcessGroupCollection.
    """
    replicated = [local for local in parameters if not local.is_sharded]
    for is_expert, place, group in (
        (False, places.dp, groups.dp_cp),
        (True, places.expt_dp, groups.expt_dp),
    ):
        shared = [local for local in replicated if local.is_expert == is_expert]
        if shared and place.size > 1:
            _exchange(shared, place.rank, place.size, group)
    for inner in inner_optimizers(optimizer):
        has_own_masters = hasattr(inner, "_copy_main_params_to_model_params")
        if has_own_masters and not is_precision_aware(inner):
            inner._copy_main_params_to_model_params()
    for chunk in model:
        wrapper: Any = chunk
        if getattr(getattr(wrapper, "ddp_config", None), "use_distributed_optimizer", False):
            wrapper.start_param_sync(force_sync=True)


def _exchange(shared: Sequence[LocalParameter], rank: int, size: int, group: Any) -> None:
    """Have every rank of a data-parallel group send its slices of parameters that all hold alike."""
    slices = assign_equal_slices([local.parameter.numel() for local in shared], size)
    tensors = _existing(shared, group)
    for owner in range(size):
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for (local_index, _), tensor in tensors.items():
            start, end = slices[owner][local_index]
            if start < end:
                by_dtype.setdefault(tensor.dtype, []).append(tensor.view(-1)[start:end])
        for pieces in by_dtype.values():
            packed = torch.cat(pieces)
            dist.broadcast(packed, src=dist.get_global_rank(group, owner), group=group)
            if owner != rank:
                for piece, received in zip(
                    pieces, packed.split([piece.numel() for piece in pieces]), strict=True
                ):
                    piece.copy_(received)


def _existing(shared: Sequence[LocalParameter], group: Any) -> dict[tuple[int, str], torch.Tensor]:
    """Return the whole live tensors by (parameter, key), made or dropped as their owners have them."""
    keys = [
        (index, entry.key, DTYPES[entry.dtype])
        for index, local in enumerate(shared)
        for entry in describe(_whole(local), Level.FULL)
    ]
    device = shared[0].parameter.device
    exists = torch.tensor(
        [
            int(_live(shared[index], key) is not None and shared[index].start < shared[index].end)
            for index, key, _ in keys
        ],
        dtype=torch.int32,
        device=device,
    )
    dist.all_reduce(exists, op=dist.ReduceOp.MAX, group=group)
    found = {}
    for (index, key, dtype), does_exist in zip(keys, exists.tolist(), strict=True):
        local = shared[index]
        if not does_exist:
            drop_state(local)
            continue
        if key not in ("param", "weight"):
            make_state(local, key, dtype)
        tensor = _live(local, key)
        assert tensor is not None
        found[index, key] = tensor
    return found


def _whole(local: LocalParameter) -> LocalParameter:
    """Return the parameter as if this rank saved all of it."""
    return replace(local, start=0, end=local.parameter.numel())


def _live(local: LocalParameter, key: str) -> torch.Tensor | None:
    return live_tensor(_whole(local), key)
