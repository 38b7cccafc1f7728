"""The size of a vocabulary, and the flags that settings are. Splitting and joining is test_families.py."""

import pytest

from moe_ft.convert.huggingface.mapping import flags_of, vocabulary_size
from moe_ft.errors import ConfigError


def test_vocabulary_is_that_of_the_run_or_has_all_rows() -> None:
    assert vocabulary_size({"--vocab-size": 100, "--padded-vocab-size": 128}) == 100
    assert vocabulary_size({"--vocab-size": None, "--padded-vocab-size": 128}) == 128
    with pytest.raises(ConfigError, match="--vocab-size=None: the settings of the run must have"):
        vocabulary_size({})


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
    rest = "--moe-layer-freq [0,1] --spec module name"
    assert flags_of(settings) == [*first.split(), *rest.split()]
    assert flags_of({"--add-bias-linear": True}) == []  # on by default
