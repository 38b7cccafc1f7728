"""`prune` says what it would remove, and removes only when told to."""

from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.builders import make_identity, persist_checkpoint
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations


def test_prune_shows_what_would_go_and_removes_it_when_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = Storage(str(tmp_path))
    for iteration in (2, 4, 6):
        persist_checkpoint(storage, iteration, make_identity())
    words = ["prune", str(tmp_path), "--keep", "2"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "would remove iteration 2 of run run-a" in shown
    assert "kept iteration 4 of run run-a" in shown
    assert "add --remove" in shown
    assert complete_iterations(storage) == [6, 4, 2]
    assert main([*words, "--remove"]) == 0
    assert "removed iteration 2 of run run-a" in capsys.readouterr().out
    assert complete_iterations(storage) == [6, 4]
    assert main(words) == 0
    assert "no checkpoint has to go" in capsys.readouterr().out
