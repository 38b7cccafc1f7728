"""Parts of a mapping: splitting tensors of Megatron and joining them again; settings that do not fit."""

import pytest
import torch

from moe_ft.convert.huggingface.mapping import (
    expect,
    expect_config,
    flags_of,
    query_key_value,
    vocabulary_size,
)
from moe_ft.errors import ConfigError

NAMES = ("q", "k", "v")


@pytest.mark.parametrize("columns", [0, 5])
def test_rows_of_query_groups_become_queries_keys_and_values(columns: int) -> None:
    mapped = query_key_value("qkv", NAMES, heads=4, groups=2, head_dim=1, columns=columns)
    whole = torch.arange(mapped.shape[0])
    if columns:
        whole = whole[:, None].expand(-1, columns)
    assert mapped.shape == whole.shape
    parts = mapped.split(whole)
    first = [part.reshape(len(part), -1)[:, 0].tolist() for part in parts]
    assert first == [[0, 1, 4, 5], [2, 6], [3, 7]]
    assert torch.equal(mapped.join(parts), whole)


def test_vocabulary_is_that_of_the_run_or_has_all_rows() -> None:
    assert vocabulary_size({"--vocab-size": 100, "--padded-vocab-size": 128}) == 100
    assert vocabulary_size({"--vocab-size": None, "--padded-vocab-size": 128}) == 128
    with pytest.raises(ConfigError, match="--vocab-size=None: the settings of the run must have"):
        vocabulary_size({})


def test_setting_of_another_value_is_refused_by_name() -> None:
    expect({"--a": None, "--b": 2}, "mixtral", {"--a": False, "--b": (1, 2)})
    with pytest.raises(ConfigError, match=r"--b=3 must be 1 or 2 for a model of mixtral"):
        expect({"--b": 3}, "mixtral", {"--b": (1, 2)})


def test_config_of_another_value_is_refused_by_name() -> None:
    expect_config({"a": None}, "mixtral", {"a": False, "absent": "silu"})
    with pytest.raises(ConfigError, match=r"config.json has sliding_window=7, and of a model of"):
        expect_config({"sliding_window": 7}, "mixtral", {"sliding_window": None})


def test_settings_are_written_as_megatron_reads_them() -> None:
    settings = {
        "--num-layers": 2,
        "--layernorm-epsilon": 1e-6,
        "--add-bias-linear": False,
        "--swiglu": True,
        "--qk-layernorm": False,
        "--mtp-num-layers": None,
        "--moe-layer-freq": [0, 1],
        "--spec": ["module", "name"],
    }
    first = "--num-layers 2 --norm-epsilon 1e-06 --disable-bias-linear --swiglu"
    assert flags_of(settings) == [
        *first.split(),
        "--moe-layer-freq",
        "[0,1]",
        "--spec",
        "module",
        "name",
    ]


def test_switch_that_is_on_by_default_needs_no_flag() -> None:
    assert flags_of({"--add-bias-linear": True}) == []
