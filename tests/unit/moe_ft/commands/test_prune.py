"""`prune` says what it would remove, removes only when told to, and answers bad input with its reason."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.builders import make_identity, persist_checkpoint
from tests.unit.moe_ft.commands.bad_input import Case, cases_of, check_answer, written
from tests.unit.moe_ft.commands.damaged import in_memory, persisted
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations

CASES = {
    "no directory": Case("/nonexistent/x --keep 1", "error"),
    "empty name": Case("'' --keep 1", "error"),
    "file": Case("DIR/x --keep 1", "error", written("x", "x")),
    "memory directory": Case("DIR --keep 1", "error", in_memory()),
    "none to keep": Case("DIR --keep 0", "error", persisted()),
    "every minus one": Case("DIR --keep 1 --every -1", "error", persisted()),
    "days that are no number": Case("DIR --keep 1 --days nan", "error", persisted()),
    "unknown protocol": Case("nosuch://x/y --keep 1", "error"),
}


@cases_of("prune --remove", CASES)
def test_bad_input_is_answered_with_its_reason(
    case: Case, directory: Path, nobody: Callable[[], ProcessPoolExecutor]
) -> None:
    check_answer(case, directory, nobody)


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
