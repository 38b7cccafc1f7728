"""Models of Hugging Face that `plan --model` reads by their fields: sizes, flags, and what is refused."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.cli import main
from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.commands.model_config import Model, model_of
from moe_ft.commands.model_fields import Fields, linear_attention, state_space
from moe_ft.commands.plan_inputs import read_model
from moe_ft.convert.huggingface.config_file import FAMILIES, check_values
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import Measured, PlannedJob
from tests.unit.moe_ft.commands.published_models import is_printed, read_published

PUBLISHED = read_published()
MIXTRAL = PUBLISHED["mixtral-8x7b-v0-1"].config
# Sizes that the converters and this reader both say.
SIZES = (
    *("--num-layers", "--hidden-size", "--ffn-hidden-size", "--num-experts", "--mtp-num-layers"),
    *("--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size", "--moe-shared-expert-gate"),
    *("--moe-router-topk", "--num-attention-heads", "--num-query-groups", "--kv-channels"),
    *("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"),
    *("--add-qkv-bias", "--qk-layernorm", "--untie-embeddings-and-output-weights"),
    *("--moe-router-num-groups", "--moe-router-group-topk", "--max-position-embeddings"),
)


def values_of(model: Model) -> dict[str, Any]:
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
    if "--multi-latent-attention" in values:
        q_rank, rank = values.get("--q-lora-rank"), values["--kv-lora-rank"]
        nope, rope = values["--qk-head-dim"], values["--qk-pos-emb-head-dim"]
        value = values["--v-head-dim"]
        width = heads * (nope + rope)
        attention = q_rank * (size + width) if q_rank else size * width
        attention += size * (rank + rope) + heads * (rank * (nope + value) + value * size)
    else:
        groups = values["--num-query-groups"]
        attention = 2 * size * values["--kv-channels"] * (heads + groups)
    frequency = values["--moe-layer-freq"]
    num_layers = values["--num-layers"]
    num_moe = sum(frequency) if isinstance(frequency, list) else num_layers
    mlp = size * (3 if "--swiglu" in values else 2)
    num_experts = values["--num-experts"]
    experts = (top_k or num_experts) * mlp * values["--moe-ffn-hidden-size"]
    shared = mlp * values.get("--moe-shared-expert-intermediate-size", 0)
    matrices = 2 if "--untie-embeddings-and-output-weights" in values else 1
    return int(
        matrices * values["--padded-vocab-size"] * size
        + num_layers * attention
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
    # Of indexers, which the flags leave out, is more active than there is of them in all.
    active = counted(values, top_k=values["--moe-router-topk"])
    assert active == pytest.approx(model.active, rel=0.0225)


def built(model: Model) -> PlannedJob:
    """Return the job of a model on one rank."""
    words = ("--bf16", "--use-distributed-optimizer", "--seq-length", "128")
    command = read_command([*model.flags, *words, "--moe-ft-strategy", "dense"])
    return plan_job(command, Measured(), world_size=1, ranks_per_node=1)[0]


def small(name: str, **changes: Any) -> dict[str, Any]:
    """Return a published model with few layers and experts."""
    config = PUBLISHED[name].config
    inner = {**config.get("text_config", config), **changes}
    return {**config, "text_config": inner} if "text_config" in config else inner


FEW: dict[str, dict[str, Any]] = {
    "qwen3-5-35b-a3b": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_experts": 8,
    },
    "nvidia-nemotron-3-super-120b-a12b-fp8": {
        "num_hidden_layers": 7,
        "hybrid_override_pattern": "MEMEM*E",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
}
WHOLE = (
    *("minimax-m2-5", "qwen3-5-122b-a10b", "gpt-oss-120b", "step-3-7-flash", "deepseek-v3-2"),
    *("llama-4-maverick-17b-128e-instruct", "gemma-4-26b-a4b", "deepseek-v4-flash"),
)


def check_built(model: Model) -> None:
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


def test_weights_of_a_layer_are_those_counted_by_hand() -> None:
    sizes = {"hidden_size": 10, "linear_conv_kernel_dim": 4}
    sizes |= {"linear_num_key_heads": 2, "linear_key_head_dim": 3}
    sizes |= {"linear_num_value_heads": 4, "linear_value_head_dim": 5}
    # Keys 6, values 20: q, k, v and the gate z, two numbers of each value head, the output; q, k, v again.
    assert linear_attention(Fields("x", sizes)) == 10 * (6 + 6 + 20 + 20 + 8) + 20 * 10 + 4 * 32
    sizes = {"hidden_size": 10, "mamba_num_heads": 4, "mamba_head_dim": 5, "conv_kernel": 4}
    sizes |= {"n_groups": 2, "ssm_state_size": 3}
    # Width 20, states 2 * 2 * 3: z, x, B and C, dt; the output; a convolution over x, B and C.
    assert state_space(Fields("x", sizes)) == 10 * (20 + 20 + 12 + 4) + 20 * 10 + 4 * 32


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
    family = FAMILIES[config["model_type"]]
    theirs = family.settings(check_values("x", config, None, family))
    ours = values_of(model_of("x", config))
    theirs.setdefault("--kv-channels", None)
    if theirs["--kv-channels"] is None and not theirs.get("--multi-latent-attention"):
        theirs["--kv-channels"] = config["hidden_size"] // config["num_attention_heads"]
    for flag in SIZES:
        if flag in theirs:
            assert (ours.get(flag) or None) == (theirs[flag] or None), flag
    frequency = theirs["--moe-layer-freq"]
    assert ours["--moe-layer-freq"] == (1 if frequency in (None, 1) else frequency)
    assert ours["--padded-vocab-size"] == config["vocab_size"]


@pytest.mark.parametrize(
    ("name", "notes"),
    [
        (
            "kimi-k2-5",
            ["quantized (compressed-tensors): planned in the pr", "left out: vision_config"],
        ),
        ("deepseek-v3-2", ["left out: indexers of attention, 0.13% of the parameters"]),
        ("qwen3-5-397b-a17b", ["mean size of its layers (45 linear_attention, 15 full_attention)"]),
        ("kimi-k3", ["mean size of its layers (69 linear, 24 full)", "latent space of 3584"]),
        ("deepseek-v4-pro", ["not counted, as plan does not know them: hc_mult"]),
        (
            "gemma-4-26b-a4b",
            ["depends on them: sliding windows, gelu_pytorch_tanh", "audio_config"],
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_local_experts": None},
            "has none of num_experts, .* no decoder with experts .*mixtral",
        ),
        (
            {"num_local_experts": "8"},
            "num_local_experts='8', and it must be a whole number from 1 to",
        ),
        ({"num_local_experts": True}, "num_local_experts=True, and it must be a whole number"),
        (
            {"num_experts_per_tok": 9},
            "num_experts_per_tok=9, and it must be a whole number from 1 to 8",
        ),
        (
            {"num_experts_per_tok": None},
            "has no num_experts_per_tok or num_experts_per_token or .* Add",
        ),
        (
            {"hidden_size": 10**30},
            "hidden_size=1000.*, and it must be a whole number from 1 to 16777216",
        ),
        ({"hidden_size": float("nan")}, "hidden_size=nan, and it must be"),
        ({"vocab_size": -1}, "vocab_size=-1, and it must be"),
        ({"rope_theta": float("nan")}, "rope_theta=nan, and it must be a number above 0"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000, and it must be .* to 10000"),
        (
            {"num_local_experts": 99_999, "num_hidden_layers": 99},
            "describes .* experts and .* must be",
        ),
        (
            {"intermediate_size": 1 << 24, "hidden_size": 1 << 24},
            "describes 256 experts and .* must be",
        ),
        ({"first_k_dense_replace": 32}, "describes 0 experts"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads=5, and it must divide the 32 attention heads",
        ),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers=32, and it must be the length of"),
        ({"layer_types": ["full_attention"] * 10_001}, "layer_types=.* at most 10000 words"),
        ({"layer_types": [{}]}, "layer_types=.*, and it must be a list of"),
        ({"layer_types": ["conv"] * 32}, "has layers of 'conv', and plan knows attention"),
        ({"layer_types": ["mamba"] * 32}, "has no mamba_num_heads or mamba_n_heads, .* Add it"),
        ({"linear_attn_config": 3}, "linear_attn_config=3, and it must be an object"),
        ({"kv_lora_rank": 512}, "has no qk_nope_head_dim, which sizes of the model follow from"),
    ],
)
def test_value_that_cannot_be_is_refused_with_its_name_and_rule(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"--model=a/config.json {'' if message[0] == 'd' else '.*'}{message}"
    ):
        model_of("a/config.json", {**MIXTRAL, **changes})


JUNK: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        10**40,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "M*-E",
        [],
        {},
    ),
    *(
        [1],
        ["linear"],
        [{}],
        [[]],
        {"a": 1},
        {"factor": []},
        {"num_heads": "x", "kda_layers": [{}]},
    ),
)


@pytest.mark.parametrize(
    "name", ["kimi-k3", "deepseek-v4-pro", "nvidia-nemotron-3-super-120b-a12b-fp8"]
)
def test_any_value_in_any_field_is_read_or_refused(name: str) -> None:
    config = PUBLISHED[name].config
    inside = config.get("text_config", config)
    for field in (*inside, "text_config", "sparse_attention_config"):
        for value in JUNK:
            fields = {**inside, field: value}
            try:
                model = model_of(
                    "x", {**config, "text_config": fields} if inside is not config else fields
                )
            except ConfigError as error:
                assert "--model=x" in str(error) and len(str(error)) < 700
            else:
                assert all(isinstance(word, str) for word in (*model.flags, *model.notes))
                assert 0 < (model.active or 0) <= (model.parameters or 0)


def test_file_that_is_no_config_is_refused_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text, message in (
        ("[" * 100_000, "cannot be read"),
        ("[1]", "must hold a JSON object, and holds a list"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "cannot be read"),
        ("\x00", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"--model={path} {message}.* as it was published"):
            read_model(f"{path}")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="must be a config.json or its folder"):
        read_model(f"{path}")


def test_name_of_the_hub_is_answered_with_the_nearest_preset() -> None:
    with pytest.raises(ConfigError, match="none. Correct the path, .* Did you mean kimi-k2"):
        read_model("moonshotai/Kimi-K2-Instruct")


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
