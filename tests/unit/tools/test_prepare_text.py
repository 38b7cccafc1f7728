"""The command line of tools/prepare_text.py."""

import sys
from pathlib import Path

import pytest

from tools import prepare_text


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["prepare_text.py", *words])
    return prepare_text.main()


def test_prints_what_was_written_and_how_to_train_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    prefix = str(tmp_path / "out")
    assert run(monkeypatch, str(tmp_path / "a.txt"), "--output-prefix", prefix) == 0
    output = capsys.readouterr().out
    assert "10 tokens in 1 documents" in output
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 256" in output


def test_missing_path_ends_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "/nowhere", "--output-prefix", str(tmp_path / "out")) == 2
    assert "error: text path /nowhere does not exist" in capsys.readouterr().err


def test_standard_library_is_text_without_its_tests() -> None:
    names = {Path(path).name for path in prepare_text.standard_library()}
    assert {"argparse.py", "asyncio", "email"} <= names
    assert not {"site-packages", "test", "__pycache__"} & names
