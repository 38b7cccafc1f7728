"""Settings and `config.json` of all families, in both directions, and what either side refuses.

That the numbers are the same is test_families.py.
"""

from math import prod
from typing import Any

import pytest
from transformers import AutoConfig, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as PICTURES,
)

from moe_ft.convert.huggingface import decoder
from moe_ft.convert.huggingface.config_file import FAMILIES
from moe_ft.convert.huggingface.query_groups import SPEC as OLMOE_SPEC
from moe_ft.convert.huggingface.shared_experts import SPEC as DEEPSEEK_SPEC
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.models import (
    PUBLISHED_V2,
    PUBLISHED_V2_LITE,
    PUBLISHED_V3,
    V2,
    V3,
)
from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL

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
    "deepseek-ai/DeepSeek-V2": (PUBLISHED_V2, 235_741_434_880),
    "deepseek-ai/DeepSeek-V2-Lite": (PUBLISHED_V2_LITE, 15_706_484_224),
    "deepseek-ai/DeepSeek-V3": (PUBLISHED_V3, 671_026_419_200),  # without further tokens
}
LAYERS = SMALL | {"num_hidden_layers": 4, "num_experts": 4}
OLMOE = {key: value for key, value in SMALL.items() if key != "head_dim"}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4).to_dict(),
    "qwen2_moe": Qwen2MoeConfig(**LAYERS, mlp_only_layers=[1]).to_dict(),
    "qwen3_moe": Qwen3MoeConfig(**LAYERS, decoder_sparse_step=2, mlp_only_layers=[3]).to_dict(),
    "olmoe": OlmoeConfig(**OLMOE, num_experts=4).to_dict(),
    "deepseek_v2": PUBLISHED_V2_LITE,
    "deepseek_v3": PUBLISHED_V3,
}
SETTINGS = {name: FAMILIES[name].settings(config) for name, config in CONFIGS.items()}
SETTINGS |= {"deepseek_v2": V2, "deepseek_v3": V3}


def test_families_have_the_names_of_transformers() -> None:
    for model_type, family in FAMILIES.items():
        if family.is_by_name:  # transformers has another name
            continue
        assert AutoConfig.for_model(model_type).model_type == family.model_type
        names = PICTURES if family.text_key else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        assert names[model_type] == family.architecture


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_as_many_parameters_in_megatron(name: str) -> None:
    config, num_parameters = PUBLISHED[name]
    family = FAMILIES[config["model_type"]]
    settings = family.settings(COMMON | config)
    family.check(settings)
    sizes = {"decoder": 0, "mtp": 0}
    for mapped in family.tensors(settings):
        part = "mtp" if mapped.tensor.startswith("mtp.") else "decoder"
        sizes[part] += prod(mapped.shape)
    assert sizes["decoder"] == num_parameters
    if name.endswith("V3"):  # with copies of embedding and head, as published
        assert f"{(sizes['mtp'] + 2 * 129280 * 7168) / 1e9:.0f}" == "13"


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_give_a_config_that_gives_the_settings(name: str) -> None:
    family = FAMILIES[name]
    settings = family.settings(CONFIGS[name])
    family.check(settings)
    assert family.settings(family.config(settings)) == settings


@pytest.mark.parametrize("published", [PUBLISHED_V2, PUBLISHED_V2_LITE, PUBLISHED_V3])
def test_published_config_is_the_same_after_both_directions(published: dict[str, Any]) -> None:
    family = FAMILIES[published["model_type"]]
    settings = family.settings(published)
    written = family.config(settings)
    unknown = {"bos_token_id": None, "eos_token_id": None}  # to Megatron
    assert written == {**{key: published[key] for key in written}, **unknown}
    left = {
        "architectures",
        "model_type",
        "torch_dtype",
        "initializer_range",
        "use_cache",
        "ep_size",
    }
    assert set(published) - set(written) <= left | {"num_nextn_predict_layers"}
    assert settings.get("--spec") == (None if published is PUBLISHED_V3 else DEEPSEEK_SPEC)


REFUSED: list[tuple[str, str, Any, str]] = [
    ("mixtral", "--num-experts", None, "must be a number"),
    ("mixtral", "--swiglu", False, "must be True for a model of mixtral"),
    ("mixtral", "--normalization", "LayerNorm", "must be RMSNorm"),
    ("mixtral", "--position-embedding-type", "none", "must be rope"),
    ("mixtral", "--add-bias-linear", True, "must be off"),
    ("mixtral", "--rotary-percent", 0.5, "must be 1.0"),
    ("mixtral", "--use-rope-scaling", True, "must be off"),
    ("mixtral", "--moe-expert-capacity-factor", 1.5, "must be off"),
    ("mixtral", "--moe-router-load-balancing-type", "sinkhorn", "must be another for a model"),
    ("mixtral", "--window-size", [8, 0], "must be off"),
    ("mixtral", "--softmax-type", "learnable", "must be vanilla"),
    ("mixtral", "--moe-router-score-function", "sigmoid", "must be"),
    ("mixtral", "--moe-router-topk-scaling-factor", 2.5, "must be"),
    ("mixtral", "--multi-latent-attention", True, "must be off"),
    ("mixtral", "--layernorm-zero-centered-gamma", True, "must be"),
    ("mixtral", "--moe-layer-freq", [0, 1], "must be 1 for a model of mixtral"),
    ("mixtral", "--moe-router-pre-softmax", True, "must be off"),
    ("mixtral", "--qk-layernorm", True, "must be off"),
    ("mixtral", "--moe-shared-expert-intermediate-size", 8, "must"),
    ("qwen2_moe", "--moe-shared-expert-gate", False, "must be True"),
    ("qwen2_moe", "--moe-shared-expert-intermediate-size", None, "must be a number"),
    ("qwen2_moe", "--qk-layernorm", True, "must be off for a model of qwen2"),
    ("qwen3_moe", "--qk-layernorm", False, "must be True for a model of qwen3"),
    ("qwen3_moe", "--add-qkv-bias", True, "must be off"),
    ("olmoe", "--spec", None, f"must be {OLMOE_SPEC} for a model of olmoe"),
    ("olmoe", "--qk-layernorm", False, "must be True"),
    ("olmoe", "--kv-channels", 12, "must be 8"),
    ("olmoe", "--moe-layer-freq", [1, 0], "must be 1"),
    ("deepseek_v2", "--moe-router-score-function", "sigmoid", "must be"),
    ("deepseek_v2", "--moe-router-pre-softmax", False, "must be"),
    ("deepseek_v2", "--moe-router-enable-expert-bias", True, "must be"),
    ("deepseek_v2", "--mtp-num-layers", 1, "must be"),
    ("deepseek_v2", "--moe-router-topk", 4, "must be"),
    ("deepseek_v3", "--moe-router-score-function", "softmax", "must be"),
    ("deepseek_v3", "--moe-router-enable-expert-bias", False, "must be"),
    ("deepseek_v3", "--moe-router-topk", 3, "must be"),
    ("deepseek_v3", "--moe-router-topk", 9, "must be at least 4 and less than 6"),
    ("deepseek_v3", "--moe-shared-expert-intermediate-size", 0, "must be a multiple of"),
    ("deepseek_v3", "--moe-shared-expert-intermediate-size", 30, "must be a multiple of"),
    ("deepseek_v3", "--moe-shared-expert-gate", True, "must"),
    ("deepseek_v3", "--moe-latent-size", 8, "must"),
    ("deepseek_v3", "--add-bias-linear", True, "must"),
    ("deepseek_v3", "--normalization", "LayerNorm", "must"),
    ("deepseek_v3", "--moe-router-load-balancing-type", "sinkhorn", "must"),
    ("deepseek_v3", "--mtp-use-repeated-layer", True, "must"),
    ("deepseek_v3", "--rotary-interleaved", True, "must"),
    ("deepseek_v3", "--num-experts", None, "must"),
    ("deepseek_v3", "--multi-latent-attention", False, "must be"),
    ("deepseek_v3", "--qk-layernorm", False, "must be"),
    ("deepseek_v3", "--experimental-attention-variant", "dsa", "must be"),
    *(
        ("deepseek_v3", "--moe-layer-freq", pattern, "must be dense layers and then")
        for pattern in (2, [0, 0, 0], [1, 0, 1], [1, 1, 0])
    ),
]


@pytest.mark.parametrize(("name", "flag", "value", "rule"), REFUSED)
def test_feature_that_a_family_has_not_is_refused_by_flag(
    name: str, flag: str, value: Any, rule: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        FAMILIES[name].check({**SETTINGS[name], flag: value})
    assert f"{flag}={value} {rule}" in str(refusal.value)


def test_other_epsilon_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match="--norm-epsilon=1e-05 must be 1e-06"):
        FAMILIES["deepseek_v3"].check({**V3, "--layernorm-epsilon": 1e-5})


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen3_moe", "use_sliding_window", True),
        ("olmoe", "clip_qkv", 8.0),
        ("olmoe", "head_dim", 12),
        ("olmoe", "attention_bias", True),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "norm_topk_prob", False),
        ("deepseek_v3", "num_experts_per_tok", 6),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "hidden_act", "gelu"),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek_v3", "n_shared_experts", None),
        ("deepseek_v3", "n_shared_experts", 0),
        ("deepseek_v3", "num_key_value_heads", 8),
        ("deepseek_v3", "rms_norm_eps", 1e-5),
        ("deepseek_v3", "rope_interleave", False),
    ],
)
def test_config_that_megatron_cannot_express_is_refused_by_key(
    name: str, key: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}={value}"):
        FAMILIES[name].settings({**CONFIGS[name], key: value})


def test_experts_in_no_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="first_k_dense_replace=61 and num_hidden_layers=61"):
        FAMILIES["deepseek_v3"].settings({**PUBLISHED_V3, "first_k_dense_replace": 61})


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0]), (None, [1, 1, 1, 1])],
)
def test_layers_with_experts_follow_from_the_frequency(frequency: Any, expected: list[int]) -> None:
    layers = decoder.moe_layers({"--num-layers": 4, "--moe-layer-freq": frequency})
    assert layers == [bool(each) for each in expected]
    again = {"--num-layers": 4, "--moe-layer-freq": decoder.layer_frequency(layers)}
    assert decoder.moe_layers(again) == layers


def test_dense_layers_are_those_that_are_named_and_all_between_steps() -> None:
    assert SETTINGS["qwen2_moe"]["--moe-layer-freq"] == [1, 0, 1, 1]
    assert SETTINGS["qwen3_moe"]["--moe-layer-freq"] == [0, 1, 0, 0]


def test_sizes_that_are_not_given_follow_from_others() -> None:
    settings: dict[str, Any] = {"--hidden-size": 12, "--num-attention-heads": 6}
    settings |= {"--num-query-groups": 2, "--group-query-attention": True, "--ffn-hidden-size": 20}
    assert decoder.query_groups(settings) == 2
    assert decoder.query_groups({**settings, "--group-query-attention": False}) == 6
    assert decoder.head_size(settings) == 2
    assert decoder.expert_size(settings) == 20


def test_rotary_base_is_read_from_old_and_new_configs() -> None:
    assert decoder.rope_base({"rope_theta": 1e6, "rope_scaling": None}, "any") == 1_000_000
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert decoder.rope_base(new, "any") == 500_000
    with pytest.raises(ConfigError, match="rope_theta=None"):
        decoder.rope_base({}, "any")
    config = {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    with pytest.raises(ConfigError, match=r"config.json has partial_rotary_factor=0.5"):
        decoder.rope_base(config, "any")
