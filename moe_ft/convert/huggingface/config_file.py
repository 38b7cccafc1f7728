"""`config.json` of a model, which names its family, and `generation_config.json`.

config_values.py has the rules for its values.
"""

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_ft.convert.foreign_files import AnyPath, place_in, read_json
from moe_ft.convert.huggingface.config_values import RULES, CheckedConfig, ComparedConfig
from moe_ft.convert.huggingface.deepseek import (
    DeepseekV2,
    DeepseekV3,
    DeepseekV32,
    GlmMoeDsa,
    KimiK2,
)
from moe_ft.convert.huggingface.gated_delta import Qwen35Moe
from moe_ft.convert.huggingface.glm import Glm4Moe
from moe_ft.convert.huggingface.gpt_oss import GptOss
from moe_ft.convert.huggingface.mapping import Config, Family
from moe_ft.convert.huggingface.query_groups import (
    MiniMaxM2,
    Mixtral,
    Olmoe,
    Qwen2Moe,
    Qwen3Moe,
    Qwen3VlMoe,
)
from moe_ft.convert.safetensors_set import StoredTensor
from moe_ft.errors import ConfigError, MoeFtError
from moe_ft.saying import some_of

_FAMILIES = (
    *(Mixtral(), Qwen2Moe(), Qwen3Moe(), Olmoe(), Qwen3VlMoe(), MiniMaxM2(), GptOss()),
    *(DeepseekV2(), DeepseekV3(), KimiK2(), DeepseekV32(), Glm4Moe(), GlmMoeDsa()),
    Qwen35Moe(),
)
FAMILIES: Mapping[str, Family] = MappingProxyType({each.model_type: each for each in _FAMILIES})
CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"
_FACT, _TOKENS = "generation", ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST_BYTES = 16 << 20
_LISTED = 6  # of what is different
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)  # of odd values
# Keys that no layer follows from.
_SAYS_NOTHING = re.compile(
    r"_.*|.*(_token|_token_id|_id|_ids|_version|_size_limit|dtype|_coef|_dropout|_range)|auto_map|architectures"
    r"|model_type|use_cache|output_.*|return_.*|quantization_config|pretraining_tp|ep_size|is_.*|.*_length.*"
)


def read_config(folder: AnyPath) -> tuple[dict[str, Any], Family]:
    """Return the configuration in a folder, and the family that it names, as `find_family` does."""
    path = place_in(folder, CONFIG_NAME, str(folder))
    return find_family(str(path), read_json(path, _MOST_BYTES))


def find_family(path: str, config: dict[str, Any]) -> tuple[dict[str, Any], Family]:
    """Return the family that a configuration names, and the part of it that describes the text model.

    Args:
        path: for messages.

    Raises:
        ConfigError: if there is no such family.
    """
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{path} has model_type={model_type}, but conversions know only {', '.join(sorted(FAMILIES))}. "
            f"{_nearest(config)} There is no conversion of this model."
        )
    family, architectures = FAMILIES[model_type], config.get("architectures")
    check_values(path, config, None).get("architectures")
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            f"{path} has architectures={architectures}, and only {family.architecture} of {model_type} can "
            "be converted. There is no conversion of this model."
        )
    if not family.text_key:
        return config, family
    text = check_values(path, config, None, family)[family.text_key]
    ours = ("tie_word_embeddings", "quantization_config", *_TOKENS)
    return {**{key: config[key] for key in ours if key in config}, **text}, family


def _nearest(config: dict[str, Any]) -> str:
    """Return a sentence on the family whose models are most like one, and on what is different."""
    inner = config.get("text_config")
    text = {**(inner if isinstance(inner, dict) else config), "quantization_config": None}
    best, most = "", 0
    for family in FAMILIES.values():
        compared = ComparedConfig(text, {**RULES, **family.rules})
        try:
            family.settings(compared)
        except (MoeFtError, *_ODD) as error:
            compared.differences.append(
                str(error).partition(". ")[0].removeprefix("config.json has ")
            )
        different, read = [*dict.fromkeys(compared.differences)], compared.read
        points = 3 * len(read.intersection(text)) - 4 * len(different)
        if points <= most or family.is_by_name or family.text_key:
            continue
        most = points
        others = sorted(key for key in text.keys() - read if not _SAYS_NOTHING.fullmatch(key))
        best = (
            f"The nearest is {family.model_type}; what differs: "
            f"{some_of(different, _LISTED) or 'none of its keys'}; keys that it does not read: "
            f"{some_of(others, _LISTED) or 'none'}."
        )
    return best


def check_values(
    path: str, config: Config, places: Collection[StoredTensor] | None, family: Family | None = None
) -> CheckedConfig:
    """Return a configuration whose values are checked when they are read.

    Args:
        places: of the tensors that there are; None if only the configuration is there.
    """
    return CheckedConfig(path, config, places, {**RULES, **(family.rules if family else {})})


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
