"""DeepSeek-V2: what is published, and routers that it does not have."""

from math import prod
from typing import Any

import pytest

from moe_ft.convert.huggingface.families.deepseek_v2 import DeepseekV2
from moe_ft.convert.huggingface.families.mla import SPEC
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.families.models import (
    PUBLISHED_V2,
    PUBLISHED_V2_LITE,
    V2,
)

FAMILY = DeepseekV2()


PUBLISHED = {
    "V2": (PUBLISHED_V2, 235_741_434_880),
    "V2-Lite": (PUBLISHED_V2_LITE, 15_706_484_224),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_as_many_parameters_as_published(name: str) -> None:
    config, size = PUBLISHED[name]
    tensors = FAMILY.tensors(FAMILY.settings(config))
    assert sum(prod(mapped.shape) for mapped in tensors) == size


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_is_the_same_after_both_directions(name: str) -> None:
    config, _ = PUBLISHED[name]
    settings = FAMILY.settings(config)
    assert settings["--spec"] == SPEC  # both need layers of ours
    FAMILY.check(settings)
    written = FAMILY.config(settings)
    unknown = {"bos_token_id": None, "eos_token_id": None}  # to Megatron
    assert written == {**{key: config[key] for key in written}, **unknown}
    assert settings["--moe-router-pre-softmax"] is True
    assert bool(settings["--moe-router-num-groups"]) == (name == "V2")


def test_groups_are_named_by_the_method() -> None:
    config = FAMILY.config(V2)
    found = {key: config[key] for key in ("topk_method", "n_group", "topk_group")}
    assert found == {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    assert FAMILY.settings(config)["--moe-router-group-topk"] == 2
    assert FAMILY.settings({**config, "topk_method": "greedy"})["--moe-router-group-topk"] is None
    assert FAMILY.config({**V2, "--moe-router-group-topk": None})["topk_method"] == "greedy"


def test_layers_of_ours_have_any_groups() -> None:
    config = FAMILY.config({**V2, "--moe-router-topk": 4, "--spec": SPEC})
    assert (config["topk_method"], config["topk_group"]) == ("group_limited_greedy", 2)
    settings = FAMILY.settings(config)
    assert settings["--spec"] == SPEC
    assert FAMILY.settings({**config, "num_experts_per_tok": 3})["--spec"] is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--moe-router-score-function", "sigmoid"),
        ("--moe-router-pre-softmax", False),
        ("--moe-router-enable-expert-bias", True),
        ("--mtp-num-layers", 1),
        ("--moe-router-topk", 4),
    ],
)
def test_other_routers_and_further_tokens_are_refused(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{flag}={value} must be"):
        FAMILY.check({**V2, flag: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)],
)
def test_config_of_other_routers_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}={value}"):
        FAMILY.settings({**PUBLISHED_V2_LITE, key: value})
