"""Final gradients of a rank's slices, with the numbers of the optimizer step that uses them.

They are those from which torch's Adam on a CPU makes the next state, so whoever has the state before can
repeat the step, bit for bit (engine/updates/adam.py). Which optimizers that holds for is here too, and which
ones round otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_ft.config.fields import flag_of
from moe_ft.errors import ConfigError
from moe_ft.format.updates import AdamStep
from moe_ft.state import offloaded
from moe_ft.state.parameters import LocalParameter, StatePlaces
from moe_ft.state.slices import dtype_name, own_slice

_FLAG = f"{flag_of('replicate')}=gradients"
_OTHER_FORMULAS = ("amsgrad", "maximize", "differentiable")
_OTHER_ROUNDING = ("fused", "capturable")
_FUSED = {("transformer_engine", "FusedAdam"), ("apex", "FusedAdam")}
_CLIP_EPS = 1.0e-6  # as Megatron's clip_grad_by_total_norm_fp32 adds it


def check_repeatable(
    parameters: Sequence[LocalParameter], places: StatePlaces, *, allows_lossy: bool = False
) -> None:
    """Raise ConfigError unless the steps of a rank's optimizers can be repeated elsewhere.

    Args:
        allows_lossy: whether other bits may come out, as of fused Adam on a GPU.
    """
    remedy = f"Use {flag_of('replicate')} state"
    for local in parameters:
        inner = local.optimizer
        if inner is None:
            continue
        if getattr(inner.config, "use_precision_aware_optimizer", False):
            raise ConfigError(
                f"{_FLAG} cannot be used with --use-precision-aware-optimizer: its fused Adam rounds to few "
                "bits on the device. A peer's CPU computes other last bits of fp32, and would round some "
                f"numbers the other way. Leave one of them out, or: {remedy}."
            )
        if offloaded.offloader_of(inner) is not None:
            raise ConfigError(
                f"{_FLAG} cannot be used with optimizer states that are offloaded between steps "
                "(--offload-optimizer-states, --chunked-optimizer-state-offload): where they lie when "
                f"gradients are taken is not known. Leave one of them out, or: {remedy}."
            )
        if type(inner.optimizer) not in (torch.optim.Adam, torch.optim.AdamW) and not (
            _is_of_libraries(inner.optimizer)
        ):
            raise ConfigError(
                f"{_FLAG} needs torch's Adam, and parameter {local.name} has "
                f"{type(inner.optimizer).__name__} ({inner.config.optimizer}): its steps are not known to be "
                f"repeatable. {remedy}."
            )
        for group in inner.optimizer.param_groups:
            if others := [name for name in _OTHER_FORMULAS if group.get(name)]:
                raise ConfigError(
                    f"{_FLAG} needs torch's plain Adam, and this one has {', '.join(others)}: it computes "
                    f"something else. {remedy}."
                )
        if is_lossy(local):
            _check_lossy(local, places, remedy, allows_lossy=allows_lossy)
        if is_raw(local) and getattr(local.parameter, "grad_norm_group", None):
            raise ConfigError(
                f"{_FLAG} with gradients that are reduced in 16 bits cannot follow parameter {local.name}, "
                f"which is clipped by a norm of its own. {remedy}, or reduce in fp32."
            )


def _check_lossy(
    local: LocalParameter, places: StatePlaces, remedy: str, *, allows_lossy: bool
) -> None:
    if not allows_lossy:
        raise ConfigError(
            f"{_FLAG} is not exact with fused Adam or on a GPU (parameter {local.name}): peers repeat the "
            f"step on their CPU, which rounds otherwise. {remedy}, or add --moe-ft-allow-lossy."
        )
    # Another rank with the same state would recover it from another peer.
    twins = f"ranks that have the same state (parameter {local.name}) could recover other bits each"
    if not local.is_sharded:
        raise ConfigError(
            f"{_FLAG} that is not exact needs --use-distributed-optimizer: {twins}. Add it, or: {remedy}."
        )
    name, place = "tensor-model", places.tp
    if local.is_expert:
        name, place = "expert-tensor", places.expt_tp
    if place.size > 1 and local.entry.tp_dim < 0:
        raise ConfigError(
            f"{_FLAG} that is not exact cannot be used with --{name}-parallel-size={place.size}: {twins}. "
            f"Give 1, or: {remedy}."
        )
    if getattr(local.parameter, "shared_embedding", False):
        raise ConfigError(
            f"{_FLAG} that is not exact cannot be used with --pipeline-model-parallel-size above 1 without "
            f"--untie-embeddings-and-output-weights, or with --mtp-num-layers: {twins}. Untie them, use one "
            f"stage, or: {remedy}."
        )


def is_lossy(local: LocalParameter) -> bool:
    """Return whether the optimizer of a parameter rounds otherwise than torch's Adam on a CPU."""
    inner = local.optimizer
    if inner is None:
        return False
    groups = inner.optimizer.param_groups
    is_fused = any(group.get(name) for group in groups for name in _OTHER_ROUNDING)
    return local.parameter.is_cuda or is_fused or _is_of_libraries(inner.optimizer)


def _is_of_libraries(optimizer: Any) -> bool:
    """Return whether an optimizer is fused Adam of Transformer Engine or Apex."""
    kind = type(optimizer)
    return (kind.__module__.partition(".")[0], kind.__name__) in _FUSED


def is_raw(local: LocalParameter) -> bool:
    """Return whether Megatron reduces the gradient of a parameter in 16 bits, and keeps these."""
    reduced = getattr(local.parameter, "main_grad", None)
    return reduced is not None and reduced.dtype in (torch.bfloat16, torch.float16)


def bytes_per_gradient(local: LocalParameter) -> int:
    """Return the bytes of each number of a parameter's gradient, as it is sent."""
    return 2 if is_raw(local) else 4


def gradient_bytes(local: LocalParameter) -> int:
    """Return the bytes of the gradient of a parameter's slice, as it is sent."""
    return (local.end - local.start) * bytes_per_gradient(local)


def inverse_scales(parameters: Sequence[LocalParameter]) -> dict[int, float]:
    """Return by what gradients will be multiplied to undo the loss scale, by id of the inner optimizer.

    Only before `prepare_grads`: that sets the scale of the next iteration.
    """
    scalers = {
        id(each.optimizer): getattr(each.optimizer, "grad_scaler", None) for each in parameters
    }
    return {key: float(scaler.inv_scale) for key, scaler in scalers.items() if scaler}


def has_moments(parameters: Sequence[LocalParameter]) -> bool:
    """Return whether every optimizer has stepped, so that nothing of a snapshot is absent."""
    return all(each.optimizer.optimizer.state.get(each.master) for each in parameters)


def gradients(
    parameters: Sequence[LocalParameter], scales: Mapping[int, float], grad_norm: float | None
) -> Iterator[tuple[LocalParameter, torch.Tensor, AdamStep]]:
    """Yield the gradient of each slice that the coming step changes, flat, and the numbers of the step.

    Gradients are final: the optimizer steps next. Tensors share memory with Megatron's buffers.

    Args:
        scales: what `inverse_scales` has returned in this iteration.
        grad_norm: the norm by which gradients were clipped.

    Raises:
        KeyError: if an optimizer has no moments yet: its first step is not repeated.
    """
    groups: dict[int, dict[str, Any]] = {}
    for inner in {id(each.optimizer): each.optimizer for each in parameters}.values():
        mode = bool(getattr(inner.optimizer, "adam_w_mode", False))  # of fused ones
        for given in inner.optimizer.param_groups:
            group = {"decoupled_weight_decay": mode, **given}
            groups.update(dict.fromkeys(map(id, group["params"]), group))
    steps: dict[tuple[int, float, torch.dtype], AdamStep] = {}  # one for thousands of parameters
    for local in parameters:
        inner, master = local.optimizer, local.master
        if master is None or master.grad is None:
            continue
        group = groups[id(master)]
        state = inner.optimizer.state.get(master) or {}
        # Fused ones count in the group.
        number = float(state["step"] if "step" in state or not state else group["step"]) + 1
        is_reduced_raw = is_raw(local)
        if is_reduced_raw:
            reduced: torch.Tensor = getattr(local.parameter, "main_grad")  # noqa: B009 - of Megatron
            tensor = own_slice(local, "weight", reduced)
        else:
            tensor = own_slice(local, "param", master.grad)
        key = (id(group), number, tensor.dtype)
        if key not in steps:
            factors = _factors(inner, scales, grad_norm) if is_reduced_raw else ()
            steps[key] = _step_of(group, number, dtype_name(tensor.dtype), factors)
        yield local, tensor, steps[key]


def _factors(inner: Any, scales: Mapping[int, float], grad_norm: float | None) -> tuple[float, ...]:
    found = [scales[id(inner)]] if id(inner) in scales else []
    if inner.config.clip_grad > 0 and grad_norm is not None:
        clip = inner.config.clip_grad / (grad_norm + _CLIP_EPS)
        found += [clip] if clip < 1.0 else []
    return tuple(found)


def _step_of(
    group: Mapping[str, Any], number: float, dtype: str, factors: tuple[float, ...]
) -> AdamStep:
    beta1, beta2 = group["betas"]
    return AdamStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        is_decoupled=bool(group["decoupled_weight_decay"]),
        number=number,
        dtype=dtype,
        factors=factors,
    )
