"""Configurations as published: those that can be converted, and what the others are told.

Sizes are in tests/unit/moe_ft/commands/published_models.toml, with which `plan` is tested; here is what a
conversion reads besides. It needs no weights: those of each family are in test_families.py and others.
"""

from math import prod
from typing import Any

import pytest

from moe_ft.convert.huggingface.config_file import FAMILIES, check_values, find_family
from moe_ft.convert.huggingface.mapping import with_values
from moe_ft.convert.huggingface.quantized import reader_of
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.commands.published_models import read_published

PUBLISHED = read_published()
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "beta_slow": 1}
YARN["original_max_position_embeddings"] = 4096
ROUTER = {"norm_topk_prob": True, "attention_bias": False}
GLM = ROUTER | {"index_topk": 2048, "indexer_rope_interleave": True, "rope_interleave": True}
DEEPSEEK = ROUTER | {"rope_scaling": YARN | {"beta_fast": 32, "factor": 40}}
KIMI = YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}
GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# By model_type.
BESIDE: dict[str, dict[str, Any]] = {
    "minimax_m2": {"qk_norm_type": "per_layer", "rotary_dim": 64},
    "qwen3_moe": {"rope_scaling": None, "use_sliding_window": False},
    "mixtral": {"sliding_window": None},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK | {"index_topk": 2048},
    "kimi_k2": ROUTER | {"rope_scaling": KIMI, "seq_aux": True, "aux_loss_alpha": 0.001},
    "gpt_oss": {"rope_scaling": GPT_OSS, "sliding_window": 128, "swiglu_limit": 7.0},
    "glm_moe_dsa": GLM | {"first_k_dense_replace": 3, "moe_layer_freq": 1},
}
# Of models whose text is a part of `config.json`.
OUTER = {"qwen3-vl": "qwen3_vl_moe", "qwen3-5": "qwen3_5_moe", "kimi-k2-5": "kimi_k25"}


def config_of(name: str) -> dict[str, Any]:
    """Return the content of config.json, as far as a conversion reads it."""
    config = dict(PUBLISHED[name].config)
    text = config.get("text_config")
    if text is not None:
        outer = next((OUTER[each] for each in OUTER if name.startswith(each)), name)
        config |= {
            "model_type": outer,
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
        }
        return config
    config |= BESIDE.get(config["model_type"], {})
    base = 8_000_000 if name.startswith("glm-5-2") else 1_000_000
    if name.startswith("glm"):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": base}
    if config.get("quantization_config", {}).get("quant_method") == "fp8":
        config["quantization_config"] = FP8
    return config


def settings_of(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the family and Megatron's settings of a published model; raises ConfigError if it has none."""
    text, family = find_family(name, config_of(name))
    reader_of(name, text)
    checked = check_values(name, text, None, family)
    return family, family.settings(with_values(checked, {"quantization_config": None}))


def accepted() -> list[str]:
    found = []
    for name in PUBLISHED:
        try:
            settings_of(name)
        except ConfigError:
            continue
        found.append(name)
    return found


ACCEPTED = accepted()


def test_at_least_twenty_of_the_published_models_are_converted() -> None:
    assert len(PUBLISHED) == 43
    kinds = {PUBLISHED[name].config.get("model_type", "text part") for name in ACCEPTED}
    assert {*BESIDE, "text part"} <= kinds
    assert len(ACCEPTED) >= 26


QUICK = ("gpt-oss-20b", "mixtral-8x7b-v0-1", "kimi-k2-instruct")
ONE_OF_EACH_SIZE = {PUBLISHED[name].counted: name for name in ACCEPTED if PUBLISHED[name].counted}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in QUICK else pytest.mark.rest)
        for each in ONE_OF_EACH_SIZE.values()
    ],
)
def test_model_has_as_many_parameters_in_megatron_as_in_transformers(name: str) -> None:
    family, settings = settings_of(name)
    if family.text_key:
        return  # transformers also has the part that sees
    tensors = [each for each in family.tensors(settings) if not each.tensor.startswith("mtp.")]
    parameters = [each for each in tensors if not each.tensor.endswith(".expert_bias")]
    assert sum(prod(each.shape) for each in parameters) == PUBLISHED[name].counted


@pytest.mark.parametrize("name", sorted({*PUBLISHED} - {*ACCEPTED}))
def test_other_models_are_told_which_family_is_nearest(name: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        settings_of(name)
    nearest = str(refusal.value).partition("The nearest is ")[2].partition(";")[0]
    assert nearest in FAMILIES
    expected = {
        "minimax-m3": "minimax_m2",
        "kimi-k2-5": "deepseek_v3",
        "mimo-v2-flash": "minimax_m2",
    }
    assert nearest == expected.get(name, nearest)


def test_refusal_names_what_differs_and_what_is_not_read() -> None:
    with pytest.raises(ConfigError) as refusal:
        settings_of("minimax-m3")
    text = str(refusal.value)
    assert "what differs: shared_intermediate_size=3072, hidden_act='swigluoai'; keys that" in text
    assert "does not read: attention_output_gate, dense_intermediate_size, moe_intermediate" in text
