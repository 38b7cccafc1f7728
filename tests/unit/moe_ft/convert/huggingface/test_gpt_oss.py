"""gpt-oss and MiniMax-M2: the same logits in Megatron and back, and what Megatron cannot express."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MiniMaxM2Config

from moe_ft.convert.huggingface.config_file import FAMILIES
from moe_ft.convert.huggingface.gpt_oss import GptOss
from moe_ft.convert.huggingface.mapping import flags_of
from moe_ft.convert.huggingface.release import open_release
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    SMALL,
    check_round_trip,
    random_model,
    tensors_of,
)
from tests.unit.moe_ft.convert.huggingface.test_release import change_config, change_tensors

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500,
    "factor": 8.0,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
# Activations reach the limit; a window of 8 of 24 tokens.
GPT_OSS: dict[str, Any] = SMALL | {
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "sliding_window": 8,
    "swiglu_limit": 0.7,
    "rope_parameters": YARN,
}
MINIMAX: dict[str, Any] = SMALL | {
    "num_local_experts": 4,
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5},
}


def test_gpt_oss_has_the_same_logits_and_comes_back(tmp_path: Path) -> None:
    back = check_round_trip(GptOssConfig(**GPT_OSS), tmp_path)
    assert tensors_of(back)["model.layers.2.mlp.experts.gate_up_proj_bias"].shape == (4, 80)


def test_minimax_has_the_same_logits_and_comes_back(tmp_path: Path) -> None:
    back = check_round_trip(MiniMaxM2Config(**MINIMAX), tmp_path)
    assert "model.layers.1.block_sparse_moe.e_score_correction_bias" in tensors_of(back)


GPT, MINI = GptOssConfig(**GPT_OSS).to_dict(), MiniMaxM2Config(**MINIMAX).to_dict()


@pytest.mark.parametrize("config", [GPT, MINI], ids=lambda config: str(config["model_type"]))
def test_settings_give_a_config_that_gives_the_settings(config: dict[str, Any]) -> None:
    family = FAMILIES[config["model_type"]]
    settings = family.settings(config)
    family.check(settings)
    assert family.settings(family.config(settings)) == settings


@pytest.mark.parametrize(
    ("config", "flag", "value", "rule"),
    [
        (GPT, "--softmax-type", "vanilla", "must be learnable"),
        (GPT, "--add-bias-linear", False, "must be True"),
        (GPT, "--glu-linear-offset", 0.0, "must be 1.0"),
        (GPT, "--bias-gelu-fusion", True, "must be off"),
        (GPT, "--swiglu", True, "must be off"),
        (GPT, "--activation-func-clamp-value", None, "must be a number"),
        (GPT, "--window-size", None, "must be a number of earlier tokens"),
        (GPT, "--window-size", [7, 2], "must be a number of earlier tokens"),
        (GPT, "--mscale-all-dim", 1.0, "must be off"),
        (GPT, "--moe-router-pre-softmax", True, "must be off"),
        (GPT, "--moe-router-topk", 1, "weight"),
        (MINI, "--spec", None, "must be"),
        (MINI, "--qk-layernorm", False, "must be True"),
        (MINI, "--moe-router-score-function", "softmax", "must be sigmoid"),
        (MINI, "--moe-router-topk-scaling-factor", 2.5, "must be"),
        (MINI, "--moe-router-num-groups", 2, "must be off"),
        (MINI, "--moe-router-topk", 1, "weight"),
    ],
)
def test_feature_that_a_family_has_not_is_refused_by_flag(
    config: dict[str, Any], flag: str, value: Any, rule: str
) -> None:
    family = FAMILIES[config["model_type"]]
    with pytest.raises(ConfigError) as refusal:
        family.check({**family.settings(config), flag: value})
    assert rule in str(refusal.value)
    assert f"{flag}={value}" in str(refusal.value) or "num_experts_per_tok=1" in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (GPT, {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        (GPT, {"attention_bias": False}, "attention_bias=False"),
        (GPT, {"layer_types": ["full_attention"]}, "1 layer_types and num_hidden_layers=3"),
        (GPT, {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        (GPT, {"rope_parameters": YARN | {"rope_type": "llama3"}}, "rope_type=llama3"),
        (GPT, {"rope_parameters": YARN | {"attention_factor": 1.5}}, "attention_factor=1.5"),
        (MINI, {"scoring_func": "softmax"}, "scoring_func=softmax"),
        (MINI, {"qk_norm_type": "per_head"}, "qk_norm_type=per_head"),
        (MINI, {"shared_intermediate_size": 8}, "shared_intermediate_size=8"),
        (MINI, {"use_qk_norm": False}, "use_qk_norm=False"),
    ],
)
def test_config_that_megatron_cannot_express_is_refused_by_key(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        FAMILIES[config["model_type"]].settings({**config, **changes})


def test_fused_activation_is_accepted_where_the_bias_is_in_its_input() -> None:
    settings = GptOss().settings(GPT) | {"--bias-gelu-fusion": True, "--moe-grouped-gemm": True}
    GptOss().check({**settings, "--transformer-impl": "transformer_engine"})
    with pytest.raises(ConfigError, match="--bias-gelu-fusion=True must be off"):
        GptOss().check({**settings, "--transformer-impl": "local"})


def test_windows_in_other_layers_are_listed() -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    settings = GptOss().settings({**GPT, "layer_types": types})
    assert settings["--window-attn-skip-freq"] == [0, 1, 1]
    assert FAMILIES["gpt_oss"].config(settings)["layer_types"] == types
    words = flags_of(settings)
    assert words[words.index("--window-size") + 1] == "7,0"
    assert words[words.index("--window-attn-skip-freq") + 1] == "[0,1,1]"
    assert {"--no-bias-gelu-fusion", "--no-yarn-correction-range-round-to-int"} <= {*words}


def test_layers_of_further_tokens_of_minimax_are_left_out_loudly(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    random_model(MiniMaxM2Config(**MINIMAX)).save_pretrained(saved)
    further = {f"model.layers.{layer}.eh_proj.weight": torch.ones(2) for layer in (2, 3)}
    change_tensors(saved, lambda tensors: tensors.update(further))
    with pytest.raises(ConfigError, match="has an unknown tensor: model.layers.2.eh_proj.weight"):
        open_release(saved)
    change_config(saved, num_mtp_modules=2)
    (note,) = open_release(saved).notes
    assert note.startswith("NOT CONVERTED: 2 tensors of MiniMaxM2ForCausalLM are not converted, ")
    assert "called model.layers.2.* or model.layers.3.*" in note


def test_published_share_of_the_rotation_is_read() -> None:
    published = {**MINI, "rope_parameters": None, "rope_theta": 500, "rotary_dim": 4}
    assert FAMILIES["minimax_m2"].settings(published)["--rotary-percent"] == 4 / 12
