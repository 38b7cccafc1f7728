"""`doctor` compares the job that is planned with this machine, and refuses flags that cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_ft.cli import main
from moe_ft.config.stock_defects import FLAG
from tests.unit.moe_ft.config.test_stock_defects import MET
from tests.unit.moe_ft.planning.described import SMALL

LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
# An examination that takes longer ends this process.
OWN = ("doctor", "--transfer", "1MiB", "--timeout", "3600", "--json")
TORCHRUN = ("torchrun", "--nproc-per-node", "4", "train.py")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


class Doctor:
    """Runs the command for a job whose memory is in a directory of its own."""

    def __init__(self, memory_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._flags = ("--moe-ft-memory-dir", str(memory_dir), "--moe-ft-job-id", "a")
        self._capsys = capsys

    def run(self, *flags: str, own: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        """Return the exit code, and of each check the last row."""
        code = main([*OWN, *own, "--", *flags, *self._flags])
        return code, {row["check"]: row for row in json.loads(self._capsys.readouterr().out)}


@pytest.fixture
def doctor(memory_dir: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(memory_dir, capsys)


def test_planned_job_is_compared_with_memory_and_storage(doctor: Doctor, tmp_path: Path) -> None:
    stored = ("--moe-ft-strategy", "dense", "--moe-ft-persist-dir", str(tmp_path / "persist"))
    code, rows = doctor.run(*TORCHRUN, *SMALL, *stored)
    assert code == 0
    assert rows["memory room"]["found"].endswith(" needed")
    assert rows["storage room"]["found"].endswith(" for 4 checkpoints")
    assert "a checkpoint takes" in rows["storage write"]["found"]
    assert "enough for 4 ranks" in rows["open files"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_job_that_does_not_fit_fails(doctor: Doctor) -> None:
    model = ("--num-layers", "400", "--hidden-size", "40960", *SMALL[4:])
    code, rows = doctor.run(*TORCHRUN, *model, "--moe-ft-strategy", "dense")
    assert code == 1
    assert rows["memory room"]["result"] == "fail"


def test_settings_that_a_start_would_refuse_fail(doctor: Doctor) -> None:
    code, rows = doctor.run(*TORCHRUN, *SMALL, "--moe-ft-strategy", "dense", "--moe-ft-keep", "0")
    assert code == 1
    assert "--moe-ft-keep=0" in rows["flags"]["found"]


@pytest.mark.parametrize(
    "words",
    [
        (*TORCHRUN, *SMALL, "--tensor-model-parallel-size", "2", "--moe-ft-strategy", "dense"),
        ("torchrun", "--nproc-per-node", "gpu", "train.py", *SMALL, "--moe-ft-strategy", "dense"),
    ],
    ids=["tensor parallelism", "unknown ranks"],
)
def test_job_that_cannot_be_planned_is_warned_of_and_the_rest_is_checked(
    words: tuple[str, ...], doctor: Doctor
) -> None:
    code, rows = doctor.run(*words)
    assert code == 0
    assert rows["plan"]["result"] == "warn"
    assert rows["memory dir"]["result"] == "pass"


def test_ranks_that_are_given_win(doctor: Doctor) -> None:
    own = ("--world-size", "64", "--ranks-per-node", "8")
    _, rows = doctor.run(*TORCHRUN, own=own)
    assert "enough for 64 ranks" in rows["open files"]["found"]


def test_restarts_of_several_nodes_need_their_own_store(doctor: Doctor) -> None:
    words = ("torchrun", "--max-restarts", "3", "train.py")
    _, rows = doctor.run(*words)
    assert rows["shared store"]["result"] == "pass"
    code, rows = doctor.run(words[0], "--nnodes", "2", *words[1:])
    assert code == 1
    assert rows["shared store"]["result"] == "fail"


@pytest.mark.parametrize("launcher", [TORCHRUN, ()])
def test_job_that_saves_shifted_masters_is_warned_of(
    launcher: tuple[str, ...], doctor: Doctor
) -> None:
    code, rows = doctor.run(*launcher, *SMALL, *MET, "--moe-ft-strategy", "dense")
    assert code == 0
    assert rows["saves"]["result"] == "warn"
    assert rows["saves"]["found"].startswith(f"{FLAG} with --save=out: Megatron 0.19 saves")
    assert "without --overlap-grad-reduce" in rows["saves"]["remedy"]


def test_job_that_megatron_would_fail_with_or_continue_wrongly_is_warned_of(doctor: Doctor) -> None:
    loads = ("--load", "out", "--expert-model-parallel-size", "2")
    words = (*loads, "--train-iters", "3", "--lr-warmup-iters", "4")
    code, rows = doctor.run(*TORCHRUN, *SMALL, *words, "--moe-ft-strategy", "dense")
    assert code == 1
    assert rows["loads"]["found"].startswith("--load=out: Megatron keeps one random state")
    assert "must be less than --train-iters=3" in rows["flags"]["found"]


def test_warnings_are_failures_if_strict(memory_dir: Path) -> None:
    words = ("--", "--moe-ft-memory-dir", str(memory_dir / "a"), "--moe-ft-node-id", "0123456789ab")
    assert main([*OWN, *words, "--moe-ft-job-id", "a"]) == 0
    (memory_dir / "a").mkdir()
    (memory_dir / "a" / "foreign").mkdir()
    assert main([*OWN, "--strict", *words, "--moe-ft-job-id", "a"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--timeout 1", "--timeout=1 must be at least 5 seconds"),
        ("--transfer 0", "--transfer"),
        ("--transfer fast", "error: --transfer=fast must be a size in bytes. Write it like 512GiB"),
        ("--world-size 0", "--world-size=0 must be at least 1"),
        ("-- --moe-ft-strateg dense", "--moe-ft-strateg"),
        ("-- launch.sh --moe-ft-job-id a", "launch.sh starts no .py program"),
    ],
)
def test_flags_that_cannot_be_are_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words.split()]) == 2
    assert message in capsys.readouterr().err
