"""Tokens that begin, end and pad a text survive a conversion to Megatron and back."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_ft.convert.huggingface.generation import (
    GENERATION_NAME,
    facts_of_generation,
    tokens_of,
    write_generation,
)
from tests.unit.moe_ft.convert.huggingface.round_trip import converted
from tests.unit.moe_ft.convert.huggingface.test_release import change_config

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
