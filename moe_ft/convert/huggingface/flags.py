"""Settings of a model as words of a command line of Megatron."""

import json
from typing import Any

from moe_ft.config.megatron_flags import spelling
from moe_ft.convert.huggingface.mapping import Settings


def flags_of(settings: Settings) -> list[str]:
    """Return the flags that make a model of the settings; a setting that is None needs none."""
    words = []
    for flag, value in settings.items():
        word = spelling(flag.removeprefix("--").replace("-", "_"))
        if isinstance(value, bool):
            is_negative = word.startswith(("--no-", "--disable-"))
            words += [word] if value is not is_negative else []
        elif value is not None:
            words += [word, *_values(value)]
    return words


def _values(value: Any) -> list[str]:
    """Return the words of a value: a list of numbers is one word, a list of words is several."""
    if not isinstance(value, list | tuple):
        return [str(value)]
    if all(isinstance(each, str) for each in value):
        return list(value)
    return [json.dumps(value, separators=(",", ":"))]
