"""Writing fetched state into the live model and optimizer, then exchanging what several ranks hold.

The exchange is collective; it is the only part of recovery that uses Megatron's own process groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from moe_ft.engine.background import PhaseHook
from moe_ft.engine.snapshots.staging import unpack_into
from moe_ft.faults import Phase
from moe_ft.format.entries import UNCUT, TensorEntry
from moe_ft.recovery.readers import FetchedUnit
from moe_ft.state import offloaded
from moe_ft.state.catalog import Slices, UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.slices import (
    DTYPES,
    describe,
    drop_state,
    is_precision_aware,
    live_tensor,
    make_state,
)
from moe_ft.state.tensors import inner_optimizers, layer_wise_chains
from moe_ft.units import Level


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSlices:
    """Slices that each rank puts back of the parameters that several ranks hold.

    Attributes:
        dp: ``[rank in the group]`` flat ranges by name of non-expert parameters, in the data-parallel group.
        expt_dp: the same for the parameters of experts, in the experts' data-parallel group.
    """

    dp: Sequence[Slices]
    expt_dp: Sequence[Slices]


def exchange_state(
    parameters: Sequence[LocalParameter], restored: SharedSlices, level: Level, groups: Any
) -> None:
    """Exchange slices of parameters that several data-parallel ranks hold. Called by all ranks of a stage."""
    replicated = [local for local in parameters if not local.is_sharded]
    for is_expert, slices, group in (
        (False, restored.dp, groups.dp_cp),
        (True, restored.expt_dp, groups.expt_dp),
    ):
        found = {name for owned in slices for name in owned}
        shared = [
            local for local in replicated if local.is_expert == is_expert and local.name in found
        ]
        if shared and len(slices) > 1:
            _exchange(shared, slices, level, group)


def refresh_weights(optimizer: Any) -> None:
    """Make the weights that forward uses from this rank's master weights.

    Called by all ranks of a stage: scales of FP8 parameters are of the numbers of all data-parallel ranks.
    """
    for inner in inner_optimizers(optimizer):
        if offloaded.is_hybrid(inner.optimizer):
            offloaded.copy_to_weights(inner.optimizer)
            continue
        # MXFP8: masters are only put where gradients are else, and `sync_weights` gathers and casts them.
        is_staged = getattr(inner.config, "reuse_grad_buf_for_mxfp8_param_ag", False)
        if is_staged and hasattr(inner, "_copy_main_params_to_param_buffer"):
            inner._copy_main_params_to_param_buffer()
        elif hasattr(inner, "_copy_main_params_to_model_params") and not is_precision_aware(inner):
            inner._copy_main_params_to_model_params()


def sync_weights(model: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Gather the weights that forward uses, where each rank has a slice of them. Called by all ranks."""
    for chunk in model:
        wrapper: Any = chunk
        config = getattr(wrapper, "ddp_config", None)
        if not getattr(config, "use_distributed_optimizer", False):
            continue
        wrapper.start_param_sync(force_sync=True)
        if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
            # An iteration whose forward gathers weights stages masters first. Megatron 0.18 would leave these
            # where gradients are added if a gather seemed to have been sent already.
            for group in wrapper.bucket_groups + wrapper.expert_parallel_bucket_groups:
                group.param_gather_dispatched = False
    for chain in layer_wise_chains(optimizer):
        if not chain.use_buffer_param_sync:  # parameters outside of the buffers of model chunks
            chain.allgather_params()


@torch.no_grad()
def put_back(
    units: Sequence[FetchedUnit],
    catalog: UnitCatalog,
    iteration: int,
    phase_hook: PhaseHook | None,
    chosen: Callable[[LocalParameter], bool] = lambda local: True,
) -> None:
    """Copy fetched slices into the live state: master weights and moments, or weights.

    This leaves out what other ranks own, the weights that follow from masters, and the record.

    Args:
        chosen: says of which parameters.
    """
    for count, unit in enumerate(units):
        if count == len(units) // 2 and phase_hook is not None:
            phase_hook(Phase.RECOVERY, iteration)
        by_name = {local.name: local for local in catalog.parameters_of(unit.unit)}
        for tensor in unit.entry.tensors:
            if chosen(by_name[tensor.parameter]):
                _write(by_name[tensor.parameter], tensor, unit.content)


def _write(local: LocalParameter, tensor: TensorEntry, content: memoryview) -> None:
    if tensor.is_absent:
        drop_state(local)
        return
    if tensor.key not in ("param", "weight"):
        make_state(local, tensor.key, DTYPES[tensor.dtype])
    if not local.is_sharded:
        local = replace(local, start=tensor.start, end=tensor.end)
    target = live_tensor(local, tensor.key)
    assert target is not None
    unpack_into(target, tensor, content)


def _exchange(
    shared: Sequence[LocalParameter], slices: Sequence[Slices], level: Level, group: Any
) -> None:
    """Have every rank of a data-parallel group send its slices of parameters that all of them hold."""
    rank = dist.get_rank(group)
    tensors = _existing(shared, slices[rank], level, group)
    for owner, owned in enumerate(slices):
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for (local_index, key), tensor in tensors.items():
            start, end = owned.get(shared[local_index].name, (0, 0))
            if key.startswith(UNCUT):
                end = tensor.numel() if start == 0 < end else start
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


def _existing(
    shared: Sequence[LocalParameter], own: Slices, level: Level, group: Any
) -> dict[tuple[int, str], torch.Tensor]:
    """Return the whole live tensors by (parameter, key), made or dropped as their owners have them."""
    keys = [
        (index, entry.key, DTYPES[entry.dtype])
        for index, local in enumerate(shared)
        for entry in describe(local.whole, level)
    ]
    device = shared[0].parameter.device
    exists = torch.tensor(
        [
            int(_live(shared[index], key) is not None and shared[index].name in own)
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


def _live(local: LocalParameter, key: str) -> torch.Tensor | None:
    return live_tensor(local.whole, key)
