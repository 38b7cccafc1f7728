"""A refusal is one line a node and exit code 2, or 4 for what passes by itself."""

import sys
from pathlib import Path

import pytest

from moe_ft.errors import (
    BusyError,
    ConfigError,
    SnapshotError,
    StorageAwayError,
    UnrecoverableError,
)
from moe_ft.loop import refusing


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/pretrain_mine.py", "--lr", "1"])
    monkeypatch.setattr(refusing, "REFUSAL_GRACE_S", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 2), (UnrecoverableError, 2), (BusyError, 4), (StorageAwayError, 4)],
)
def test_refusal_is_one_line_with_the_name_of_the_script(
    kind: type[Exception], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end, refusing.refusing():
        raise kind("--lr=1 is too much. Lower it.")
    assert end.value.code == code
    assert capsys.readouterr().err == "pretrain_mine.py: error: --lr=1 is too much. Lower it.\n"


def test_refusal_that_torchrun_has_repeated_is_a_short_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    for attempt, reason in enumerate(["too much", "too much", "too little"]):
        file = tmp_path / "run" / f"attempt_{attempt}" / "0" / "error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        with pytest.raises(SystemExit, match="2"):
            refusing.refuse(reason)
    assert capsys.readouterr().err.splitlines() == [
        "pretrain_mine.py: error: too much",
        "pretrain_mine.py: refused again, for the same reason",
        "pretrain_mine.py: error: too little",
    ]


def test_other_ranks_of_the_node_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit, match=str(refusing.EXIT_REFUSED)):
        refusing.refuse("too much")
    assert capsys.readouterr().err == ""


def test_other_errors_pass() -> None:
    with pytest.raises(SnapshotError), refusing.refusing():
        raise SnapshotError("a copy failed")
