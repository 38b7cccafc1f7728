"""Sparse attention and gated delta nets in Megatron's local implementation, and in multi-token prediction.

With `--experimental-attention-variant dsa` a lightning indexer chooses the keys that each query sees, and
multi-latent attention sees these alone. With `gated_delta_net` some layers have such a net instead of
attention. Megatron computes both in torch, delta nets with `--deterministic-mode`, but builds them for
Transformer Engine alone, whose linear layers and norms it takes (0.19.2). With the layers here they run
without a GPU, and have the same names in checkpoints; a delta net also needs the package `fla`. Megatron also
refuses both with `--mtp-num-layers`: these layers get the attention of the decoder's last layer here, with
either implementation.
"""

import copy
import dataclasses
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

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
