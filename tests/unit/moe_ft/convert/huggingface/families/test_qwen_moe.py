"""Qwen2-MoE and Qwen3-MoE: settings in both directions. That the numbers are the same is test_families.py."""

from typing import Any

import pytest
from transformers import Qwen2MoeConfig, Qwen3MoeConfig

from moe_ft.convert.huggingface.families.registry import FAMILIES
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL

LAYERS = SMALL | {"num_hidden_layers": 4, "num_experts": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_moe": Qwen2MoeConfig(**LAYERS, mlp_only_layers=[1]).to_dict(),
    "qwen3_moe": Qwen3MoeConfig(**LAYERS, decoder_sparse_step=2, mlp_only_layers=[3]).to_dict(),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_give_a_config_that_gives_the_settings(name: str) -> None:
    family, config = FAMILIES[name], CONFIGS[name]
    settings = family.settings(config)
    family.check(settings)
    assert family.settings(family.config(settings)) == settings


def test_dense_layers_are_those_that_are_named_and_all_between_steps() -> None:
    found = {name: FAMILIES[name].settings(config) for name, config in CONFIGS.items()}
    assert found["qwen2_moe"]["--moe-layer-freq"] == [1, 0, 1, 1]
    assert found["qwen3_moe"]["--moe-layer-freq"] == [0, 1, 0, 0]


@pytest.mark.parametrize("is_normalized", [True, False])
def test_weights_of_chosen_experts_decide_where_the_softmax_is(is_normalized: bool) -> None:
    config = CONFIGS["qwen3_moe"] | {"norm_topk_prob": is_normalized}
    settings = FAMILIES["qwen3_moe"].settings(config)
    assert settings["--moe-router-pre-softmax"] is not is_normalized


def test_window_that_is_not_used_is_no_obstacle() -> None:
    family, config = FAMILIES["qwen3_moe"], CONFIGS["qwen3_moe"] | {"sliding_window": 4096}
    family.settings(config)
    with pytest.raises(ConfigError, match=r"config.json has use_sliding_window=True"):
        family.settings(config | {"use_sliding_window": True})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "qwen2_moe",
            {"--moe-shared-expert-gate": False},
            "--moe-shared-expert-gate=False must be True",
        ),
        ("qwen2_moe", {"--moe-shared-expert-intermediate-size": None}, "=None must be a number"),
        (
            "qwen2_moe",
            {"--qk-layernorm": True},
            "--qk-layernorm=True must be off for a model of qwen2",
        ),
        (
            "qwen3_moe",
            {"--qk-layernorm": False},
            "--qk-layernorm=False must be True for a model of qwen3",
        ),
        ("qwen3_moe", {"--add-qkv-bias": True}, "--add-qkv-bias=True must be off"),
    ],
)
def test_feature_that_it_has_not_is_refused(
    name: str, changes: dict[str, Any], message: str
) -> None:
    settings = FAMILIES[name].settings(CONFIGS[name])
    with pytest.raises(ConfigError, match=message):
        FAMILIES[name].check({**settings, **changes})
