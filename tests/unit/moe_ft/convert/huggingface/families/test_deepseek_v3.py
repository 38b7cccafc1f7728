"""DeepSeek-V3: what is published, and routers that it does not have."""

from math import prod
from typing import Any

import pytest

from moe_ft.convert.huggingface.families.deepseek_v3 import DeepseekV3
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.families.models import PUBLISHED_V3, V3

FAMILY = DeepseekV3()


def test_published_model_has_as_many_parameters_as_published() -> None:
    sizes = {"decoder": 0, "mtp": 0}
    for mapped in FAMILY.tensors(FAMILY.settings(PUBLISHED_V3)):
        part = "mtp" if mapped.tensor.startswith("mtp.") else "decoder"
        sizes[part] += prod(mapped.shape)
    assert sizes["decoder"] == 671_026_419_200
    assert (
        f"{(sizes['mtp'] + 2 * 129280 * 7168) / 1e9:.0f}" == "13"
    )  # with copies of embedding, head


def test_published_config_is_the_same_after_both_directions() -> None:
    settings = FAMILY.settings(PUBLISHED_V3)
    FAMILY.check(settings)
    written = FAMILY.config(settings)
    unknown = {"bos_token_id": None, "eos_token_id": None}  # to Megatron
    assert written == {**{key: PUBLISHED_V3[key] for key in written}, **unknown}
    left = set(PUBLISHED_V3) - set(written)
    assert left <= {
        *("architectures", "model_type", "torch_dtype"),  # others write these
        *("initializer_range", "use_cache", "ep_size"),
    }


def test_published_settings_are_those_of_the_paper() -> None:
    settings = FAMILY.settings(PUBLISHED_V3)
    expected = {
        "--moe-layer-freq": [0] * 3 + [1] * 58,
        "--moe-router-score-function": "sigmoid",
        "--moe-router-enable-expert-bias": True,
        "--moe-router-num-groups": 8,
        "--moe-router-group-topk": 4,
        "--moe-router-topk": 8,
        "--moe-router-topk-scaling-factor": 2.5,
        "--moe-shared-expert-intermediate-size": 2048,
        "--mtp-num-layers": 1,
        "--rotary-scaling-factor": 40,
    }
    assert {flag: settings[flag] for flag in expected} == expected


def test_one_expert_keeps_its_score_as_weight() -> None:
    one = {"--moe-router-topk": 1, "--moe-router-num-groups": None, "--moe-router-group-topk": None}
    config = FAMILY.config({**V3, **one})
    assert config["norm_topk_prob"] is False
    settings = FAMILY.settings(config)
    assert settings["--moe-router-topk"] == 1
    with pytest.raises(ConfigError, match="config.json has norm_topk_prob=True"):
        FAMILY.settings({**config, "norm_topk_prob": True})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--moe-router-score-function", "softmax"),
        ("--moe-router-enable-expert-bias", False),
        ("--moe-router-topk", 3),
    ],
)
def test_other_routers_are_refused(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{flag}={value} must be"):
        FAMILY.check({**V3, flag: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("num_experts_per_tok", 6),
    ],
)
def test_config_of_other_routers_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}={value}"):
        FAMILY.settings({**PUBLISHED_V3, key: value})
