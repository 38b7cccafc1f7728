"""The GPT model: Megatron's own configuration of it, with a norm that works under sequence parallelism.

Megatron's torch norm, which the local implementation uses, refuses sequence parallelism because nobody
would reduce its gradients over the tensor-parallel group. The norm here is the same torch module; its
parameters are marked so that Megatron reduces them.
"""

import argparse
import dataclasses
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.fault_tolerance.arguments import refusals_of_megatron


def build_config(args: argparse.Namespace) -> Any:
    """Return what `megatron.training.pretrain` builds model, optimizer and loop from.

    Raises:
        ConfigError: if Megatron refuses the combination.
    """
    with refusals_of_megatron():
        model_config = gpt_config_from_args(args)
        # A spec given with --spec stays.
        model_config.transformer_layer_spec = model_config.transformer_layer_spec or layer_spec
        return pretrain_cfg_container_from_args(args, model_config)


def sequence_parallel_norm(
    config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
) -> torch.nn.Module:
    """Build torch's LayerNorm or RMSNorm with parameters marked ``sequence_parallel``.

    Megatron calls it where it would build its own norm, with these names.

    Args:
        config: the TransformerConfig; `normalization` names the kind.
        hidden_size: size of the last dimension, which is normalized.
        eps: added to the variance.
    """
    builders = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm: torch.nn.Module = builders[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Return Megatron's default spec, with the norm replaced where the local one would refuse.

    Args:
        config: the model; only sequence parallelism with the torch norm changes the spec.
        vp_stage: virtual pipeline stage.
    """
    spec = default_layer_spec(config, vp_stage)
    return _with_norm(spec) if config.transformer.sequence_parallel else spec


def _with_norm(spec: Any) -> Any:
    """Return a spec, or a part of one, with every WrappedTorchNorm replaced."""
    if spec is WrappedTorchNorm:
        return sequence_parallel_norm
    if isinstance(spec, ModuleSpec) or (
        dataclasses.is_dataclass(spec) and not isinstance(spec, type)
    ):
        changes = {
            field.name: _with_norm(getattr(spec, field.name)) for field in dataclasses.fields(spec)
        }
        return dataclasses.replace(spec, **changes)
    if isinstance(spec, list):
        return [_with_norm(part) for part in spec]
    return spec
