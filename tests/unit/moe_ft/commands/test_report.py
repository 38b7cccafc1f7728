"""`report` prints a run, and answers bad input with its reason."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.commands.report import render, summarize
from tests.unit.moe_ft.commands.bad_input import (
    Case,
    cases_of,
    check_answer,
    made,
    then_closed,
    written,
)
from tests.unit.moe_ft.commands.runs import write_run

START = '{"event":"start","iteration":0,"incarnation":0,"time":1}\n'
ITERATION = '{"event":"iteration","iteration":1,"incarnation":0}\n'
LOSS_IN_WORDS = ITERATION[:-2] + ',"loss":"low","iteration_s":1,"num_tokens":1}\n'
GARBAGE = bytes((7 * byte) % 256 for byte in range(4000))
CASES = {
    "no directory": Case("/nonexistent/x", "error"),
    "file": Case("DIR/x", "error", written("x", "x")),
    "no events": Case("DIR", "error"),
    "garbage": Case("DIR", "error", written(GARBAGE)),
    "no incarnation": Case("DIR", "error", written('{"event":"start","iteration":0}\n')),
    "loss in words": Case("DIR", "ok", written(START + LOSS_IN_WORDS)),
    "iterations without times": Case("DIR", "error", written(ITERATION * 2)),
    "empty log": Case("DIR", "error", written("")),
    "log of another user": Case("DIR", "error", written(START, mode=0o600), by_nobody=True),
    "directory of another user": Case("DIR", "error", then_closed(written(START)), by_nobody=True),
    "log that is a directory": Case("DIR", "error", made("rank_00000.jsonl")),
}


@cases_of("report", CASES)
def test_bad_input_is_answered_with_its_reason(
    case: Case, directory: Path, nobody: Callable[[], ProcessPoolExecutor]
) -> None:
    check_answer(case, directory, nobody)


def test_command_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 0, [5.0, 4.0]).write("end", 2, reason="finished")
    assert main(["report", str(tmp_path)]) == 0
    assert "loss at end" in capsys.readouterr().out


def test_report_on_a_whole_log_leaves_nothing_out(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0, 4.0]).write("end", 2, reason="finished")
    assert "left out" not in render(summarize(tmp_path), tmp_path)


def test_loss_that_is_no_number_is_reported_as_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0, float("nan")]).write("end", 2, reason="finished")
    assert render(summarize(tmp_path), tmp_path).splitlines()[4].split() == [
        *("loss", "at", "end", "nan")
    ]


def test_what_ended_a_rank_is_printed_whatever_its_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A path that is no UTF-8, as Python hands it on.
    write_run(tmp_path, 0, [5.0]).write("stopped", 1, reason="no \udcff", silent_ranks=None)
    assert main(["report", str(tmp_path)]) == 0
    assert r"stopped: no \udcff" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["missing", "."])
def test_directory_without_events_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / name)]) == 2
    assert "holds no event log" in capsys.readouterr().err
