"""Layers of OLMoE: a norm of all queries of a token together, and one of all its keys.

Megatron's --qk-layernorm normalizes each query and key alone. Its `--spec MODULE NAME` takes other layers:

    --qk-layernorm --spec megatron.fault_tolerance.program.projection_norm layer_spec
"""

from functools import partial
from typing import Any

import torch

from megatron.fault_tolerance.program import model
from moe_ft.errors import ConfigError


class ProjectionNorm(torch.nn.RMSNorm):
    """RMSNorm over the last two dimensions: heads, and the numbers of each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [sequence, batch, heads, size] normalized over all heads of a token."""
        return super().forward(x.flatten(-2)).view(x.shape)


def build_norm(num_heads: int, config: Any, hidden_size: int, eps: float) -> ProjectionNorm:
    """Build the norm of queries or keys. Megatron calls it with these names of arguments.

    Raises:
        ConfigError: if ranks share the heads of a token.
    """
    if config.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"--tensor-model-parallel-size={config.tensor_model_parallel_size} must be 1 with --spec "
            f"{__name__} layer_spec: its norms are over all heads of a token, and a rank would have some."
        )
    return ProjectionNorm(num_heads * hidden_size, eps=eps)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's spec of a virtual stage with these norms in all layers."""
    spec = model.layer_spec(config, vp_stage)
    transformer = config.transformer
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = partial(build_norm, transformer.num_attention_heads)
        attention.k_layernorm = partial(build_norm, transformer.num_query_groups)
    return spec
