"""Models with an indexer give the same logits in Megatron as in transformers, and come back."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV32Config,
    GlmMoeDsaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32PreTrainedModel
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from moe_ft.convert.huggingface.deepseek import DeepseekV32, GlmMoeDsa
from moe_ft.convert.huggingface.mapping import flags_of
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.further_tokens import check_further_tokens
from tests.unit.moe_ft.convert.huggingface.models import PUBLISHED_V3
from tests.unit.moe_ft.convert.huggingface.round_trip import (
    NUM_TOKENS,
    check_round_trip,
    tensors_of,
)
from tests.unit.moe_ft.convert.huggingface.test_families import V3, YARN

FEW, ALL = NUM_TOKENS // 4, 2 * NUM_TOKENS
INDEXED: dict[str, Any] = V3 | {"index_n_heads": 3, "index_head_dim": 12, "index_topk": FEW}
GLM = INDEXED | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-6}
# As in GLM-5.2: of six layers the first two and the last have an indexer.
SHARED = {"num_hidden_layers": 6, "index_topk_freq": 4, "index_skip_topk_offset": 2}
MODELS: dict[str, PreTrainedConfig] = {
    "V3.2, YaRN, all keys": DeepseekV32Config(
        **INDEXED | {"rope_parameters": YARN, "index_topk": ALL}
    ),
    "GLM-5, all keys": GlmMoeDsaConfig(**GLM | {"index_topk": ALL}),
    "GLM-5.2": GlmMoeDsaConfig(**GLM | SHARED),
}
# config.json as published, as far as it decides tensors and numbers.
V32_KEYS = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
PUBLISHED_V32 = PUBLISHED_V3 | V32_KEYS | {"model_type": "deepseek_v32", "architectures": None}
PUBLISHED_GLM: dict[str, Any] = {
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 256,
    "vocab_size": 154880,
}
PERIOD, OFFSET = "--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset"


def composed_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [layer, batch, sequence, vocabulary], the decoder's first.

    `MtpModel` of transformers 5.23 runs no layers with an indexer. Here its layer of the decoder gets the
    weights of the layer of further tokens, as the last of a deeper model.
    """
    config, folder = AutoConfig.from_pretrained(model.name_or_path), Path(model.name_or_path)
    layer, own = config.num_hidden_layers, tensors_of(folder)
    config.num_hidden_layers += 1
    config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    config.layer_types = [*config.layer_types, config.layer_types[-1]]
    if hasattr(config, "indexer_types"):
        config.indexer_types = [*config.indexer_types, "full"]
    deeper: Any = AutoModelForCausalLM.from_pretrained(folder, config=config).eval()
    norm = partial(torch.nn.functional.rms_norm, eps=config.rms_norm_eps)
    names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    *weights, projection = (own[f"model.layers.{layer}.{name}.weight"] for name in names)
    outputs = model(tokens, output_hidden_states=True)
    following = torch.cat((tokens[:, 1:], torch.zeros_like(tokens[:, :1])), dim=1)
    inputs = (deeper.get_input_embeddings()(following), outputs.hidden_states[-1])
    parts = [norm(x, x.shape[-1:], weight) for x, weight in zip(inputs, weights, strict=False)]
    state = torch.nn.functional.linear(torch.cat(parts, dim=-1), projection)
    places = torch.arange(NUM_TOKENS).expand_as(tokens)
    later = torch.full((NUM_TOKENS, NUM_TOKENS), -torch.inf).triu(1).expand(len(tokens), 1, -1, -1)
    rotations = deeper.model.rotary_emb(state, position_ids=places)
    state = deeper.model.layers[layer](
        state, attention_mask=later, position_ids=places, position_embeddings=rotations
    )
    state = state[0] if isinstance(state, tuple) else state
    logits = deeper.lm_head(norm(state, state.shape[-1:], weights[-1]))
    return torch.stack((outputs.logits, logits))


def test_each_layer_of_v32_gives_the_same_logits_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DeepseekV32Config(**INDEXED | {"num_nextn_predict_layers": 1})
    base = DeepseekV32PreTrainedModel
    check_further_tokens(config, base, tmp_path, monkeypatch, composed_logits)


@pytest.mark.rest
def test_each_layer_of_glm_gives_the_same_logits_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GlmMoeDsaConfig(**GLM | SHARED | {"num_nextn_predict_layers": 1})
    check_further_tokens(
        config, glm.GlmMoeDsaPreTrainedModel, tmp_path, monkeypatch, composed_logits
    )


@pytest.mark.rest
@pytest.mark.parametrize("name", MODELS)
def test_models_give_the_same_logits_and_come_back(name: str, tmp_path: Path) -> None:
    back = check_round_trip(MODELS[name], tmp_path)
    layers = {each.split(".")[2] for each in tensors_of(back) if "indexer.wk" in each}
    assert layers == ({"0", "1", "5"} if name == "GLM-5.2" else {"0", "1", "2"})


@pytest.mark.rest
def test_epsilon_of_glm_is_that_of_all_norms_in_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glm.GlmMoeDsaRMSNorm.__init__, "__defaults__", (1e-4,))  # it is 1e-6 there
    back = check_round_trip(GlmMoeDsaConfig(**GLM | {"rms_norm_eps": 1e-4}), tmp_path)
    assert AutoConfig.from_pretrained(back).rms_norm_eps == 1e-4


def test_published_models_are_translated_both_ways() -> None:
    for family, published, indexed in (
        (DeepseekV32(), PUBLISHED_V32, 61),
        (GlmMoeDsa(), PUBLISHED_GLM, 78),
        (GlmMoeDsa(), PUBLISHED_GLM | {"index_topk_freq": 4, "index_skip_topk_offset": 3}, 21),
    ):
        settings = family.settings(published | {"n_routed_experts": 16})
        assert "--no-dsa-indexer-rotate-activation" in flags_of(settings)
        assert "--no-dsa-indexer-scoring-relu" not in flags_of(settings)
        names = [name for each in family.tensors(settings) for name in each.names]
        assert len([name for name in names if "indexer.wk." in name]) == indexed + 1
        back = family.config(settings)
        assert family.settings(back) == settings


@pytest.mark.parametrize(
    ("types", "period", "offset"),
    [("FFF", 1, 0), ("FSFS", 2, 1), ("FFSSFS", 3, 2), ("FFSS", 4, 2), ("FFFSSSF", 4, 3)],
)
def test_shared_choices_are_translated(types: str, period: int, offset: int) -> None:
    layers = {"num_hidden_layers": len(types), "first_k_dense_replace": 1}
    named = [{"F": "full", "S": "shared"}[each] for each in types]
    for key, value in (("index_topk_pattern", types), ("indexer_types", named)):
        settings = GlmMoeDsa().settings(PUBLISHED_GLM | layers | {key: value})
        assert (settings[PERIOD], settings[OFFSET]) == (period, offset)
        assert GlmMoeDsa().config(settings)["indexer_types"] == named


@pytest.mark.parametrize("types", ["SFF", "FSSFF", "FSFF", "FX"])
def test_other_choices_are_refused(types: str) -> None:
    layers = {"num_hidden_layers": len(types), "first_k_dense_replace": 1}
    with pytest.raises(ConfigError, match="indexer_types="):
        GlmMoeDsa().settings(PUBLISHED_GLM | layers | {"index_topk_pattern": types})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--dsa-indexer-scoring-relu", False),
        ("--dsa-indexer-k-norm-epsilon", None),
        ("--dsa-indexer-rope-interleaved", True),
        ("--experimental-attention-variant", None),
        (PERIOD, 2),
    ],
)
def test_other_indexers_are_refused(flag: str, value: Any) -> None:
    settings = DeepseekV32().settings(PUBLISHED_V32 | {"num_nextn_predict_layers": 0})
    with pytest.raises(ConfigError, match=f"{flag}={value} must be"):
        DeepseekV32().check(settings | {flag: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("indexer_rope_interleave", True),
        ("mlp_layer_types", ["sparse"] * 61),
        ("layer_types", ["full_attention"] * 61),
    ],
)
def test_other_keys_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"config.json has {key}="):
        DeepseekV32().settings(PUBLISHED_V32 | {key: value})
