"""Tokens that begin, end and pad a text, and `generation_config.json`, on their way through Megatron.

Its checkpoints have no place for them: they are facts of the state, as ages and lost tokens are. A run that
starts from such a checkpoint does not know them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ft.convert.huggingface.mapping import Config

GENERATION_NAME = "generation_config.json"
_FACT = "generation"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def facts_of_generation(config: Config, generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a model by its two files, none if nothing is known."""
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
