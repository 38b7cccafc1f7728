"""Errors of reading a directory become one answer."""

import shutil
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.commands import directory as commands
from moe_ft.commands.directory import reading
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.convert.models import persist_model


@pytest.mark.parametrize(
    ("directory", "error"),
    [("DIR", OSError("away")), ("DIR", ValueError("away")), ("s3://x", RuntimeError("away"))],
)
def test_error_of_reading_names_directory_and_remedy(directory: str, error: Exception) -> None:
    rule = f"DIR={directory} cannot be read: {type(error).__name__}: away. Name a directory"
    with pytest.raises(ConfigError, match=rule), reading(directory):
        raise error


def test_password_of_a_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught, reading("ftp://me:secret@host/x"):
        raise OSError("away")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("error", [CorruptStateError("bad"), RuntimeError("a mistake of ours")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), reading("DIR"):
        raise error


def test_empty_directory_is_taken_for_an_unset_variable() -> None:
    with pytest.raises(ConfigError, match="DIR=' ' is empty: an unset variable"), reading(" "):
        pass


def test_equal_states_end_with_zero_and_without_warnings_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    silenced = list[str]()
    monkeypatch.setattr(commands, "silence_dependencies", lambda: silenced.append("now"))
    persist_model(Storage(str(tmp_path / "a")))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--what", "all"]) == 0
    shown = capsys.readouterr().out
    assert "A: " in shown
    assert "are equal, bit for bit" in shown
    assert silenced


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_place_without_a_state_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    persist_model(Storage(str(tmp_path / "a")))
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / name) if name else ""]) == 2
    assert "error: " in capsys.readouterr().err
