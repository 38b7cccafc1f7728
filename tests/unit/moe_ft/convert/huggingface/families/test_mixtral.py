"""Mixtral: settings in both directions. That the numbers are the same is test_families.py."""

from typing import Any

import pytest
from transformers import MixtralConfig

from moe_ft.convert.huggingface.families.mixtral import Mixtral
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL

CONFIG = MixtralConfig(**SMALL, num_local_experts=4).to_dict()


def test_settings_give_a_config_that_gives_the_settings() -> None:
    settings = Mixtral().settings(CONFIG)
    Mixtral().check(settings)
    assert Mixtral().settings(Mixtral().config(settings)) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"--moe-layer-freq": [0, 1]},
            r"--moe-layer-freq=\[0, 1\] must be 1 for a model of mixtral",
        ),
        ({"--moe-router-pre-softmax": True}, "--moe-router-pre-softmax=True must be off"),
        ({"--qk-layernorm": True}, "--qk-layernorm=True must be off"),
        (
            {"--moe-shared-expert-intermediate-size": 8},
            "--moe-shared-expert-intermediate-size=8 must",
        ),
    ],
)
def test_feature_that_it_has_not_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Mixtral().check({**Mixtral().settings(CONFIG), **changes})
