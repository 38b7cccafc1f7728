"""GPT model in Megatron's own configuration, with replacements for parts that refuse some layouts.

Megatron's local implementation uses a torch norm that refuses sequence parallelism, because nothing would
reduce its gradients over the tensor-parallel group. The norm here is the same torch module, with parameters
marked so that Megatron reduces them. local_attention.py replaces the attention for multi-latent attention and
context parallelism.

With `--experimental-attention-variant dsa` a lightning indexer chooses the keys that each query sees, and
multi-latent attention sees these alone. With `gated_delta_net` some layers have such a net instead of
attention. Megatron computes both in torch, delta nets with `--deterministic-mode`, but builds them for
Transformer Engine alone, whose linear layers and norms it takes (0.19.2). With the layers here they run
without a GPU, and have the same names in checkpoints; a delta net also needs the package `fla`. Megatron also
refuses both with `--mtp-num-layers`: these layers get the attention of the decoder's last layer here, with
either implementation.
"""

import argparse
import copy
import dataclasses
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training import argument_utils

from megatron.fault_tolerance.program import older_gpt, slots
from megatron.fault_tolerance.program.arguments import refusals_of_megatron
from megatron.fault_tolerance.program.local_attention import (
    LocalAttention,
    LocalLatentAttention,
    check_latent_attention,
)
from megatron.fault_tolerance.seams.versions import later
from moe_ft.errors import ConfigError

_specs = later("megatron.core.models.gpt.experimental_attention_variant_module_specs")
gpt: Any = later("megatron.training.models.gpt") or older_gpt
_megatrons_mtp_spec = gpt.mtp_block_spec


class WholeLinear(torch.nn.Linear):
    """Linear layer that every tensor-parallel rank has whole; Megatron builds and calls it as its own."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        """Build the layer.

        Args:
            options: `init_method` of the weight; the others are of parallel layers.
        """
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        if config.perform_initialization:
            options["init_method"](self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Return the output, and no bias that would be added later."""
        return super().forward(x), None


class _LocalLayers(LocalSpecProvider):  # type: ignore[misc]
    """Megatron's local layers, and the projections into latent space, which it builds as parallel ones."""

    def linear(self) -> type:
        """Return the class; without tensor parallelism a rank has all of it."""
        return ColumnParallelLinear  # type: ignore[no-any-return]


class ZeroCenteredNorm(torch.nn.RMSNorm):
    """RMSNorm whose weights are added to 1, as --apply-layernorm-1p has them."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Build the norm; Megatron calls it in place of its own, with these names of arguments.

        Raises:
            ConfigError: for a LayerNorm.
        """
        if config.normalization != "RMSNorm":
            raise ConfigError(
                f"--normalization={config.normalization} must be RMSNorm with --apply-layernorm-1p and "
                "--transformer-impl local, which has no other norm of that kind."
            )
        super().__init__(hidden_size, eps=eps)
        torch.nn.init.zeros_(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., hidden_size] normalized."""
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


def has_variant(config: Any) -> bool:
    """Return whether a model has sparse attention or delta nets."""
    return getattr(config, "experimental_attention_variant", None) is not None


def layers_of(config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's spec of a virtual stage with sparse attention or delta nets, and local layers.

    Raises:
        ConfigError: if ranks would share an attention.
    """
    for flag in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(config, flag) > 1:
            raise ConfigError(
                f"--{flag.replace('_', '-')}={getattr(config, flag)} must be 1 with "
                f"--experimental-attention-variant {config.experimental_attention_variant} and "
                "--transformer-impl local, which has no layers for parts of such attention. Use "
                "--transformer-impl transformer_engine."
            )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        _without_variant(config), False, config.normalization, vp_stage=vp_stage
    )
    if layout := config.pipeline_model_parallel_layout:
        layers = layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=vp_stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage)
        layers = range(first, first + len(spec.layer_specs))
    return dataclasses.replace(
        spec,
        layer_specs=[
            _with_attention(config, layer, plain)
            for layer, plain in zip(layers, spec.layer_specs, strict=True)
        ],
    )


def mtp_layers_of(config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's spec of layers that predict further tokens; None if a virtual stage has none."""
    if config.mtp_num_layers is None:
        return None
    uses_engine = config.transformer_impl == "transformer_engine"
    layers_with_engine = getattr(
        _specs, "get_transformer_layer_with_experimental_attention_variant_spec", None
    )
    if layers_with_engine is None:
        raise ConfigError(
            f"--mtp-num-layers={config.mtp_num_layers} needs megatron-core 0.19 or newer with "
            f"--experimental-attention-variant {config.experimental_attention_variant}. Install it."
        )
    if uses_engine:
        layer = layers_with_engine(config)[-1]
    else:
        plain = gpt_layer_specs.get_gpt_decoder_layer_specs(
            _without_variant(config), False, config.normalization
        )
        layer = _with_attention(config, config.num_layers - 1, plain[-1])
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, uses_engine, vp_stage=vp_stage)


def _without_variant(config: Any) -> Any:
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def _with_attention(config: Any, layer: int, spec: Any) -> Any:
    """Return the spec of a layer, counted from 0 in the decoder, with the attention that it has."""
    if config.experimental_attention_variant == "dsa":
        attention = _specs.get_dsa_module_spec_for_backend(config, _LocalLayers())
        indexer = attention.submodules.core_attention.submodules.indexer
        for name in ("linear_wq_b", "linear_wk", "linear_weights_proj"):
            setattr(indexer.submodules, name, WholeLinear)
        return _changed(spec, self_attention=attention)
    if not _specs.get_linear_attention_pattern(config)[layer]:
        return spec
    attention = _specs.get_gated_delta_net_module_spec(config, _LocalLayers())
    attention.submodules.in_proj = ColumnParallelLinear
    # The norm before it is of its projection's layer in Transformer Engine, as that before attention.
    names = spec.submodules.sharded_state_dict_keys_map
    names = {**names, "input_layernorm.": "self_attention.in_proj.layer_norm_"}
    return _changed(spec, self_attention=attention, sharded_state_dict_keys_map=names)


def _changed(spec: Any, **changes: Any) -> Any:
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **changes))


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
    if transformer.transformer_impl == "local" and has_variant(transformer):
        spec = layers_of(transformer, vp_stage)
    else:
        spec = gpt.default_layer_spec(config, vp_stage)
    return _replaced(spec, _replacements(transformer))


def mtp_spec(config: Any, layer: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's spec of multi-token prediction for decoder layers, with the same parts replaced."""
    if has_variant(config.transformer):
        spec = mtp_layers_of(config.transformer, vp_stage)
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
        replacements[WrappedTorchNorm] = ZeroCenteredNorm
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
