"""A launcher's restart of a job is told from a start that a person or a scheduler made."""

import os
from pathlib import Path

import pytest

from moe_ft.engine.persist import origin
from moe_ft.recovery.look import is_counted_restart, note_launcher, recall_launcher

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0"}, False),
        ({"TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ({"SLURM_RESTART_COUNT": "1"}, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_RESTART_COUNT": ""}, False),
        ({"SLURM_RESTART_COUNT": "-1"}, False),
    ],
)
def test_restart_is_what_torchrun_or_slurm_have_counted(
    environment: dict[str, str], expected: bool
) -> None:
    assert is_counted_restart(environment) == expected


def test_launcher_that_starts_a_node_again_is_known_with_what_there_was_before(
    tmp_path: Path,
) -> None:
    assert recall_launcher(tmp_path, TORCHRUN) is None
    note_launcher(tmp_path, TORCHRUN, ["a", "b"])
    launcher = recall_launcher(tmp_path, TORCHRUN)
    assert launcher is not None
    assert launcher.known == ("a", "b")


def test_launcher_after_another_one_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_launcher(tmp_path, TORCHRUN, [])
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert recall_launcher(tmp_path, TORCHRUN) is None


def test_launcher_that_got_the_number_of_an_earlier_process_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_launcher(tmp_path, TORCHRUN, [])
    started = origin._started
    monkeypatch.setattr(origin, "_started", lambda pid: started(pid) + 1)
    assert recall_launcher(tmp_path, TORCHRUN) is None


def test_what_torchrun_did_not_start_is_known_only_where_restarts_are_counted(
    tmp_path: Path,
) -> None:
    note_launcher(tmp_path, {"SLURM_JOB_ID": "7"}, ["a"])
    assert recall_launcher(tmp_path, {"SLURM_JOB_ID": "7"}) is None
    assert recall_launcher(tmp_path, {"SLURM_RESTART_COUNT": "1"}) is not None


@pytest.mark.parametrize("content", [b"4711 12.5", b'{"process":"\xff"}'])
def test_note_that_cannot_be_read_is_none(tmp_path: Path, content: bytes) -> None:
    note_launcher(tmp_path, TORCHRUN, [])
    (tmp_path / "launcher").write_bytes(content)
    assert recall_launcher(tmp_path, TORCHRUN) is None
