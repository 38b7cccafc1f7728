"""GLM-4.5 gives the same logits in Megatron as in transformers, also of a further token, and comes back."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel

from moe_ft.convert.huggingface.glm import Glm4Moe
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.further_tokens import check_further_tokens
from tests.unit.moe_ft.convert.huggingface.round_trip import SMALL, check_round_trip

GLM: dict[str, Any] = SMALL | {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    # Of its own: transformers writes the part of a head that is rotated into it.
    "rope_parameters": {"rope_type": "default", "rope_theta": 500},
}
# config.json of zai-org/GLM-4.5, as far as it decides tensors and numbers.
PUBLISHED: dict[str, Any] = {
    "attention_bias": True,
    "first_k_dense_replace": 3,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 92,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": True,
    "vocab_size": 151552,
}


def test_layers_of_further_tokens_give_the_same_logits_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Glm4MoeConfig(**GLM, use_qk_norm=True, num_nextn_predict_layers=1)
    check_further_tokens(config, Glm4MoePreTrainedModel, tmp_path, monkeypatch)


@pytest.mark.rest
def test_model_without_norms_biases_and_further_tokens_comes_back(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.25}
    changes = {"attention_bias": False, "num_nextn_predict_layers": 0, "rope_parameters": rope}
    check_round_trip(Glm4MoeConfig(**GLM | changes | {"n_group": 4, "topk_group": 2}), tmp_path)


def test_published_model_is_translated_both_ways() -> None:
    settings = Glm4Moe().settings(PUBLISHED)
    assert settings["--rotary-percent"] == 0.5
    assert settings["--moe-layer-freq"] == [0] * 3 + [1] * 89
    back = Glm4Moe().config(settings)
    assert {
        key: back.get(key) for key in PUBLISHED if key not in ("model_type", "rope_scaling")
    } == {
        key: value for key, value in PUBLISHED.items() if key not in ("model_type", "rope_scaling")
    }


@pytest.mark.parametrize("place", ["config.json", "rope_parameters", "rope_scaling"])
def test_part_of_a_head_that_is_rotated_is_read_from_each_place(place: str) -> None:
    rest = {key: value for key, value in PUBLISHED.items() if key != "partial_rotary_factor"}
    given: dict[str, Any] = {"partial_rotary_factor": 0.25}
    config = rest | (given if place == "config.json" else {place: given | {"rope_theta": 10000}})
    assert Glm4Moe().settings(config)["--rotary-percent"] == 0.25


@pytest.mark.parametrize("factors", [(0.5, 0.25), (1.5, 1.5), ("half", "half")])
def test_other_parts_are_refused(factors: tuple[Any, Any]) -> None:
    rope = {"rope_theta": 10000, "partial_rotary_factor": factors[1]}
    config = PUBLISHED | {"partial_rotary_factor": factors[0], "rope_parameters": rope}
    with pytest.raises(ConfigError, match="partial_rotary_factor="):
        Glm4Moe().settings(config)
