"""A conversion as a whole, and telling sources apart; formats have tests of their own."""

from pathlib import Path

import pytest

from moe_ft.convert.conversion import ConversionRequest, convert, open_model
from moe_ft.convert.safetensors_set import SafetensorsSet
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.models import LAYER
from tests.unit.moe_ft.convert.test_megatron_checkpoint import TENSORS, save


def request(checkpoints: Path, folder: Path, to: str = "safetensors") -> ConversionRequest:
    return ConversionRequest(
        source=str(checkpoints), destination=str(folder), to=to, shard_bytes=1000
    )


@pytest.mark.parametrize("to", ["safetensors", "torch_dist"])
def test_dry_run_lists_everything_and_writes_nothing(
    to: str, checkpoints: Path, tmp_path: Path
) -> None:
    lines = convert(request(checkpoints, tmp_path / "out", to), is_dry_run=True).splitlines()
    expert = [line for line in lines if "exp_avg_sq" in line and "layer.0.expert.1" in line]
    assert len(expert) == 1
    assert f"{LAYER}.mlp.experts" in expert[0]
    assert "12x6" in expert[0]
    assert not list(tmp_path.glob("out*"))


def test_disk_that_fills_up_leaves_nothing(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(SafetensorsSet, "finish", fail)
    with pytest.raises(ConfigError, match=r"DST=.*out could not be written .*No space left"):
        convert(request(checkpoints, tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_checkpoints_are_told_apart(checkpoints: Path, tmp_path: Path) -> None:
    megatron = save(tmp_path / "megatron", TENSORS)
    assert open_model(str(megatron)).kind == "torch_dist"
    assert open_model(str(megatron / "iter_0000003")).kind == "torch_dist"
    assert open_model(str(checkpoints)).kind == "moe_ft"


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in (("file", "is a file. Name the folder"), ("gone", "is not there")):
        with pytest.raises(ConfigError, match=f"SRC=.*{name} must be a folder, but {message}"):
            open_model(str(tmp_path / name))


def test_folder_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no state of moe_ft"):
        open_model(str(tmp_path))
