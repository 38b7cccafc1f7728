"""`moe_ft run` passes everything after it to the launcher; help comes without the launcher."""

import importlib
from types import SimpleNamespace

import pytest

from moe_ft.cli import main
from moe_ft.commands.run import runs_script


def test_all_words_go_to_the_launcher_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    launcher = SimpleNamespace(main=seen.append)
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: {"megatron.fault_tolerance.launch.command": launcher}[name],
    )
    words = ["train.py", "--help", "--", "-m", "plan", "--lr=1"]
    assert main(["run", *words]) == 0
    assert seen == [words]


def test_error_of_a_script_is_not_one_of_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> None:
        raise BrokenPipeError("of the script")

    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=fail))
    with pytest.raises(BrokenPipeError, match="of the script"):
        main(["run", "train.py"])


def test_help_of_run_needs_no_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert not runs_script(["run", "--help"])
    with pytest.raises(SystemExit) as end:
        main(["run", "--help"])
    assert not end.value.code
    assert "moe_ft run [-m] SCRIPT ARGS..." in capsys.readouterr().out
