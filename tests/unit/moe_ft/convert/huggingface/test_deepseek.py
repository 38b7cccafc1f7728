"""DeepSeek's models: names with copies, groups of experts, balancing, and routers of one expert.

Most names are checked by the models that transformers loads, in test_families.py.
"""

from typing import Any

import pytest

from moe_ft.convert.huggingface import deepseek, shared_experts
from moe_ft.convert.huggingface.deepseek import DeepseekV2, DeepseekV3
from moe_ft.convert.huggingface.shared_experts import SPEC
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.models import PUBLISHED_V3, V2, V3

FAMILY = "deepseek_v3"


def test_layers_of_further_tokens_have_copies_of_embedding_and_head() -> None:
    settings = {**V3, "--mtp-num-layers": 2}
    tensors = {each.tensor: each for each in DeepseekV3().tensors(settings)}
    copies = [f"model.layers.{layer}.embed_tokens.weight" for layer in (3, 4)]
    heads = [f"model.layers.{layer}.shared_head.head.weight" for layer in (3, 4)]
    assert tensors["embedding.word_embeddings.weight"].copies == tuple(copies)
    assert tensors["output_layer.weight"].copies == tuple(heads)
    assert tensors["mtp.layers.1.eh_proj.weight"].names == ("model.layers.4.eh_proj.weight",)
    names = [name for each in tensors.values() for name in (*each.names, *each.copies)]
    assert len(names) == len(set(names))
    tied = {**settings, "--untie-embeddings-and-output-weights": False}
    embedding, *others = DeepseekV3().tensors(tied)
    assert embedding.copies == (*copies, *heads)
    assert embedding.duplicates == ("lm_head.weight",)
    assert "output_layer.weight" not in {each.tensor for each in others}


@pytest.mark.parametrize(
    ("frequency", "num_dense"), [([0, 1, 1], 1), ([1, 1, 1], 0), (1, 0), ([0, 0, 1], 2)]
)
def test_dense_layers_are_counted(frequency: Any, num_dense: int) -> None:
    config = deepseek.common_config({**V3, "--moe-layer-freq": frequency}, FAMILY)
    assert config["first_k_dense_replace"] == num_dense


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
    config = shared_experts.groups_config({**groups, "--moe-router-topk": top_k}, FAMILY, best=best)
    assert config == {"n_group": num_groups or 1, "topk_group": chosen or 1}
    back = shared_experts.groups_settings(
        {**config, "num_experts_per_tok": top_k}, FAMILY, best=best
    )
    if num_groups == chosen:  # all groups are chosen
        assert not any(back.values())
    else:
        assert back == groups


def test_groups_with_other_scores_are_refused() -> None:
    config = {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 9}
    wanted = "has num_experts_per_tok=9 and topk_group=3, and Megatron"
    with pytest.raises(ConfigError, match=wanted):
        shared_experts.groups_settings(config, FAMILY, best=2)


def test_groups_of_v2_are_named_by_the_method() -> None:
    family = DeepseekV2()
    config = family.config(V2)
    found = {key: config[key] for key in ("topk_method", "n_group", "topk_group")}
    assert found == {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    assert family.settings(config)["--moe-router-group-topk"] == 2
    assert family.settings({**config, "topk_method": "greedy"})["--moe-router-group-topk"] is None
    assert family.config({**V2, "--moe-router-group-topk": None})["topk_method"] == "greedy"


def test_layers_of_ours_have_any_groups_of_v2() -> None:
    family = DeepseekV2()
    config = family.config({**V2, "--moe-router-topk": 4, "--spec": SPEC})
    assert (config["topk_method"], config["topk_group"]) == ("group_limited_greedy", 2)
    assert family.settings(config)["--spec"] == SPEC
    assert family.settings({**config, "num_experts_per_tok": 3})["--spec"] is None


def test_one_expert_of_v3_keeps_its_score_as_weight() -> None:
    family = DeepseekV3()
    one = {"--moe-router-topk": 1, "--moe-router-num-groups": None, "--moe-router-group-topk": None}
    config = family.config({**V3, **one})
    assert config["norm_topk_prob"] is False
    assert family.settings(config)["--moe-router-topk"] == 1
    with pytest.raises(ConfigError, match="config.json has norm_topk_prob=True"):
        family.settings({**config, "norm_topk_prob": True})
