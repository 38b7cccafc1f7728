"""The list of families, and models on the hub that they have."""

from math import prod
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_ft.convert.huggingface.families.registry import FAMILIES

COMMON: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "rope_scaling": None}
# Parts of `config.json` on the hub, and the number of parameters that the index there gives.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "mistralai/Mixtral-8x7B-v0.1": (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {
            "model_type": "qwen2_moe",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151936,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
        },
        14_315_784_192,
    ),
    "Qwen/Qwen3-30B-A3B": (
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        30_532_122_624,
    ),
    "allenai/OLMoE-1B-7B-0924": (
        {
            "model_type": "olmoe",
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "vocab_size": 50304,
        },
        6_919_161_856,
    ),
}


def test_families_have_the_names_of_transformers() -> None:
    for model_type, family in FAMILIES.items():
        assert AutoConfig.for_model(model_type).model_type == family.model_type
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == family.architecture


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_as_many_parameters_in_megatron(name: str) -> None:
    config, num_parameters = PUBLISHED[name]
    family = FAMILIES[config["model_type"]]
    settings = family.settings(COMMON | config)
    family.check(settings)
    assert sum(prod(each.shape) for each in family.tensors(settings)) == num_parameters
