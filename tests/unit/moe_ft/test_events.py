"""The event log survives what kills its writer."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.events import (
    EventLog,
    Progress,
    event_path,
    last_incarnation,
    progress_path,
    ranks_with_events,
    read_events,
    read_progress,
)
from moe_ft.faults import Phase


def started(directory: Path, rank: int = 0, incarnation: int = 0) -> EventLog:
    log = EventLog(directory, rank)
    log.start()
    log.incarnation = incarnation
    return log


def test_events_are_appended_over_incarnations(tmp_path: Path) -> None:
    for incarnation in (0, 1):
        log = started(tmp_path / "events", incarnation=incarnation)
        log.write("iteration", 7, loss=1.5)
        log.close()
    lines = list(read_events(event_path(tmp_path / "events", 0)))
    assert [(line["incarnation"], line["iteration"], line["loss"]) for line in lines] == [
        (0, 7, 1.5),
        (1, 7, 1.5),
    ]
    assert last_incarnation(tmp_path / "events", 0) == 1


@pytest.mark.parametrize("num_bytes_kept", range(1, 60, 7))
def test_torn_last_line_is_passed_over_and_does_not_spoil_the_next(
    num_bytes_kept: int, tmp_path: Path
) -> None:
    log = started(tmp_path)
    log.write("iteration", 1)
    whole = event_path(tmp_path, 0).read_bytes()
    event_path(tmp_path, 0).write_bytes(whole + whole[:num_bytes_kept])
    log.close()
    log = started(tmp_path, incarnation=1)
    log.write("iteration", 2)
    assert [line["iteration"] for line in read_events(event_path(tmp_path, 0))] == [1, 2]


def test_progress_is_the_last_phase_entered(tmp_path: Path) -> None:
    log = started(tmp_path, incarnation=3)
    log.progress(100_000, Phase.BEFORE_STEP)
    log.progress(8, Phase.IN_STEP)
    assert read_progress(tmp_path, 0) == Progress(incarnation=3, iteration=8, phase=Phase.IN_STEP)


@given(st.binary(max_size=80))
def test_unreadable_progress_is_no_progress(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    folder = tmp_path_factory.mktemp("progress")
    progress_path(folder, 0).write_bytes(b"x" + data)
    assert read_progress(folder, 0) is None


def test_missing_files_have_no_incarnation_and_no_progress(tmp_path: Path) -> None:
    assert last_incarnation(tmp_path, 0) == -1
    assert read_progress(tmp_path, 0) is None
    assert ranks_with_events(tmp_path) == ()


def test_log_that_can_no_longer_be_written_gives_up_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(Path("/dev"), 0)
    log._events_fd = os.open("/dev/full", os.O_WRONLY)  # every write: no space left on device
    log.write("iteration", 1)
    log.write("iteration", 2)
    errors = capsys.readouterr().err
    assert errors.count("rank 0 writes no more events") == 1
    assert "No space left" in errors


def test_loss_that_is_no_number_is_valid_json(tmp_path: Path) -> None:
    started(tmp_path).write("iteration", 1, loss=float("nan"))
    assert next(read_events(event_path(tmp_path, 0)))["loss"] == "nan"
    assert "NaN" not in event_path(tmp_path, 0).read_text()


def test_log_that_was_not_started_drops_what_is_written(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "never", 0)
    log.write("iteration", 1)
    log.progress(1, Phase.FORWARD)
    log.close()
    assert not (tmp_path / "never").exists()
