"""Parts that decoders of all families share: what layers have, and what is refused."""

from typing import Any

import pytest

from moe_ft.convert.huggingface.families import decoder
from moe_ft.errors import ConfigError

SETTINGS: dict[str, Any] = {
    "--num-layers": 4,
    "--hidden-size": 12,
    "--num-attention-heads": 6,
    "--num-query-groups": 2,
    "--group-query-attention": True,
    "--kv-channels": None,
    "--ffn-hidden-size": 20,
    "--moe-ffn-hidden-size": None,
    "--num-experts": 4,
    "--position-embedding-type": "rope",
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--rotary-percent": 1.0,
    "--softmax-type": "vanilla",
}


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0]), (None, [1, 1, 1, 1])],
)
def test_layers_with_experts_follow_from_the_frequency(frequency: Any, expected: list[int]) -> None:
    layers = decoder.moe_layers({"--num-layers": 4, "--moe-layer-freq": frequency})
    assert layers == [bool(each) for each in expected]
    again = {"--num-layers": 4, "--moe-layer-freq": decoder.layer_frequency(layers)}
    assert decoder.moe_layers(again) == layers


def test_sizes_that_are_not_given_follow_from_others() -> None:
    assert decoder.query_groups(SETTINGS) == 2
    assert decoder.query_groups({**SETTINGS, "--group-query-attention": False}) == 6
    assert decoder.head_size(SETTINGS) == 2
    assert decoder.expert_size(SETTINGS) == 20


def test_model_with_plain_features_is_accepted() -> None:
    decoder.check_decoder(SETTINGS, "any", decoder.PLAIN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--num-experts": None}, "--num-experts=None must be a number"),
        ({"--swiglu": False}, "--swiglu=False must be True for a model of any"),
        ({"--normalization": "LayerNorm"}, "--normalization=LayerNorm must be RMSNorm"),
        ({"--position-embedding-type": "none"}, "--position-embedding-type=none must be rope"),
        ({"--add-bias-linear": True}, "--add-bias-linear=True must be off"),
        ({"--rotary-percent": 0.5}, "--rotary-percent=0.5 must be 1.0"),
        ({"--use-rope-scaling": True}, "--use-rope-scaling=True must be off"),
        ({"--moe-expert-capacity-factor": 1.5}, "--moe-expert-capacity-factor=1.5 must be off"),
        ({"--moe-router-load-balancing-type": "sinkhorn"}, "=sinkhorn must be another for a model"),
        ({"--window-size": [8, 0]}, r"--window-size=\[8, 0\] must be off"),
        ({"--softmax-type": "learnable"}, "--softmax-type=learnable must be vanilla"),
        ({"--moe-router-score-function": "sigmoid"}, "--moe-router-score-function=sigmoid must be"),
        ({"--moe-router-topk-scaling-factor": 2.5}, "--moe-router-topk-scaling-factor=2.5 must be"),
        ({"--multi-latent-attention": True}, "--multi-latent-attention=True must be off"),
        ({"--layernorm-zero-centered-gamma": True}, "--layernorm-zero-centered-gamma=True must be"),
    ],
)
def test_feature_is_refused_by_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decoder.check_decoder({**SETTINGS, **changes}, "any", decoder.PLAIN)


def test_rotary_base_is_read_from_old_and_new_configs() -> None:
    assert decoder.rope_base({"rope_theta": 1e6, "rope_scaling": None}, "any") == 1_000_000
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert decoder.rope_base(new, "any") == 500_000
    with pytest.raises(ConfigError, match="rope_theta=None"):
        decoder.rope_base({}, "any")


def test_part_of_a_query_without_rotation_is_refused() -> None:
    config = {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    with pytest.raises(ConfigError, match=r"config.json has partial_rotary_factor=0.5"):
        decoder.rope_base(config, "any")
