"""Multi-latent attention: what only one side has; rotary embeddings have the same factors, or are refused.

Names and angles are checked with whole models, in test_families.py.
"""

from typing import Any

import pytest
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor,
    _yarn_get_mscale,
)
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

from moe_ft.convert.huggingface.deepseek import (
    attention_config,
    attention_settings,
    latent_attention,
    rope_config,
    rope_settings,
)
from moe_ft.convert.huggingface.shared_experts import SPEC
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.models import (
    PUBLISHED_V2_LITE,
    PUBLISHED_V3,
    V3,
)

FAMILY = "deepseek_v3"


def test_norms_have_other_names_with_transformer_engine() -> None:
    others = [
        other
        for mapped in latent_attention(V3, "attention", "self_attn")
        for other in mapped.other_tensors
    ]
    assert others == [
        "attention.linear_q_up_proj.layer_norm_weight",
        "attention.linear_kv_up_proj.layer_norm_weight",
    ]


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


LENGTH = 163840
PLAIN: dict[str, Any] = {
    "--rope-type": "rope",
    "--rotary-base": 10000,
    "--rotary-scaling-factor": 1.0,
    "--mscale": 1.0,
    "--mscale-all-dim": 0.0,
}
YARN = {**PLAIN, "--rope-type": "yarn", "--rotary-scaling-factor": 40.0, "--mscale-all-dim": 1.0}


def scaled(**changes: Any) -> dict[str, Any]:
    """Return the published keys with changes of the scaling."""
    scaling = {**PUBLISHED_V3["rope_scaling"], **changes}
    return {
        "rope_theta": 10000,
        "rope_scaling": {key: val for key, val in scaling.items() if val != ""},
    }


# Ways to write the scaling that Megatron can express.
KNOWN = {
    "published": scaled(),
    "V2": scaled(mscale=0.707, mscale_all_dim=0.707),
    "different": scaled(mscale=1.5, mscale_all_dim=0.5),
    "neither": scaled(mscale="", mscale_all_dim=""),
    "none for all": scaled(mscale_all_dim=0),
    "none for all, ignored": scaled(mscale=0.5, mscale_all_dim=""),
    "other name": scaled(type="", rope_type="yarn"),
    "without betas": scaled(beta_fast="", beta_slow=""),
    "no growth": scaled(factor=1.0),
    "Kimi-K2": scaled(beta_fast=1.0, beta_slow=1.0, factor=32.0),
    "length of all": scaled(original_max_position_embeddings=""),
    "one dictionary": {"rope_parameters": {**scaled()["rope_scaling"], "rope_theta": 500000.0}},
    "plain": {"rope_theta": 10000},
    "plain, one dictionary": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("is_written_again", [False, True])
def test_megatron_has_the_factors_of_transformers(name: str, is_written_again: bool) -> None:
    config = {"max_position_embeddings": LENGTH, **KNOWN[name]}
    settings = rope_settings(config, FAMILY)
    if is_written_again:
        config = {"max_position_embeddings": LENGTH, **rope_config(settings, FAMILY)}
        assert rope_settings(config, FAMILY) == settings
    theirs = DeepseekV3Config(**config)
    kind = theirs.rope_parameters["rope_type"]
    _, rotation = ROPE_INIT_FUNCTIONS[kind](theirs) if kind != "default" else (None, 1.0)
    softmax = yarn_apply_mscale(theirs.rope_parameters, 1.0)
    factor, of_all = settings["--rotary-scaling-factor"], settings["--mscale-all-dim"]
    assert _yarn_get_mscale(factor, of_all) ** 2 == pytest.approx(softmax, rel=1e-12)
    if settings["--rope-type"] == "yarn":
        ours = _yarn_get_concentration_factor(factor, settings["--mscale"], of_all)
        assert ours == pytest.approx(rotation, rel=1e-12)
    else:
        assert rotation == 1
    assert settings["--rotary-base"] == theirs.rope_parameters["rope_theta"]
    assert settings["--max-position-embeddings"] == LENGTH


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"--mscale": 0.5, "--mscale-all-dim": 0.0}, "--mscale=0.5 and --mscale-all-dim=0.0 must"),
        ({"--mscale": 0.0}, "--mscale=0.0 and --mscale-all-dim=1.0 must"),
        ({"--rope-type": "rope"}, "--mscale-all-dim must be 0 with --rope-type=rope"),
    ],
)
def test_settings_of_another_rotation_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        rope_config({**YARN, **changes}, FAMILY)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (scaled(mscale=""), "mscale=None, mscale_all_dim=1.0, attention_factor=None"),
        (scaled(attention_factor=1.2), "mscale=1.0, mscale_all_dim=1.0, attention_factor=1.2"),
        (scaled(truncate=False), "truncate=False"),
        (scaled(type="linear"), "rope_type=linear"),
        ({"rope_theta": 10000.5}, "rope_theta=10000.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ],
)
def test_config_of_another_rotation_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {text}"):
        rope_settings({"max_position_embeddings": LENGTH, **config}, FAMILY)


def test_values_of_yarn_that_megatron_ignores_are_for_layers_of_ours() -> None:
    config = {"max_position_embeddings": LENGTH, **KNOWN["Kimi-K2"]}
    settings = rope_settings(config, FAMILY)
    assert (settings["--yarn-beta-fast"], settings["--spec"]) == (1.0, SPEC)
    assert rope_config(settings, FAMILY)["rope_scaling"]["beta_fast"] == 1.0
    others = {**settings, "--spec": None}
    assert rope_config(others, FAMILY)["rope_scaling"]["beta_fast"] == 32
    with pytest.raises(ConfigError, match=r"beta_fast=1\.0, and of a model"):
        rope_settings(config, FAMILY, has_own_layers=False)


def test_megatrons_default_is_yarn() -> None:
    settings = {**PLAIN, "--rope-type": None}
    scaling = rope_config(settings, FAMILY)["rope_scaling"]
    assert (scaling["type"], scaling["factor"]) == ("yarn", 1.0)
