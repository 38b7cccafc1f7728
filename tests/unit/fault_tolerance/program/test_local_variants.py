"""Layers with an indexer or a delta net. Numbers: test_sparse_attention.py and test_gated_delta.py."""

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
    AbsorbedMLASelfAttention,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.models.gpt import GPTModelConfig

from megatron.fault_tolerance.program.model import (
    WholeLinear,
    ZeroCenteredNorm,
    has_variant,
    layer_spec,
    layers_of,
    mtp_spec,
)
from moe_ft.errors import ConfigError


def config_of(**changes: Any) -> MLATransformerConfig:
    given: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 2,
        "moe_layer_freq": [0, 1],
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "transformer_impl": "local",
        "add_bias_linear": False,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 2,
        "dsa_indexer_head_dim": 64,
        "dsa_indexer_topk": 4,
    }
    return MLATransformerConfig(**{**given, **changes})


def test_every_layer_has_an_indexer_also_those_of_further_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", 1)
    config = GPTModelConfig(transformer=config_of(mtp_num_layers=1), vocab_size=8)
    spec = layer_spec(config)
    (further,) = mtp_spec(config, spec).layer_specs
    layers: list[Any] = [*spec.layer_specs, further.submodules.mtp_model_layer]
    dense, *others = layers
    assert dense.submodules.mlp.func != MoELayer
    assert [each.submodules.mlp.func for each in others] == [MoELayer] * 2
    for layer in layers:
        attention = layer.submodules.self_attention
        assert attention.module is AbsorbedMLASelfAttention
        indexer = attention.submodules.core_attention.submodules.indexer.submodules
        assert indexer.linear_wk is WholeLinear
    plain = GPTModelConfig(transformer=config_of(), vocab_size=8)
    assert mtp_spec(plain, layer_spec(plain)) is None
    assert not has_variant(config_of(experimental_attention_variant=None))


def test_some_layers_have_a_delta_net_and_all_norms_weights_around_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    config = TransformerConfig(
        num_layers=3,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=2,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        transformer_impl="local",
        add_bias_linear=False,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[1, 0, 1],
    )
    spec = layer_spec(GPTModelConfig(transformer=config, vocab_size=8))
    modules = [layer.submodules.self_attention.module for layer in spec.layer_specs]
    assert modules == [GatedDeltaNet, SelfAttention, GatedDeltaNet]
    names = [layer.submodules.sharded_state_dict_keys_map for layer in spec.layer_specs]
    parts = [each["input_layernorm."].rpartition(".")[0] for each in names]
    assert parts == [f"self_attention.{each}" for each in ("in_proj", "linear_qkv", "in_proj")]
    assert spec.layer_norm is ZeroCenteredNorm
    norm = ZeroCenteredNorm(config, 4)
    x = torch.rand(3, 4)
    with torch.no_grad():
        assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (4,), eps=1e-5))
        norm.weight.copy_(torch.tensor([1.0, 0.0, -1.0, 2.0]))
        scales = norm(x) / torch.nn.functional.rms_norm(x, (4,), eps=1e-5)
    assert torch.allclose(scales, torch.tensor([2.0, 1.0, 0.0, 3.0]))
    config.normalization = "LayerNorm"
    with pytest.raises(ConfigError, match="--normalization=LayerNorm must be RMSNorm"):
        ZeroCenteredNorm(config, 4)


@pytest.mark.parametrize("flag", ["tensor_model_parallel_size", "context_parallel_size"])
def test_attention_on_several_ranks_is_refused(flag: str) -> None:
    config = config_of()
    setattr(config, flag, 2)
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}=2 must be 1 with"):
        layers_of(config, None)


def test_linear_layer_starts_as_megatrons() -> None:
    config = config_of(params_dtype=torch.bfloat16)
    layer = WholeLinear(
        3, 5, config=config, init_method=torch.nn.init.ones_, parallel_mode="duplicated"
    )
    output, bias = layer(torch.ones(2, 3, dtype=torch.bfloat16))
    assert (output.tolist(), bias) == ([[3.0] * 5] * 2, None)
