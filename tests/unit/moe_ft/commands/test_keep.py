"""`moe_ft keep` passes everything after it to the worker; help comes without one."""

import subprocess
import sys

import pytest

from moe_ft import cli
from moe_ft.commands.run import is_given


def test_all_words_go_to_the_worker_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(words: list[str]) -> None:
        seen.append(words)
        raise SystemExit(0)

    monkeypatch.setattr("moe_ft.keeper.worker.main", run)
    words = ["--", "train.py", "--help", "-m", "plan", "--lr=1"]
    with pytest.raises(SystemExit):
        cli.main(["keep", *words])
    assert seen == [words]


def test_help_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_given("keep", ["keep", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main(["keep", "--help"])
    assert not end.value.code
    assert "moe_ft keep [--preload MODULE]..." in capsys.readouterr().out


def test_worker_imports_next_to_nothing() -> None:
    words = [sys.executable, "-X", "importtime", "-m", "moe_ft", "keep"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is no script" in done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "moe_ft.keeper.worker" in imported
    assert not imported & {"torch", "numpy", "msgspec", "fsspec", "moe_ft.cli"}
