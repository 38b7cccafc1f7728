"""`config.json` of a model, which names its family, and `generation_config.json`.

Types and sizes are checked before any of them decides how much work there is: no count is greater than the
number of tensors in the files, and no size greater than their longest dimension. Values that Megatron cannot
express are refused by the families.
"""

import json
from collections.abc import Collection, Mapping
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_ft.convert.foreign_files import AnyPath, place_in, read_json
from moe_ft.convert.huggingface.deepseek import DeepseekV2, DeepseekV3
from moe_ft.convert.huggingface.mapping import Config, Family
from moe_ft.convert.huggingface.query_groups import Mixtral, Olmoe, Qwen2Moe, Qwen3Moe
from moe_ft.convert.safetensors_set import Place
from moe_ft.errors import ConfigError

_FAMILIES = (Mixtral(), Qwen2Moe(), Qwen3Moe(), DeepseekV2(), DeepseekV3(), Olmoe())
FAMILIES: Mapping[str, Family] = MappingProxyType({each.model_type: each for each in _FAMILIES})
CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"
_FACT, _TOKENS = "generation", ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST_BYTES = 16 << 20
_MOST = 1 << 40

# Whole numbers that are at most the number of tensors, with the least that each can be.
_COUNTS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("num_hidden_layers", "num_local_experts", "num_experts"), 1),
        **dict.fromkeys(("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"), 1),
        **dict.fromkeys(("n_shared_experts", "decoder_sparse_step", "moe_layer_freq"), 1),
        **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), 0),
    }
)
# Whole numbers from 1 to the longest dimension of the tensors.
_SIZES = (
    *("vocab_size", "hidden_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
# Whole numbers from 1 on: no tensor needs to have them, as dense layers of a model without such layers.
_OTHERS = ("max_position_embeddings", "intermediate_size")
# Keys that may be null or absent: a family knows what that means, or names the key that it lacks.
_OPTIONAL = (
    *("num_key_value_heads", "head_dim", "q_lora_rank"),
    *("n_shared_experts", "n_group", "topk_group"),
    *("num_local_experts", "num_experts", "num_nextn_predict_layers"),
)
_TYPES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        **dict.fromkeys(
            ("rms_norm_eps", "attention_dropout", "routed_scaling_factor"), (int, float)
        ),
        **dict.fromkeys(("rope_theta", "aux_loss_alpha"), (int, float, type(None))),
        **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob", "seq_aux"), (bool, type(None))),
        "qkv_bias": (bool,),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), (dict, type(None))),
        **dict.fromkeys(("mlp_only_layers", "architectures"), (list, type(None))),
    }
)


def read_config(folder: AnyPath) -> tuple[dict[str, Any], Family]:
    """Return the configuration in a folder, and the family that it names."""
    path = place_in(folder, CONFIG_NAME, str(folder))
    config = read_json(path, _MOST_BYTES)
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{path} has model_type={model_type}, but conversions know only {', '.join(sorted(FAMILIES))}. "
            "There is no conversion of this model."
        )
    family, architectures = FAMILIES[model_type], config.get("architectures")
    if (
        isinstance(architectures, list)
        and architectures
        and family.architecture not in architectures
    ):
        raise ConfigError(
            f"{path} has architectures={architectures}, and only {family.architecture} of {model_type} can "
            "be converted. There is no conversion of this model."
        )
    return config, family


def check_values(path: str, config: Config, places: Collection[Place] | None) -> None:
    """Raise ConfigError for the first value of a wrong type, or too large for known tensors."""
    least = {**_COUNTS, **dict.fromkeys((*_SIZES, *_OTHERS), 1)}
    given = {
        key: config[key]
        for key in least
        if key in config and not (config[key] is None and key in _OPTIONAL)
    }
    for key, value in given.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not least[key] <= value <= _MOST:
            rule = f"a whole number from {least[key]} to {_MOST}"
            raise _refusal(path, key, value, rule)
    for key, types in _TYPES.items():
        value = config.get(key, ...)
        is_other = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        if value is not ... and (is_other or (isinstance(value, float) and not isfinite(value))):
            names = " or ".join("null" if each is type(None) else each.__name__ for each in types)
            raise _refusal(path, key, value, f"a value of the type {names}")
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads and groups and heads % groups:
        raise _refusal(
            path, "num_key_value_heads", groups, f"a divisor of num_attention_heads={heads}"
        )
    if places is None:
        return
    longest = max((length for each in places for length in each.shape), default=0)
    for keys, most, reason in (
        (_COUNTS, len(places), "the number of tensors in the files"),
        (_SIZES, longest, "the longest dimension of the tensors in the files"),
    ):
        if above := [key for key in keys if given.get(key, 0) > most]:
            raise _refusal(path, above[0], given[above[0]], f"at most {most}, {reason}")


def _refusal(path: str, key: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(
        f"{path} has {key}={value!r:.100}, and it must be {rule}. Compare it with the published "
        "file."
    )


def facts_of_generation(config: Config, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the two files say about tokens that begin, end and pad a text; nothing if they do not.

    Megatron has no place for these: they are facts of the state, as ages and lost tokens are. A
    run that starts from such a checkpoint does not know them.
    """
    tokens = {key: config[key] for key in _TOKENS if config.get(key) is not None}
    return {_FACT: {"tokens": tokens, "file": dict(generation)}} if tokens or generation else {}


def tokens_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `config.json` says about tokens."""
    return dict(facts.get(_FACT, {}).get("tokens", {}))


def write_generation(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write `generation_config.json`: that of the source, else one with the known tokens, else none."""
    known = facts.get(_FACT, {})
    if content := known.get("file") or known.get("tokens"):
        text = json.dumps(content, indent=2) + "\n"
        (folder / GENERATION_NAME).write_text(text, encoding="utf-8")
