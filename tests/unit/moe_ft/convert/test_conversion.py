"""A conversion as a whole; its formats have tests of their own."""

from pathlib import Path

import pytest

from moe_ft.convert import conversion
from moe_ft.convert.conversion import Request, convert
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.models import LAYER


def request(checkpoints: Path, folder: Path, to: str = "safetensors") -> Request:
    return Request(source=str(checkpoints), destination=str(folder), to=to, shard_bytes=1000)


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


def test_line_says_what_was_written(checkpoints: Path, tmp_path: Path) -> None:
    line = convert(request(checkpoints, tmp_path / "out"))
    assert f"{tmp_path / 'out'}: iteration 4 as safetensors, 21 tensors" in line


def test_disk_that_fills_up_leaves_nothing(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(conversion.SafetensorsSet, "finish", fail)
    with pytest.raises(ConfigError, match=r"DST=.*out could not be written .*No space left"):
        convert(request(checkpoints, tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))
