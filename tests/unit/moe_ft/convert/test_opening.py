"""A source is what its folder holds."""

import json
from pathlib import Path

import pytest

from moe_ft.convert.opening import open_model
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.test_megatron_checkpoint import TENSORS, save


def test_checkpoints_are_told_apart(checkpoints: Path, tmp_path: Path) -> None:
    megatron = save(tmp_path / "megatron", TENSORS)
    assert open_model(str(megatron)).kind == "torch_dist"
    assert open_model(str(megatron / "iter_0000003")).kind == "torch_dist"
    assert open_model(str(checkpoints)).kind == "moe_ft"


def test_model_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ConfigError, match="has model_type=bert"):
        open_model(str(tmp_path))


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in (("file", "is a file. Name the folder"), ("gone", "is not there")):
        with pytest.raises(ConfigError, match=f"SRC=.*{name} must be a folder, and {message}"):
            open_model(str(tmp_path / name))


def test_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no state of moe_ft"):
        open_model(str(tmp_path))
