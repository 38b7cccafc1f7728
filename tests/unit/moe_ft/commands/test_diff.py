"""`diff` prints what differs, says so with its exit code, and answers bad input with its reason."""

import shutil
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.builders import make_identity, persist_checkpoint
from tests.unit.moe_ft.convert.models import persist_model


def test_equal_states_end_with_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    persist_model(Storage(str(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--what", "all"]) == 0
    shown = capsys.readouterr().out
    assert "A: " in shown
    assert "are equal, bit for bit" in shown


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_place_without_a_state_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    persist_model(Storage(str(tmp_path / "a")))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / name) if name else ""]) == 2
    assert "error: " in capsys.readouterr().err


def test_state_that_does_not_say_how_tensors_fit_together_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    persist_checkpoint(Storage(str(tmp_path)), 3, make_identity())
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


def test_damaged_state_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    persist_model(Storage(str(tmp_path)))
    data = max(tmp_path.glob("iter_*/rank_00001_*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 0xFF
    data.write_bytes(content)
    assert main(["diff", str(tmp_path), str(tmp_path), "--what", "all"]) == 2
    assert "does not match its checksum" in capsys.readouterr().err
