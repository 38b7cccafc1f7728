"""Densifying: the job that is started, and what is refused before."""

import sys
import time
from pathlib import Path

import msgspec
import pytest

from moe_ft.cli import main
from moe_ft.engine.persist.storage_lock import StorageLock
from moe_ft.files.storage import Storage
from moe_ft.format.index import Index
from tests.unit.moe_ft.convert.models import persist_model

REFUSED = 2
# Writes a whole state of the next iteration to the folder that its first argument names, and its arguments.
JOB = """
import sys
from moe_ft.files.storage import Storage
from tests.unit.moe_ft.convert.models import persist_model
persist_model(Storage(sys.argv[2]), 5)
print(*sys.argv[3:])
"""


def as_window(index: Index) -> Index:
    (last,) = index.records
    records = (msgspec.structs.replace(last, iteration=last.iteration - 1), last)
    return msgspec.structs.replace(
        index, window=2, num_snapshots=2, records=records, compute=({}, {})
    )


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """Return a persist directory whose newest checkpoint is a window."""
    persist_model(Storage(str(tmp_path / "src")), 4, change=as_window)
    return tmp_path / "src"


def densify(storage: Path, *command: str, flags: tuple[str, ...] = ()) -> int:
    words = ["convert", str(storage), str(storage.parent / "dst"), "--to", "safetensors"]
    return main([*words, *flags, "--densify", "--", *command])


def test_job_ends_after_its_recovery_and_what_it_leaves_is_converted(
    storage: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--moe-ft-persist-dir", str(storage), "--lr", "1")
    assert densify(storage, sys.executable, "-c", JOB, *flags) == 0
    said = capfd.readouterr()
    assert "--lr 1 --exit-interval 1" in said.out
    assert "iteration 5 as safetensors" in said.out
    assert "is a window of 2: starting the job" in said.err
    # A checkpoint that is already one state needs no job.
    assert densify(storage, "no-such-program", flags=("--dry-run",)) == REFUSED  # DST is there
    assert "no job is started" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        ((), (), "--densify needs the command line of the training job"),
        (("torchrun",), (), "its command line names no directory. Give --moe-ft-persist-dir SRC"),
        (("x", "--moe-ft-persist-dir=/other"), (), "its command line names /other"),
        (("x",), ("--iteration", "4"), "--iteration=4 cannot be given with --densify"),
        (("no-such-program", "--moe-ft-persist-dir=SRC"), (), "cannot start no-such-program"),
    ],
)
def test_command_that_cannot_do_it_is_refused(
    command: tuple[str, ...],
    flags: tuple[str, ...],
    message: str,
    storage: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = [word.replace("SRC", str(storage)) for word in command]
    assert densify(storage, *named, flags=flags) == REFUSED
    assert message in capsys.readouterr().err
    assert not (storage.parent / "dst").exists()


def test_one_checkpoint_is_no_directory_that_a_job_writes_to(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert densify(storage / "iter_0000004", "job") == REFUSED
    assert "iter_0000004 must be a persist directory with --densify" in capsys.readouterr().err


def test_job_that_fails_gives_its_exit_code(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--moe-ft-persist-dir", str(storage))
    assert densify(storage, sys.executable, "-c", "raise SystemExit(7)", *flags) == 7
    assert "the job of --densify ended with exit code 7" in capsys.readouterr().err
    killed = "import os; os.kill(os.getpid(), 9)"
    assert densify(storage, sys.executable, "-c", killed, *flags) == 137


def test_job_that_leaves_no_whole_state_is_named(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--moe-ft-persist-dir", str(storage))
    assert densify(storage, sys.executable, "-c", "", *flags) == REFUSED
    assert (
        "is still the newest there. The job was given --exit-interval 1" in capsys.readouterr().err
    )


def test_refusal_of_a_window_names_the_flag_and_the_newest_whole_state(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(storage), str(storage.parent / "dst"), "--to", "safetensors"]
    assert main(words) == REFUSED
    assert "Give --densify -- COMMAND LINE OF THE JOB, which starts" in capsys.readouterr().err
    persist_model(Storage(str(storage)), 2)
    assert main(words) == REFUSED
    assert "or --iteration 2, which is one state." in capsys.readouterr().err


def test_command_line_without_the_flag_is_refused(
    storage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(storage), str(storage.parent / "dst"), "--to", "safetensors"]
    assert main([*words, "--", "torchrun"]) == REFUSED
    assert (
        "-- torchrun: convert takes a command line only with --densify" in capsys.readouterr().err
    )


def test_job_that_runs_already_is_refused_before_another_is_started(
    storage: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = StorageLock(Storage(str(storage)))
    assert lock.take("job", None)
    monkeypatch.setattr(time, "sleep", lambda _: lock.renew())
    command = (sys.executable, "-c", JOB, "--moe-ft-persist-dir", str(storage))
    assert densify(storage, *command) == REFUSED
    said = capsys.readouterr()
    assert "and job 'job' on " in said.err
    assert "starting the job" not in said.err
