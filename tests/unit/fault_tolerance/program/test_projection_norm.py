"""Norms over all heads of a token. That they are those of OLMoE is test_families.py of its conversion."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelConfig

from megatron.fault_tolerance.program.projection_norm import build_norm, layer_spec
from moe_ft.errors import ConfigError


def config_of(tp: int = 1) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        num_moe_experts=2,
        qk_layernorm=True,
        normalization="RMSNorm",
        transformer_impl="local",
        tensor_model_parallel_size=tp,
        add_bias_linear=False,
    )


def test_all_heads_of_a_token_are_one_vector() -> None:
    norm = build_norm(3, config_of(), hidden_size=2, eps=1e-6)
    x = torch.rand(5, 2, 3, 2)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(6))
        found = norm(x)
    vector = x[4, 1].flatten()
    expected = vector * (vector.square().mean() + 1e-6).rsqrt() * norm.weight
    assert torch.allclose(found[4, 1].flatten(), expected)


def test_every_layer_has_a_norm_of_its_queries_and_one_of_its_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    spec = layer_spec(GPTModelConfig(transformer=config_of(), vocab_size=8))
    assert len(spec.layer_specs) == 2
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        sizes = [
            build(config=config_of(), hidden_size=2, eps=1e-6).weight.numel()
            for build in (attention.q_layernorm, attention.k_layernorm)
        ]
        assert sizes == [8, 4]


def test_heads_on_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size=2 must be 1 with --spec"):
        build_norm(4, config_of(tp=2), hidden_size=2, eps=1e-6)
