"""Reader of published_models.toml: config.json of decoders with experts, and what is published of them."""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".toml")
_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_ITEM = re.compile(r"(?:\(([^)]*)\)|([^(),*]+))(?:\*(\d+))?")
_RANGE = re.compile(r"\d+-\d+")
_UNITS = {"B": 1e9, "T": 1e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A model.

    Attributes:
        config: content of its config.json, as far as sizes follow from it.
        parameters, active: as printed; empty if nobody says.
        without: matrices of the vocabulary that the active ones leave out.
        counted: parameters of the model that transformers builds; 0 if it builds none.
    """

    config: dict[str, Any]
    parameters: str
    active: str
    without: int
    counted: int


def is_printed(value: float, printed: str) -> bool:
    """Return whether a number is the printed one: within 2 %, or half of its last digit."""
    unit, number = _UNITS[printed[-1]], printed[:-1]
    half = 0.5 * 10.0 ** -len(number.partition(".")[2])
    return abs(value / unit - float(number)) <= max(half, 0.02 * float(number))


def read_published() -> dict[str, Published]:
    """Return all models by name."""
    rows = tomllib.loads(_FILE.read_text("utf-8"))
    return {
        name: Published(
            config=_config(row, rows[row["like"]] if "like" in row else row),
            parameters=row["parameters"],
            active=row.get("active", ""),
            without=row.get("without", 0),
            counted=row.get("counted", 0),
        )
        for name, row in rows.items()
    }


def _config(row: dict[str, Any], with_fields: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for word in with_fields["fields"].split():
        name, _, value = word.partition("=")
        *outer, last = name.split(".")
        inside = fields.setdefault(outer[0], {}) if outer else fields
        inside[last] = _value(value)
    if "quantized" in row:
        fields["quantization_config"] = {"quant_method": row["quantized"]}
    others = {name: {"depth": 2} for name in row.get("beside", ())}
    return {**others, "text_config": fields} if "inner" in row else {**others, **fields}


def _value(text: str) -> Any:
    if text.startswith("~"):
        return [_LETTERS[letter] for letter in text[1:]]
    return _items(text[1:-1]) if text.startswith("[") else _word(text)


def _items(text: str) -> list[Any]:
    """Return the items of a list: words, ranges, and either several times."""
    found: list[Any] = []
    for inner, word, times in _ITEM.findall(text):
        if inner or not _RANGE.fullmatch(word):
            items = _items(inner) if inner else [_word(word)]
        else:
            first, last = map(int, word.split("-"))
            items = [*range(first, last + 1)]
        found += items * int(times or 1)
    return found


def _word(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
