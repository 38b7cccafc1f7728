"""Settings of a model as words of a command line of Megatron."""

import json

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
            is_list = isinstance(value, list | tuple)
            words += [word, json.dumps(value, separators=(",", ":")) if is_list else str(value)]
    return words
