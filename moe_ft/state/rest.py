"""Weights, masters and moments of a rank as they rest between two optimizer steps, and copies on other ranks.

Left out is what changes rightly: weights that come from other ranks after the step
(--overlap-param-gather), those that are cast again as the next iteration begins, slots of experts, which are
copies of homes, buffers, and bytes that Transformer Engine makes again from others.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from moe_ft.config.fields import flag_of
from moe_ft.errors import ConfigError
from moe_ft.state import offloaded
from moe_ft.state.bit_sums import bit_sum
from moe_ft.state.parameters import home_part, is_slot, modules_config
from moe_ft.state.quantized import is_quantized, quantized_parts
from moe_ft.state.tensors import (
    NamedTensors,
    inner_optimizers,
    named_optimizer_tensors,
    named_parameters,
    owned_parameters,
)

# Marks of Megatron on weights of which each tensor-parallel rank has all, and whose gradients these add up.
_REDUCED = ("sequence_parallel", "average_gradients_across_tp_domain")


def check_kind(model: Sequence[Any], optimizer: Any) -> None:
    """Raise ConfigError unless weights and moments lie in one place between steps."""
    flag = flag_of("check_weights")
    if not all(hasattr(chunk, "bucket_groups") for chunk in model):
        raise ConfigError(
            f"{flag} needs Megatron's DistributedDataParallel: others (FSDP) divide weights otherwise. Leave "
            "it out."
        )
    if any(offloaded.offloader_of(each) is not None for each in inner_optimizers(optimizer)):
        raise ConfigError(
            f"{flag} cannot be used with optimizer states that are offloaded between steps "
            "(--offload-optimizer-states, --chunked-optimizer-state-offload): they move then. Leave one of "
            "them out."
        )


def left_out(model: Sequence[Any]) -> list[str]:
    """Return in words which weights of a model are not checked, or only in part."""
    found = []
    if _arrives_later(model):
        found.append("weights of other ranks at rest (--overlap-param-gather brings them later)")
    if any(is_slot(each) for chunk in model for each in chunk.parameters()):
        found.append("slots of experts (they are copies of homes, which are checked)")
    of_tp = copies(model).get("tp", [])
    whole = [each for _, each in named_parameters(model) if _is_whole(each)]
    if modules_config(model).tensor_model_parallel_size > 1 and len(of_tp) < len(whole):
        found.append(
            "weights that tensor-parallel ranks update each for itself (kernels may round differently)"
        )
    return found


def tensors_at_rest(model: Sequence[Any], optimizer: Any) -> NamedTensors:
    """Yield what nothing may change from the end of an optimizer step to the next one, by name."""
    inner = inner_optimizers(optimizer)
    owned: dict[torch.Tensor, tuple[int, int] | None]
    owned = {parameter: part for each in inner for parameter, _, part in owned_parameters(each)}
    is_staged = any(
        getattr(each.config, "reuse_grad_buf_for_mxfp8_param_ag", False) for each in inner
    )
    for name, parameter in named_parameters(model):
        if not (parameter.requires_grad and (is_staged or _arrives_later(model))):
            yield from raw_weight(name, parameter)
        elif parameter in owned and not is_staged and not is_quantized(parameter):
            yield (
                f"{name}/own",
                parameter.detach().reshape(-1)[slice(*(owned[parameter] or (None,)))],
            )
    yield from named_optimizer_tensors(model, optimizer)


def _arrives_later(model: Sequence[Any]) -> bool:
    """Return whether weights of other ranks come after the step, while forward runs."""
    return bool(model[0].ddp_config.overlap_param_gather)


def raw_weight(name: str, parameter: torch.Tensor) -> NamedTensors:
    """Yield a weight, or the bytes and scales of one in few bits, by name."""
    if not is_quantized(parameter):
        yield name, parameter
        return
    for part, tensor in quantized_parts(parameter):
        if not part.startswith(("transpose", "columnwise")):
            yield f"{name}/{part}", tensor


def copies(model: Sequence[Any]) -> dict[str, list[tuple[str, torch.Tensor]]]:
    """Return the weights that all ranks of a group must have, by the group's name in ProcessGroupCollection.

    Tensor-parallel ranks that compute gradients of the same weights each for themselves are compared only
    where kernels give the same bits.
    """
    found: dict[str, list[tuple[str, torch.Tensor]]] = {}
    is_exact = bool(getattr(modules_config(model), "deterministic_mode", False))
    for name, parameter in named_parameters(model):
        if home_part(parameter) is not None:  # type: ignore[arg-type]
            continue
        groups = ["dp_cp" if getattr(parameter, "allreduce", True) else "expt_dp"]
        is_same = is_exact or any(getattr(parameter, mark, False) for mark in _REDUCED)
        if _is_whole(parameter) and (is_same or parameter.device.type == "cpu"):
            groups.append("tp")
        if getattr(parameter, "shared_embedding", False) and "embd" not in found:
            groups.append("embd")
        for group in groups:
            found.setdefault(group, []).extend(raw_weight(name, parameter))
    return found


def _is_whole(parameter: torch.Tensor) -> bool:
    """Return whether each tensor-parallel rank has all of a weight."""
    is_expert = not getattr(parameter, "allreduce", True)
    return not (is_expert or getattr(parameter, "tensor_model_parallel", False))


def bit_sums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Return the exact sum of each tensor's bits, by name. Waits for the device."""
    sums = {name: bit_sum(tensor) for name, tensor in dict(tensors).items()}
    if not sums:
        return {}
    device = next(iter(sums.values())).device
    table = torch.stack([each.to(device) for each in sums.values()]).tolist()
    return dict(zip(sums, table, strict=True))
