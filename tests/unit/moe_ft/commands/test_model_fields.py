"""Fields of config.json that `plan --model` reads: weights of a layer, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest

from moe_ft.commands.model_config import Fields, linear_attention, model_of, state_space
from moe_ft.commands.plan_inputs import read_model
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.commands.published_models import read_published

PUBLISHED = read_published()
MIXTRAL = PUBLISHED["mixtral-8x7b-v0-1"].config


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_local_experts": None},
            r"has none of num_experts, .* \(model_type=mixtral\): it is no decoder with experts",
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
        ({"attn_type_list": [0] * 32}, "has layers of 'lightning', and plan knows attention"),
        (
            {"num_experts_per_tok": [2] * 31 + [4]},
            r"num_experts_per_tok=\[2, .* must be a whole number",
        ),
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


def test_size_that_is_given_for_each_layer_is_read_and_a_pattern_that_is_not_known_is_named() -> (
    None
):
    listed = {"num_experts_per_tok": [2] * 32, "intermediate_size": [14336] * 32}
    assert model_of("x", {**MIXTRAL, **listed}) == model_of("x", MIXTRAL)
    model = model_of("x", {**MIXTRAL, "expert_layer_period": 2, "audio_config": None})
    assert model.notes[1:] == ("not counted, as plan does not know them: expert_layer_period",)


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
