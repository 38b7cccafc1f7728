"""Models of transformers give the same logits in Megatron, also of further tokens, and come back exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3PreTrainedModel

from moe_ft.errors import ConfigError
from tests.megatron_logits import megatron_logits
from tests.unit.moe_ft.convert.huggingface.further_tokens import (
    check_further_tokens,
    save_with_further_layers,
)
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    NUM_TOKENS,
    SMALL,
    TOLERANCE,
    check_is_equal,
    check_round_trip,
    converted,
    difference,
    loaded,
    random_model,
    tensors_of,
)
from tests.unit.moe_ft.convert.huggingface.test_release import change_config

QWEN = SMALL | {"num_experts": 4, "moe_intermediate_size": 24}
QWEN2 = QWEN | {"shared_expert_intermediate_size": 20}
OLMOE = {key: value for key, value in SMALL.items() if key != "head_dim"}
MIXTRAL = MixtralConfig(**SMALL, num_local_experts=4)
NUM_LAYERS = 3
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.5,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 163840,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500},
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
# The best three experts may be in three groups, of which two are chosen. Megatron scores a group by its best
# expert then, and with four experts by its best two.
V2 = DEEPSEEK | {"topk_method": "group_limited_greedy", "num_experts_per_tok": 3}
LITE = V2 | ONE_GROUP | {"topk_method": "greedy", "q_lora_rank": None, "rope_parameters": YARN}
V3 = DEEPSEEK | {"num_nextn_predict_layers": 0}
# Each with the name of a tensor in its second layer.
CASES: dict[str, tuple[PreTrainedConfig, str]] = {
    "mixtral": (MIXTRAL, "block_sparse_moe.experts.3.w1"),
    "qwen2_moe": (Qwen2MoeConfig(**QWEN2, mlp_only_layers=[0]), "mlp.shared_expert_gate"),
    "qwen3_moe": (
        Qwen3MoeConfig(**QWEN, norm_topk_prob=True, decoder_sparse_step=2),
        "self_attn.q_norm",
    ),
    "V2 with groups": (
        DeepseekV2Config(**V2 | {"num_experts_per_tok": 4}),
        "mlp.experts.7.up_proj",
    ),
    "V2 without compressed queries, YaRN": (DeepseekV2Config(**LITE), "self_attn.q_proj"),
    "V3 with groups": (DeepseekV3Config(**V3), "self_attn.q_a_proj"),
}
OTHERS: dict[str, PreTrainedConfig] = {
    "olmoe": OlmoeConfig(**OLMOE, num_experts=4),
    "mixtral, tied": MixtralConfig(**SMALL, num_local_experts=3, tie_word_embeddings=True),
    "qwen2_moe without biases": Qwen2MoeConfig(**QWEN2, qkv_bias=False, norm_topk_prob=True),
    "qwen3_moe without groups": Qwen3MoeConfig(**(QWEN | {"num_key_value_heads": 4})),
    "V2 with groups of Megatron": DeepseekV2Config(**V2),
    "V2, all layers with experts, YaRN": DeepseekV2Config(
        **V2 | {"first_k_dense_replace": 0, "rope_parameters": YARN}
    ),
    "V3 without groups, one expert": DeepseekV3Config(
        **V3 | ONE_GROUP | {"num_experts_per_tok": 1, "norm_topk_prob": False}
    ),
    "V3 without compressed queries, tied": DeepseekV3Config(
        **V3 | {"q_lora_rank": None, "tie_word_embeddings": True}
    ),
    "V3, YaRN without factors": DeepseekV3Config(
        **V3 | {"rope_parameters": YARN | {"mscale": None, "mscale_all_dim": 0.0}}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_megatron_gives_the_same_logits_and_the_model_comes_back(name: str, tmp_path: Path) -> None:
    config, tensor = CASES[name]
    back = check_round_trip(config, tmp_path)
    assert f"model.layers.1.{tensor}.weight" in tensors_of(back)
    assert len(list(back.glob("*.safetensors"))) > 1


@pytest.mark.rest
def test_kimi_k2_has_the_same_logits_and_comes_back_by_its_name(tmp_path: Path) -> None:
    rope = YARN | {"beta_fast": 1, "original_max_position_embeddings": 2048}
    model = random_model(DeepseekV3Config(**V3 | {"rope_parameters": rope}))
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    change_config(saved, model_type="kimi_k2")
    checkpoint, printed = converted(saved, "torch_dist")
    tokens = torch.arange(2 * NUM_TOKENS).view(2, -1) * 7 % 101
    logits = megatron_logits(printed.splitlines()[-1], checkpoint, tokens, tmp_path / "run")
    with torch.no_grad():
        assert difference(logits[..., :101], model(tokens).logits) < TOLERANCE
    back, _ = converted(checkpoint, "hf", family="kimi_k2")
    check_is_equal(back, saved)
    config = json.loads((back / "config.json").read_text())
    assert (config["model_type"], config["rope_scaling"]["beta_fast"]) == ("kimi_k2", 1)


@pytest.mark.rest
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_of_the_families(name: str, tmp_path: Path) -> None:
    check_round_trip(OTHERS[name], tmp_path)


def test_numbers_of_two_bytes_come_back(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    random_model(MIXTRAL).to(torch.bfloat16).save_pretrained(saved)
    checkpoint, _ = converted(saved, "torch_dist")
    back, printed = converted(checkpoint, "hf")
    assert f" {len(tensors_of(back))} tensors, " in printed
    assert {each.dtype for each in tensors_of(back).values()} == {torch.bfloat16}
    check_is_equal(back, saved)


def further(num: int) -> DeepseekV3Config:
    return DeepseekV3Config(**V3 | {"num_nextn_predict_layers": num, "rope_parameters": YARN})


@pytest.mark.parametrize("num", [1, pytest.param(2, marks=pytest.mark.rest)])
def test_layers_of_further_tokens_give_the_same_logits_and_come_back(
    num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_further_tokens(further(num), DeepseekV3PreTrainedModel, tmp_path, monkeypatch)


def test_copy_that_differs_is_refused_and_one_that_is_absent_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = further(1)
    saved = save_with_further_layers(config, DeepseekV3PreTrainedModel, tmp_path, monkeypatch)
    tensors, name = tensors_of(saved), f"model.layers.{NUM_LAYERS}.shared_head.head.weight"
    path, metadata = saved / "model.safetensors", {"format": "pt"}
    save_file({**tensors, name: tensors[name] + 1}, path, metadata=metadata)
    with pytest.raises(ConfigError, match=f"{name} and lm_head.weight must be equal"):
        converted(saved, "torch_dist")
    absent = {each: tensor for each, tensor in tensors.items() if each != name}
    save_file(absent, path, metadata=metadata)
    checkpoint, _ = converted(saved, "torch_dist")
    back, _ = converted(checkpoint, "hf")
    assert torch.equal(tensors_of(back)[name], tensors["lm_head.weight"])


def test_bias_of_the_choice_stays_in_fp32(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    random_model(CASES["V3 with groups"][0]).save_pretrained(saved)
    checkpoint, _ = converted(saved, "torch_dist", dtype="bf16")
    back, _ = converted(checkpoint, "hf")
    ours, theirs = tensors_of(back), tensors_of(saved)
    biases = {name for name in theirs if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor if name in biases else tensor.bfloat16())
    assert loaded(back).dtype is torch.bfloat16
