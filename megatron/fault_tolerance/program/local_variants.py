"""DeepSeek Sparse Attention in Megatron's local implementation, and in layers that predict further tokens.

With `--experimental-attention-variant dsa` a lightning indexer chooses the keys that each query sees, and
multi-latent attention sees these alone. Megatron computes that in torch, but builds it for Transformer Engine
alone, whose linear layers it takes (0.19.2). With the linear layers here it runs without a GPU, and has the
same names in checkpoints. Megatron also refuses such attention with `--mtp-num-layers`: these layers get the
attention of the decoder's last layer here, with either implementation.
"""

import copy
import dataclasses
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from megatron.fault_tolerance.seams.versions import later
from moe_ft.errors import ConfigError

_specs = later("megatron.core.models.gpt.experimental_attention_variant_module_specs")


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


def is_sparse(config: Any) -> bool:
    """Return whether a model has sparse attention."""
    return getattr(config, "experimental_attention_variant", None) == "dsa"


def layers_of(config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's spec of a virtual stage with sparse attention and local layers.

    Raises:
        ConfigError: if ranks would share an attention.
    """
    for flag in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(config, flag) > 1:
            raise ConfigError(
                f"--{flag.replace('_', '-')}={getattr(config, flag)} must be 1 with "
                "--experimental-attention-variant dsa and --transformer-impl local, which has no layers for "
                "parts of such attention. Use --transformer-impl transformer_engine."
            )
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(
        _without_variant(config), False, config.normalization, vp_stage=vp_stage
    )
    return dataclasses.replace(
        spec, layer_specs=[_with_attention(config, layer) for layer in spec.layer_specs]
    )


def mtp_layers_of(config: Any, vp_stage: int | None) -> Any:
    """Return Megatron's spec of layers that predict further tokens; None if a virtual stage has none."""
    if config.mtp_num_layers is None:
        return None
    uses_engine = config.transformer_impl == "transformer_engine"
    if uses_engine:
        layer = _specs.get_transformer_layer_with_experimental_attention_variant_spec(config)[-1]
    else:
        plain = gpt_layer_specs.get_gpt_decoder_layer_specs(
            _without_variant(config), False, config.normalization
        )
        layer = _with_attention(config, plain[-1])
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, uses_engine, vp_stage=vp_stage)


def _without_variant(config: Any) -> Any:
    plain = copy.copy(config)
    plain.experimental_attention_variant = None
    return plain


def _with_attention(config: Any, layer: Any) -> Any:
    attention = _specs.get_dsa_module_spec_for_backend(config, _LocalLayers())
    indexer = attention.submodules.core_attention.submodules.indexer
    for name in ("linear_wq_b", "linear_wk", "linear_weights_proj"):
        setattr(indexer.submodules, name, WholeLinear)
    parts = dataclasses.replace(layer.submodules, self_attention=attention)
    return dataclasses.replace(layer, submodules=parts)
