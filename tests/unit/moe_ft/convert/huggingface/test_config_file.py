"""Values of config.json that no model has are refused; tokens survive a conversion and back."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_ft.convert.huggingface.config_file import (
    FAMILIES,
    GENERATION_NAME,
    check_values,
    facts_of_generation,
    find_family,
    tokens_of,
    write_generation,
)
from moe_ft.convert.huggingface.config_values import ValueRule
from moe_ft.convert.huggingface.query_groups import Mixtral
from moe_ft.convert.safetensors_set import StoredTensor
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.huggingface.round_trip import converted
from tests.unit.moe_ft.convert.huggingface.test_release import change_config

CONFIG = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    **dict.fromkeys(("hidden_size", "intermediate_size"), 8),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), 2),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), 16),
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
PLACES = [StoredTensor("F32", (16, 8), Path(f"t{number}"), 0) for number in range(4)]

CONFIGS: list[tuple[str, Any, str]] = [
    ("num_hidden_layers", -1, "a whole number from 1 to"),
    ("num_hidden_layers", "many", "a whole number from 1 to"),
    ("num_hidden_layers", None, "a whole number from 1 to"),
    ("num_hidden_layers", True, "a whole number from 1 to"),
    ("num_hidden_layers", 10**8, "at most 4, the number of tensors"),
    ("num_local_experts", 10**8, "at most 4, the number of tensors"),
    ("num_nextn_predict_layers", 10**8, "at most 4, the number of tensors"),
    ("num_attention_heads", 0, "a whole number from 1 to"),
    ("hidden_size", 8.5, "a whole number from 1 to"),
    ("vocab_size", -16, "a whole number from 1 to"),
    ("vocab_size", 17, "at most 16, the longest dimension of the tensors"),
    ("head_dim", 0, "a whole number from 1 to"),
    ("intermediate_size", 1 << 50, "from 1 to"),
    ("num_key_value_heads", 3, "a divisor of num_attention_heads=2"),
    ("architectures", 5, "a value of the type list or null"),
    ("rope_scaling", "linear", "a value of the type dict or null"),
    ("rope_theta", "much", "a value of the type int or float"),
    ("rms_norm_eps", float("nan"), "a value of the type int or float"),
    ("tie_word_embeddings", "yes", "a value of the type bool or null"),
]


def test_values_that_a_model_can_have_are_accepted() -> None:
    given = {**CONFIG, "head_dim": None, "num_experts": None}
    assert dict(check_values("config.json", given, PLACES)) == given


def test_zero_of_a_key_that_a_family_does_not_read_is_accepted() -> None:
    config = check_values("config.json", {**CONFIG, "shared_expert_intermediate_size": 0}, PLACES)
    assert "--moe-shared-expert-intermediate-size" in FAMILIES["mixtral"].settings(config)
    assert "shared_expert_intermediate_size" not in config.read
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size=0, and it must be"):
        config["shared_expert_intermediate_size"]


@pytest.mark.parametrize(("key", "value", "rule"), CONFIGS)
def test_value_that_cannot_be_is_refused(key: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_values("config.json", {**CONFIG, key: value}, PLACES)[key]
    assert f"config.json has {key}={value!r}, and it must be " in str(refusal.value)
    assert rule in str(refusal.value)


def test_rule_of_a_family_goes_before_that_of_all() -> None:
    class Other(Mixtral):
        rules = {"sliding_window": ValueRule(least=1), "num_experts_per_tok": ValueRule(least=0)}

    config = {**CONFIG, "sliding_window": 0, "num_experts_per_tok": 0}
    checked = check_values("config.json", config, PLACES, Other())
    assert checked["num_experts_per_tok"] == 0
    with pytest.raises(ConfigError, match="sliding_window=0, and it must be a whole number from 1"):
        checked["sliding_window"]


IDS: dict[str, Any] = {"bos_token_id": 3, "eos_token_id": [5, 7], "pad_token_id": 0}
OWN: dict[str, Any] = {"eos_token_id": 5, "temperature": 0.6, "do_sample": True}
NONE: dict[str, Any] = dict.fromkeys(IDS)


def content(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("ids", "own", "expected"), [(IDS, OWN, OWN), (IDS, None, IDS), (NONE, OWN, OWN)]
)
def test_model_that_comes_back_has_its_tokens(
    ids: dict[str, Any], own: dict[str, Any] | None, expected: dict[str, Any], saved: Path
) -> None:
    change_config(saved, **ids)
    (saved / GENERATION_NAME).unlink()
    if own is not None:
        (saved / GENERATION_NAME).write_text(json.dumps(own))
    folder, _ = converted(converted(saved, "torch_dist")[0], "hf")
    assert content(folder / GENERATION_NAME) == expected
    config = content(folder / "config.json")
    assert {key: config.get(key) for key in IDS} == ids


def test_nothing_is_written_where_nothing_is_known(tmp_path: Path) -> None:
    facts = facts_of_generation(NONE, {})
    write_generation(tmp_path, facts)
    assert (facts, tokens_of(facts), list(tmp_path.iterdir())) == ({}, {}, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 1 << 39},
        {"num_hidden_layers": "many", "rope_theta": "much", "num_attention_heads": []},
        {"text_config": {"num_hidden_layers": None, "rope_parameters": {"rope_theta": "x"}}},
        {"rope_parameters": 5, "mlp_only_layers": 7, "layer_types": 3},
    ],
    ids=str,
)
def test_unknown_model_is_refused_whatever_its_values_are(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has model_type=new, but conversions know only"):
        find_family("config.json", {**CONFIG, "model_type": "new", **changes})
