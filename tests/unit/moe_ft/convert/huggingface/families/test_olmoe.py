"""OLMoE: settings in both directions. That the numbers are the same is test_families.py."""

import importlib
from typing import Any

import pytest
from transformers import OlmoeConfig

from moe_ft.convert.huggingface.families.olmoe import SPEC, Olmoe
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL

OWN = {key: value for key, value in SMALL.items() if key != "head_dim"}
CONFIG = OlmoeConfig(**OWN, num_experts=4).to_dict()


def test_settings_give_a_config_that_gives_the_settings() -> None:
    settings = Olmoe().settings(CONFIG)
    Olmoe().check(settings)
    assert Olmoe().settings(Olmoe().config(settings)) == settings


def test_layers_that_it_needs_exist() -> None:
    module, name = SPEC
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--spec": None}, r"--spec=None must be .*projection_norm.* for a model of olmoe"),
        ({"--qk-layernorm": False}, "--qk-layernorm=False must be True"),
        ({"--kv-channels": 12}, "--kv-channels=12 must be 8"),
        ({"--moe-layer-freq": 2}, "--moe-layer-freq=.* must be 1"),
    ],
)
def test_feature_that_it_has_not_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Olmoe().check({**Olmoe().settings(CONFIG), **changes})


@pytest.mark.parametrize("changes", [{"clip_qkv": 8.0}, {"head_dim": 12}, {"attention_bias": True}])
def test_config_that_megatron_cannot_express_is_refused(changes: dict[str, Any]) -> None:
    ((key, value),) = changes.items()
    with pytest.raises(ConfigError, match=f"config.json has {key}={value}"):
        Olmoe().settings(CONFIG | changes)
