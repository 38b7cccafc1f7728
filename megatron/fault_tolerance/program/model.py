"""GPT model in Megatron's own configuration, with replacements for parts that refuse some layouts.

Megatron's local implementation uses a torch norm that refuses sequence parallelism, because nothing would
reduce its gradients over the tensor-parallel group. The norm here is the same torch module, with parameters
marked so that Megatron reduces them. local_attention.py replaces the attention for multi-latent attention and
context parallelism, and local_variants.py that for sparse attention
and delta nets.
"""

import argparse
import dataclasses
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training import argument_utils

from megatron.fault_tolerance.program import local_variants, older_gpt, slots
from megatron.fault_tolerance.program.arguments import refusals_of_megatron
from megatron.fault_tolerance.program.local_attention import (
    LocalAttention,
    LocalLatentAttention,
    check_latent_attention,
)
from megatron.fault_tolerance.seams.versions import later
from moe_ft.errors import ConfigError

gpt: Any = later("megatron.training.models.gpt") or older_gpt
_megatrons_mtp_spec = gpt.mtp_block_spec


def build_config(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the settings of the model, and the arguments of `megatron.training.pretrain` that describe it.

    Raises:
        ConfigError: if Megatron refuses the combination, or would train it incorrectly.
    """
    check_latent_attention(args)
    with refusals_of_megatron():
        model_config, described = stock_config(args)
    check_mtp_place(model_config)
    return model_config, described


def stock_config(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return what `build_config` returns, without its checks."""
    from_args = later("megatron.training.argument_utils", "gpt_config_from_args")
    model_config = (from_args or older_gpt.gpt_config_from_args)(args)
    # Keep a spec that --spec gives.
    spec = model_config.transformer_layer_spec or layer_spec
    model_config.transformer_layer_spec = slots.layer_spec_of(args, spec)
    # Megatron builds the layers of multi-token prediction from a separate spec.
    gpt.mtp_block_spec = mtp_spec
    config = argument_utils.pretrain_cfg_container_from_args(
        args, None if gpt is older_gpt else model_config
    )
    described = {"cfg_container": config}
    if gpt is older_gpt:
        described["model_provider"] = model_config.build
    return model_config, described


def check_mtp_place(config: Any) -> None:
    """Raise ConfigError if MTP layers are on the first rank of a pipeline, in a later virtual stage.

    That stage would have its own copy of the embedding. Megatron keeps copies equal only between ranks, and
    would start with a copy full of zeros.
    """
    layout = config.transformer.pipeline_model_parallel_layout
    if layout is None or layout.virtual_pipeline_model_parallel_size == 1:
        return
    if LayerType.mtp in layout.layout[0][-1]:
        raise ConfigError(
            f"--pipeline-model-parallel-layout={layout} puts MTP layers on the first pipeline rank, in "
            "another virtual stage than the embedding: Megatron would train them with a separate "
            "embedding. Put m into a stage of another pipeline rank."
        )


def embedding_ranks(config: Any, pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the weight of the input embedding, in ascending order.

    Megatron keeps their copies equal. They are the ranks of the first stage, of the stages with MTP layers,
    and of the last stage if the output layer shares the weight. Megatron's default is the first and the last
    stage.

    Args:
        pipeline_ranks: global ranks of one pipeline, first stage first.
    """
    ranks = {pipeline_ranks[0], *get_mtp_ranks(pipeline_ranks, config.transformer)}
    if config.share_embeddings_and_output_weights:
        ranks.add(pipeline_ranks[-1])
    return sorted(ranks)


def sequence_parallel_norm(
    config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
) -> torch.nn.Module:
    """Build torch's LayerNorm or RMSNorm with parameters marked ``sequence_parallel``.

    Megatron calls it in place of its own norm, with these argument names.
    """
    builders = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm: torch.nn.Module = builders[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's default spec for a virtual stage, without the parts that would refuse the layout."""
    transformer = config.transformer
    if transformer.transformer_impl == "local" and local_variants.has_variant(transformer):
        spec = local_variants.layers_of(transformer, vp_stage)
    else:
        spec = gpt.default_layer_spec(config, vp_stage)
    return _replaced(spec, _replacements(transformer))


def mtp_spec(config: Any, layer: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's spec of multi-token prediction for decoder layers, with the same parts replaced."""
    if local_variants.has_variant(config.transformer):
        spec = local_variants.mtp_layers_of(config.transformer, vp_stage)
    else:
        spec = _megatrons_mtp_spec(config, layer, vp_stage)
    return _replaced(spec, _replacements(config.transformer))


def _replacements(config: Any) -> dict[Any, Any]:
    """Return the replacement of each part of Megatron's local implementation that has one."""
    replacements: dict[Any, Any] = {}
    is_local = config.transformer_impl == "local"
    if config.sequence_parallel:
        replacements[WrappedTorchNorm] = sequence_parallel_norm
    if config.layernorm_zero_centered_gamma and is_local:
        replacements[WrappedTorchNorm] = local_variants.ZeroCenteredNorm
    if is_local and (config.multi_latent_attention or config.context_parallel_size > 1):
        replacements[DotProductAttention] = LocalAttention
        replacements[MLASelfAttention] = LocalLatentAttention
    return replacements


def _replaced(spec: Any, replacements: dict[Any, Any]) -> Any:
    if isinstance(spec, type) and spec in replacements:
        return replacements[spec]
    if isinstance(spec, ModuleSpec) or (
        dataclasses.is_dataclass(spec) and not isinstance(spec, type)
    ):
        changes = {
            field.name: _replaced(getattr(spec, field.name), replacements)
            for field in dataclasses.fields(spec)
        }
        return dataclasses.replace(spec, **changes)
    if isinstance(spec, list):
        return [_replaced(part, replacements) for part in spec]
    return spec
