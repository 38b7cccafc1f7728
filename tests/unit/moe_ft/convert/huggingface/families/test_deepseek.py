"""Layers of DeepSeek's models: their names, what each side cannot express, and groups of experts."""

from typing import Any

import pytest

from moe_ft.convert.huggingface.families import deepseek
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.families.models import PUBLISHED_V3, V3

FAMILY = "deepseek_v3"


def pairs(**changes: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of each tensor of Megatron on the hub, copies included."""
    settings = {**V3, **{"--" + name.replace("_", "-"): value for name, value in changes.items()}}
    return {
        mapped.tensor: (*mapped.names, *mapped.copies)
        for mapped in deepseek.model_tensors(settings, FAMILY)
    }


def test_first_layers_are_dense() -> None:
    found = pairs()
    dense, sparse = "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.1.mlp.router.weight"
    hub = "model.layers.0.mlp"
    assert found[dense] == (f"{hub}.gate_proj.weight", f"{hub}.up_proj.weight")
    assert found[sparse] == ("model.layers.1.mlp.gate.weight",)
    assert "decoder.layers.0.mlp.router.weight" not in found
    assert "decoder.layers.1.mlp.linear_fc1.weight" not in found


def test_layers_of_experts_have_shared_ones_and_a_bias_of_the_router() -> None:
    found = pairs()
    ours, hub = "decoder.layers.2.mlp", "model.layers.2.mlp"
    assert found[f"{ours}.experts.experts.7.linear_fc2.weight"] == (
        f"{hub}.experts.7.down_proj.weight",
    )
    assert found[f"{ours}.shared_experts.linear_fc1.weight"] == (
        f"{hub}.shared_experts.gate_proj.weight",
        f"{hub}.shared_experts.up_proj.weight",
    )
    assert found[f"{ours}.router.expert_bias"] == (f"{hub}.gate.e_score_correction_bias",)
    without = pairs(moe_router_enable_expert_bias=False)
    assert not [name for name in without if name.endswith("expert_bias")]


def test_layers_of_further_tokens_follow_the_last_one_with_copies_of_embedding_and_head() -> None:
    found = pairs(mtp_num_layers=2)
    for number in range(2):
        hub, ours = f"model.layers.{3 + number}", f"mtp.layers.{number}"
        assert found[f"{ours}.eh_proj.weight"] == (f"{hub}.eh_proj.weight",)
        assert found[f"{ours}.enorm.weight"] == (f"{hub}.enorm.weight",)
        assert found[f"{ours}.hnorm.weight"] == (f"{hub}.hnorm.weight",)
        assert found[f"{ours}.final_layernorm.weight"] == (f"{hub}.shared_head.norm.weight",)
        router = found[f"{ours}.transformer_layer.mlp.router.weight"]
        assert router == (f"{hub}.mlp.gate.weight",)
    assert found["embedding.word_embeddings.weight"] == (
        "model.embed_tokens.weight",
        "model.layers.3.embed_tokens.weight",
        "model.layers.4.embed_tokens.weight",
    )
    assert found["output_layer.weight"] == (
        "lm_head.weight",
        "model.layers.3.shared_head.head.weight",
        "model.layers.4.shared_head.head.weight",
    )


def test_tied_embedding_is_the_head_of_further_tokens_too() -> None:
    found = pairs(untie_embeddings_and_output_weights=False)
    assert "output_layer.weight" not in found
    assert found["embedding.word_embeddings.weight"] == (
        "model.embed_tokens.weight",
        "model.layers.3.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight",
    )
    tied = {**V3, "--untie-embeddings-and-output-weights": False}
    embedding = next(iter(deepseek.model_tensors(tied, FAMILY)))
    assert embedding.duplicates == ("lm_head.weight",)


def test_names_of_all_tensors_differ() -> None:
    names = [name for each in pairs(mtp_num_layers=2).values() for name in each]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("frequency", "num_dense"), [([0, 1, 1], 1), ([1, 1, 1], 0), (1, 0), ([0, 0, 1], 2)]
)
def test_dense_layers_are_counted(frequency: Any, num_dense: int) -> None:
    config = deepseek.common_config({**V3, "--moe-layer-freq": frequency}, FAMILY)
    assert config["first_k_dense_replace"] == num_dense


@pytest.mark.parametrize("frequency", [2, [0, 0, 0], [1, 0, 1], [1, 1, 0]])
def test_other_places_of_dense_layers_are_refused(frequency: Any) -> None:
    with pytest.raises(ConfigError, match=r"--moe-layer-freq=.* must be dense layers and then"):
        deepseek.common_config({**V3, "--moe-layer-freq": frequency}, FAMILY)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--moe-shared-expert-intermediate-size", None),
        ("--moe-shared-expert-intermediate-size", 30),
        ("--moe-shared-expert-gate", True),
        ("--moe-expert-capacity-factor", 1.0),
        ("--moe-latent-size", 8),
        ("--add-bias-linear", True),
        ("--normalization", "LayerNorm"),
        ("--moe-router-load-balancing-type", "sinkhorn"),
        ("--mtp-use-repeated-layer", True),
        ("--rotary-interleaved", True),
        ("--num-experts", None),
    ],
)
def test_model_that_the_family_does_not_have_is_refused(flag: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{flag}={value or 0 if 'size' in flag else value} must"):
        deepseek.common_config({**V3, flag: value}, FAMILY)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moe_layer_freq", 2),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("n_shared_experts", None),
        ("n_shared_experts", 0),
    ],
)
def test_config_that_megatron_cannot_express_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}={value}"):
        deepseek.common_settings({**PUBLISHED_V3, key: value}, FAMILY)


def test_experts_in_no_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="first_k_dense_replace=61 and num_hidden_layers=61"):
        deepseek.common_settings({**PUBLISHED_V3, "first_k_dense_replace": 61}, FAMILY)


@pytest.mark.parametrize(
    ("kind", "seq_aux"), [("aux_loss", False), ("seq_aux_loss", True), ("none", None)]
)
def test_balancing_is_translated(kind: str, seq_aux: bool | None) -> None:
    config = deepseek.common_config({**V3, "--moe-router-load-balancing-type": kind}, FAMILY)
    assert config.get("seq_aux") is seq_aux
    settings = deepseek.common_settings({**PUBLISHED_V3, **config}, FAMILY)
    assert settings["--moe-router-load-balancing-type"] == kind
    assert settings["--moe-aux-loss-coeff"] == (0.0 if seq_aux is None else 0.001)


@pytest.mark.parametrize("best", [1, 2])
@pytest.mark.parametrize(("num_groups", "chosen"), [(None, None), (4, 2), (4, 4)])
def test_groups_with_the_same_scores_are_translated(
    num_groups: int | None, chosen: int | None, best: int
) -> None:
    groups = {"--moe-router-num-groups": num_groups, "--moe-router-group-topk": chosen}
    top_k = best * (chosen or 1)
    config = deepseek.groups_config({**groups, "--moe-router-topk": top_k}, FAMILY, best=best)
    assert config == {"n_group": num_groups or 1, "topk_group": chosen or 1}
    back = deepseek.groups_settings({**config, "num_experts_per_tok": top_k}, FAMILY, best=best)
    if num_groups == chosen:  # all groups are chosen
        assert not any(back.values())
    else:
        assert back == groups


def test_groups_with_other_scores_are_refused() -> None:
    groups = {"--moe-router-num-groups": 8, "--moe-router-group-topk": 3}
    with pytest.raises(ConfigError, match="--moe-router-topk=9 must be at least 6 and less than 9"):
        deepseek.groups_config({**groups, "--moe-router-topk": 9}, FAMILY, best=2)
    config = {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 9}
    with pytest.raises(
        ConfigError, match="has num_experts_per_tok=9 and topk_group=3, and Megatron"
    ):
        deepseek.groups_settings(config, FAMILY, best=2)
