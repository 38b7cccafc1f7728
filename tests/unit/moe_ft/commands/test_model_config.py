"""Models of Hugging Face that `plan --model` reads by their fields: sizes and flags."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.cli import main
from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.commands.model_config import ModelFlags, model_of
from moe_ft.convert.huggingface.config_file import check_values, find_family
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from tests.unit.moe_ft.commands.published_models import is_printed, read_published

PUBLISHED = read_published()
# Sizes that the converters and this reader both say.
SIZES = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-experts", "--mtp-num-layers"),
    *("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate"),
    *("--moe-router-topk", "--num-attention-heads", "--num-query-groups", "--kv-channels"),
    *("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"),
    *("--add-qkv-bias", "--qk-layernorm", "--untie-embeddings-and-output-weights"),
    *("--dsa-indexer-n-heads", "--dsa-indexer-head-dim", "--dsa-indexer-topk"),
    *("--dsa-indexer-topk-freq", "--experimental-attention-variant"),
    *("--moe-router-num-groups", "--moe-router-group-topk", "--max-position-embeddings"),
)


def values_of(model: ModelFlags) -> dict[str, Any]:
    """Return the flags of a model with their values."""
    found: dict[str, Any] = {}
    for word in model.flags:
        if word.startswith("--"):
            flag = word
            found[flag] = True
        else:
            found[flag] = json.loads(word) if word[0] in "0123456789[" else word
    return found


def counted(values: Mapping[str, Any], *, top_k: int | None = None) -> int:
    """Return the parameters of Megatron's model, but norms; with `top_k` of so many experts."""
    size, heads = values["--hidden-size"], values["--num-attention-heads"]
    num_layers, indexers = values["--num-layers"], 0
    if "--multi-latent-attention" in values:
        q_rank, rank = values.get("--q-lora-rank"), values["--kv-lora-rank"]
        nope, rope = values["--qk-head-dim"], values["--qk-pos-emb-head-dim"]
        value = values["--v-head-dim"]
        width = heads * (nope + rope)
        attention = q_rank * (size + width) if q_rank else size * width
        attention += size * (rank + rope) + heads * (rank * (nope + value) + value * size)
        chosen, dim = values.get("--dsa-indexer-n-heads"), values.get("--dsa-indexer-head-dim", 0)
        if chosen:
            offset, period = (
                values.get("--dsa-indexer-skip-topk-offset", 1),
                values["--dsa-indexer-topk-freq"],
            )
            num_full = sum(
                max(layer - offset, 0) % period == 0 for layer in range(1, num_layers + 1)
            )
            indexers = num_full * (q_rank * chosen * dim + size * (dim + chosen))
    else:
        groups = values["--num-query-groups"]
        attention = 2 * size * values["--kv-channels"] * (heads + groups)
    frequency = values["--moe-layer-freq"]
    num_moe = sum(frequency) if isinstance(frequency, list) else num_layers
    mlp = size * (3 if "--swiglu" in values else 2)
    num_experts = values["--num-experts"]
    experts = (top_k or num_experts) * mlp * values["--moe-ffn-hidden-size"]
    shared = mlp * values.get("--moe-shared-expert-intermediate-size", 0)
    matrices = 2 if "--untie-embeddings-and-output-weights" in values else 1
    return int(
        matrices * values["--padded-vocab-size"] * size
        + num_layers * attention
        + indexers
        + num_moe * (experts + shared + num_experts * size)
        + (num_layers - num_moe) * mlp * values["--ffn-hidden-size"]
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_of_a_published_model_has_its_parameters(name: str) -> None:
    published = PUBLISHED[name]
    model = model_of(name, published.config)
    values = values_of(model)
    assert is_printed(model.parameters or 0, published.parameters)
    if published.counted:
        assert model.parameters == pytest.approx(published.counted, rel=6e-4)
    # The flags describe the same model, stand-ins included, and what they leave out is small.
    assert counted(values) == pytest.approx(model.parameters, rel=0.002)
    assert is_printed(counted(values), published.parameters)
    if published.active:
        vocabulary = values["--padded-vocab-size"] * values["--hidden-size"]
        assert is_printed((model.active or 0) - published.without * vocabulary, published.active)
    active = counted(values, top_k=values["--moe-router-topk"])
    assert active == pytest.approx(model.active, rel=0.002)


def built(model: ModelFlags) -> PlannedJob:
    """Return the job of a model on one rank."""
    words = ("--bf16", "--use-distributed-optimizer", "--seq-length", "128")
    command = read_command([*model.flags, *words, "--moe-ft-strategy", "dense"])
    return plan_job(command, MeasuredTimes(), world_size=1, ranks_per_node=1)[0]


def small(name: str, **changes: Any) -> dict[str, Any]:
    """Return a published model with few layers and experts."""
    config = PUBLISHED[name].config
    inner = {**config.get("text_config", config), **changes}
    return {**config, "text_config": inner} if "text_config" in config else inner


FEW: dict[str, dict[str, Any]] = {
    "glm-5-2": {
        "num_hidden_layers": 6,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 3,
        "indexer_types": ["full"] * 3 + ["shared"] * 3,
        "n_routed_experts": 8,
    },
    "nvidia-nemotron-3-super-120b-a12b-fp8": {
        "num_hidden_layers": 7,
        "hybrid_override_pattern": "MEMEM*E",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
}
WHOLE = (
    *("qwen3-5-122b-a10b", "gpt-oss-120b", "gemma-4-26b-a4b"),
    "llama-4-maverick-17b-128e-instruct",
)


def check_built(model: ModelFlags) -> None:
    """Check that Megatron builds a model of the parameters that its config.json has."""
    job = built(model)
    elements = job.stages[0].elements.items()
    further = sum(count for unit, count in elements if unit.block == "mtp")
    assert bool(further) == ("--mtp-num-layers" in model.flags)
    assert job.model.num_parameters - further == pytest.approx(counted(values_of(model)), rel=1e-3)
    assert job.model.num_parameters - further == pytest.approx(model.parameters, rel=0.01)


@pytest.mark.parametrize("name", FEW)
def test_megatron_builds_as_many_parameters_as_the_config_has(name: str) -> None:
    check_built(model_of(name, small(name, **FEW[name])))


@pytest.mark.rest
@pytest.mark.parametrize("name", WHOLE)
def test_megatron_builds_a_published_model_whole(name: str) -> None:
    check_built(model_of(name, PUBLISHED[name].config))


# By which name transformers has what the file calls otherwise.
_FAMILIES = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3": "minimax_m3_vl_text",
    "qwen3_vl_moe_text": "qwen3_moe",
}


@pytest.mark.rest
@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if each.counted])
def test_transformers_builds_as_many_parameters_as_the_table_says(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = dict(PUBLISHED[name].config)
    fields = {key: value for key, value in fields.get("text_config", fields).items()}
    family = fields.pop("model_type")
    fields.pop("quantization_config", None)
    config = transformers.CONFIG_MAPPING[_FAMILIES.get(family, family)](**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(each.numel() for each in model.parameters()) == PUBLISHED[name].counted


FAMILY_CONFIG: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True, "moe_intermediate_size": 24},
    "qwen2_moe": {
        "num_experts": 8,
        "norm_topk_prob": False,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 24,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
}


@st.composite
def family_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Return a config.json that the converters accept."""
    name = draw(st.sampled_from(sorted(FAMILY_CONFIG)))
    num_layers, heads = draw(st.integers(2, 6)), draw(st.sampled_from((4, 8)))
    config = {
        "model_type": name,
        "hidden_act": "silu",
        "vocab_size": 96,
        "rms_norm_eps": 1e-6,
        "num_hidden_layers": num_layers,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rope_theta": 10000,
        "num_experts_per_tok": draw(st.integers(2, 4)),
        "max_position_embeddings": 128,
        "tie_word_embeddings": draw(st.booleans()),
        **FAMILY_CONFIG[name],
    }
    if name == "deepseek_v3":
        config["num_nextn_predict_layers"] = draw(st.integers(0, 1))
        config["first_k_dense_replace"] = draw(st.integers(0, num_layers - 1))
        return config
    config["num_key_value_heads"] = draw(st.sampled_from((1, 2, 4)))
    config["head_dim"] = draw(st.sampled_from((None, 16, 32)))
    if name != "mixtral":
        config["decoder_sparse_step"] = draw(st.integers(1, 2))
        config["mlp_only_layers"] = draw(st.lists(st.integers(0, 0), max_size=1))
    return config


@settings(max_examples=60, deadline=None)
@given(family_configs())
def test_sizes_are_those_of_the_converters_where_these_read_a_model(config: dict[str, Any]) -> None:
    check_same(config)


def check_same(config: dict[str, Any]) -> None:
    """Check the sizes of a model against those of its converter; raise ConfigError if this refuses it."""
    inner, family = find_family("x", config)
    theirs = family.settings(check_values("x", inner, None, family))
    model = model_of("x", config)
    ours = values_of(model)
    if theirs.get("--kv-channels") is None and not theirs.get("--multi-latent-attention"):
        theirs["--kv-channels"] = inner["hidden_size"] // inner["num_attention_heads"]
    is_other = "stand-in" in "".join(model.notes)
    for flag in SIZES:
        if flag in theirs and not (is_other and flag in ("--kv-channels", "--moe-ffn-hidden-size")):
            assert (ours.get(flag) or None) == (theirs[flag] or None), flag
    frequency = theirs["--moe-layer-freq"]
    assert ours["--moe-layer-freq"] == (1 if frequency in (None, 1) else frequency)
    assert ours["--padded-vocab-size"] == inner["vocab_size"]


def test_sizes_of_published_models_are_those_of_the_converters_that_read_them() -> None:
    read = []
    for name, published in PUBLISHED.items():
        config = dict(published.config)
        config.pop("quantization_config", None)
        with suppress(ConfigError, KeyError):  # or it asks for more than the table has
            check_same(config)
            read.append(name)
    assert len(read) >= 7, read


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        (
            "kimi-k2-5",
            ["quantized (compressed-tensors): planned in the pr", "left out: vision_config"],
        ),
        ("minimax-m3", ["left out: sparse_attention_config", "partial_rotary_factor"]),
        ("qwen3-5-397b-a17b", ["mean size of its layers (45 linear_attention, 15 full_attention)"]),
        ("kimi-k3", ["mean size of its layers (69 linear, 24 full)", "latent space of 3584"]),
        ("deepseek-v4-pro", ["not counted, as plan does not know them: hc_mult"]),
        (
            "gemma-4-26b-a4b",
            ["depends on them: sliding windows, gelu_pytorch_tanh"],
        ),
        ("mixtral-8x7b-v0-1", ["46.70 billion parameters, 12.88 of them active"]),
    ],
)
def test_notes_name_what_is_left_out_or_stands_for_something_else(
    name: str, notes: list[str]
) -> None:
    found = "\n".join(model_of(name, PUBLISHED[name].config).notes)
    assert all(note in found for note in notes), found
    assert ("stand-in" in found) == (
        name in ("kimi-k3", "qwen3-5-397b-a17b", "gemma-4-26b-a4b", "deepseek-v4-pro")
    )


def test_plan_of_a_quantized_model_has_its_notes_and_the_memory_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small("kimi-k2-5", num_hidden_layers=2, n_routed_experts=8, vocab_size=512)
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["plan", "--model", f"{tmp_path}", "--", "torchrun", "--nproc-per-node", "8"]
    words += ["pretrain_gpt_moe.py", "--expert-model-parallel-size", "8"]
    assert main([*words, "--moe-ft-strategy", "dense"]) == 0
    found = capsys.readouterr().out
    assert "note: its weights are quantized (compressed-tensors): planned in the precision" in found
    assert "note: left out: vision_config" in found
    assert "12 bytes of a parameter saved" in found
