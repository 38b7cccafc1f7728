"""Multi-latent attention: names and shapes of its tensors, and settings that only one side has."""

from typing import Any

import pytest

from moe_ft.convert.huggingface.families.mla import (
    SPEC,
    attention,
    attention_config,
    attention_settings,
)
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.families.models import (
    PUBLISHED_V2_LITE,
    PUBLISHED_V3,
    V3,
)

FAMILY = "deepseek_v3"


def shapes(settings: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor on the hub."""
    found = {}
    for mapped in attention(settings, "decoder.layers.0.self_attention", "self_attn"):
        (name,) = mapped.names
        found[name.removeprefix("self_attn.").removesuffix(".weight")] = mapped.shape
    return found


def test_compressed_queries_have_two_projections_and_a_norm() -> None:
    assert shapes(V3) == {
        "q_a_proj": (12, 32),
        "q_a_layernorm": (12,),
        "q_b_proj": (4 * (8 + 4), 12),
        "kv_a_proj_with_mqa": (16 + 4, 32),
        "kv_a_layernorm": (16,),
        "kv_b_proj": (4 * (8 + 6), 16),
        "o_proj": (32, 4 * 6),
    }


def test_queries_that_are_not_compressed_have_one_projection() -> None:
    found = shapes({**V3, "--q-lora-rank": None})
    assert found["q_proj"] == (4 * (8 + 4), 32)
    assert not [name for name in found if name.startswith("q_") and name != "q_proj"]


def test_norms_have_other_names_with_transformer_engine() -> None:
    others = [
        other
        for mapped in attention(V3, "attention", "self_attn")
        for other in mapped.other_tensors
    ]
    assert others == [
        "attention.linear_q_up_proj.layer_norm_weight",
        "attention.linear_kv_up_proj.layer_norm_weight",
    ]


@pytest.mark.parametrize("published", [PUBLISHED_V3, PUBLISHED_V2_LITE], ids=["V3", "V2-Lite"])
def test_published_sizes_are_the_same_after_both_directions(published: dict[str, Any]) -> None:
    settings = attention_settings(published, FAMILY)
    written = attention_config(settings, FAMILY)
    assert written == {key: published[key] for key in written}
    assert settings["--qk-head-dim"] == 128
    assert settings["--qk-pos-emb-head-dim"] == 64


def test_input_of_queries_is_left_alone_by_layers_of_ours_and_by_local_ones() -> None:
    lite = attention_settings(PUBLISHED_V2_LITE, FAMILY)
    assert lite["--spec"] == SPEC
    attention_config({**lite, "--transformer-impl": "transformer_engine"}, FAMILY)
    further = attention_settings({**PUBLISHED_V2_LITE, "num_nextn_predict_layers": 1}, FAMILY)
    assert further["--transformer-impl"] == "local"
    attention_config({**further, "--mtp-num-layers": 1}, FAMILY)
    assert not {"--spec", "--transformer-impl"} & set(attention_settings(PUBLISHED_V3, FAMILY))


@pytest.mark.parametrize(
    "changes",
    [{"--spec": None}, {"--mtp-num-layers": 1}, {"--mla-down-proj-fusion": True}],
    ids=str,
)
def test_input_of_queries_that_is_normalized_again_is_refused(changes: dict[str, Any]) -> None:
    lite = attention_settings(PUBLISHED_V2_LITE, FAMILY)
    settings = {**lite, "--transformer-impl": "transformer_engine", **changes}
    with pytest.raises(
        ConfigError, match="--q-lora-rank=None must be a number with --transformer-"
    ):
        attention_config(settings, FAMILY)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--multi-latent-attention", False),
        ("--qk-layernorm", False),
        ("--experimental-attention-variant", "dsa"),
    ],
)
def test_other_attention_is_refused(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{flag}={value} must be"):
        attention_config({**V3, flag: value}, FAMILY)


def test_other_epsilon_is_refused() -> None:
    with pytest.raises(ConfigError, match="--norm-epsilon=1e-05 must be 1e-06"):
        attention_config({**V3, "--layernorm-epsilon": 1e-5}, FAMILY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 8),
        ("rms_norm_eps", 1e-5),
        ("rope_interleave", False),
    ],
)
def test_config_of_other_attention_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}={value}"):
        attention_settings({**PUBLISHED_V3, key: value}, FAMILY)
