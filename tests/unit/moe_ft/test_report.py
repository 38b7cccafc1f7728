"""What the report reads out of an event log."""

from pathlib import Path

import pytest

from moe_ft.cli import main
from moe_ft.events import EventLog
from moe_ft.faults import Phase
from moe_ft.report import render, summarize


def write_run(directory: Path, rank: int, losses: list[float], incarnation: int = 0) -> EventLog:
    """Write a start and one iteration per loss, half a second and 100 tokens each; return the log."""
    log = EventLog(directory, rank)
    log.start()
    log.incarnation = incarnation
    log.write("start", 0)
    for done, loss in enumerate(losses, 1):
        seconds = 9.0 if done == 1 else 0.5
        log.write("iteration", done, iteration_s=seconds, loss=loss, num_tokens=100)
        log.progress(done - 1, Phase.BETWEEN)
    return log


def test_summary_of_a_finished_run_leaves_the_warming_up_out(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0, 4.0, 3.0]).write("end", 3, reason="finished")
    summary = summarize(tmp_path)
    assert (summary.num_iterations, summary.first_loss, summary.last_loss) == (3, 5.0, 3.0)
    assert (summary.iteration_s, summary.tokens_per_s) == (0.5, 200.0)
    assert [rank.ending for rank in summary.ranks] == ["finished"]
    assert "how it ended" not in render(summary, tmp_path)


def test_every_ending_is_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0]).write(
        "stopped", 1, phase="forward", reason="RuntimeError: lost", silent_ranks=[1, 2]
    )
    killed = write_run(tmp_path, 1, [5.0])
    killed.progress(1, Phase.BACKWARD)
    killed.write("fault_injected", 1, kind="kill", phase="backward")
    write_run(tmp_path, 2, [5.0])
    write_run(tmp_path, 3, [5.0]).write("end", 1, reason="exit flag")
    ranks = summarize(tmp_path).ranks
    assert [rank.ending for rank in ranks] == [
        "stopped: RuntimeError: lost; heard nothing from 1, 2",
        "fell silent after an injected kill",
        "fell silent: running, killed or hung",
        "exit flag",
    ]
    assert ranks[1].phase == "backward"
    assert "how it ended" in render(summarize(tmp_path), tmp_path)


def test_last_incarnation_decides_how_a_rank_ended(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0]).write("stopped", 1, phase="forward", reason="x", silent_ranks=[])
    write_run(tmp_path, 0, [4.5, 4.0], incarnation=1).write("end", 2, reason="finished")
    summary = summarize(tmp_path)
    assert (summary.num_incarnations, summary.ranks[0].iteration) == (2, 2)
    assert summary.ranks[0].ending == "finished"


def test_command_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 0, [5.0, 4.0]).write("end", 2, reason="finished")
    assert main(["report", str(tmp_path)]) == 0
    assert "loss at end" in capsys.readouterr().out


def test_rank_without_events_is_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, 0, [5.0]).write("end", 1, reason="finished")
    (tmp_path / "rank_00001.jsonl").touch()
    assert [rank.rank for rank in summarize(tmp_path).ranks] == [0]


@pytest.mark.parametrize("name", ["missing", "."])
def test_directory_without_events_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / name)]) == 2
    assert "holds no event log" in capsys.readouterr().err
