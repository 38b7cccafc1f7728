"""tools/convert_checkpoint.py is the command `convert`."""

import runpy
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools/convert_checkpoint.py"


def test_tool_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(TOOL), "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(TOOL), run_name="__main__")
    assert "moe_ft convert" in capsys.readouterr().out
