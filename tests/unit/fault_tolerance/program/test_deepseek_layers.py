"""Layers of DeepSeek's models. That the numbers are those of transformers is test_families.py."""

import argparse
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training import global_vars
from megatron.training.models.gpt import GPTModelConfig

from megatron.fault_tolerance.program.deepseek_layers import (
    BestOfGroups,
    BestOfGroupsRouter,
    layer_spec,
)
from megatron.fault_tolerance.program.local_attention import LocalLatentAttention
from moe_ft.errors import ConfigError


def config_of(**changes: Any) -> MLATransformerConfig:
    given: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_moe_experts": 6,
        "moe_layer_freq": [0, 1],
        "moe_router_topk": 3,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
        "moe_router_pre_softmax": True,
        "qk_layernorm": True,
        "transformer_impl": "local",
        "add_bias_linear": False,
    }
    return MLATransformerConfig(**{**given, **changes})


def routers(config: MLATransformerConfig, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the router of each layer's spec, None for a dense one."""
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    spec = layer_spec(GPTModelConfig(transformer=config, vocab_size=8))
    modules = {layer.submodules.self_attention.module for layer in spec.layer_specs}
    assert modules == {LocalLatentAttention}
    found = [getattr(layer.submodules.mlp, "keywords", {}) for layer in spec.layer_specs]
    return [getattr(each.get("submodules"), "router", None) for each in found]


def test_group_has_the_score_of_its_best_expert() -> None:
    # The second group has the highest sum, the first and the last the highest scores.
    scores = torch.tensor([[0.30, 0.01, 0.25, 0.24, 0.02, 0.28]])
    calls: list[torch.Tensor] = []

    def compute(left: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(left)
        best = left.topk(topk)
        return best.values, best.indices

    found, experts = BestOfGroups().get_replay_topk(scores, 3, 3, 2, compute)
    assert experts.tolist() == [[0, 5, 4]]
    assert torch.equal(found, scores[:, [0, 5, 4]])
    assert calls[0].isinf().tolist() == [[False, False, True, True, False, False]]


@pytest.mark.parametrize(
    ("changes", "router"),
    [
        ({}, BestOfGroupsRouter),
        ({"moe_router_group_topk": None}, TopKRouter),
        ({"moe_router_score_function": "sigmoid"}, TopKRouter),
    ],
    ids=str,
)
def test_groups_of_softmax_scores_have_another_router(
    changes: dict[str, Any], router: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert routers(config_of(**changes), monkeypatch) == [None, router]


@pytest.mark.parametrize("flag", ["moe_router_fusion", "moe_enable_routing_replay"])
def test_other_choices_are_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TopKRouter, "__init__", lambda *_, **__: None)
    config = config_of()
    setattr(config, flag, True)
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} must be off with --spec"):
        BestOfGroupsRouter(config)


def test_values_of_yarn_on_the_command_line_are_those_of_the_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = argparse.Namespace(yarn_beta_fast=1.0, yarn_beta_slow=None)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", given)
    config = config_of()
    routers(config, monkeypatch)
    assert (config.beta_fast, config.beta_slow) == (1.0, 1)
    assert config.original_max_position_embeddings == 4096
