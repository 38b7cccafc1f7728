"""Days with a GPU keep their budget, a bad step does not stop the others, and results are always complete."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, override

import psutil
import pytest

from megatron.fault_tolerance.cpu import device as cpu_device
from tools.gpu_day import __main__ as command
from tools.gpu_day import day, job, results
from tools.gpu_day.steps import DAYS, Step, Turn

STEPS = [each for each_day in DAYS.values() for each in each_day.steps]
# A rank of a job is in a session of its own.
SLEEPER = """
import subprocess, sys, time
words = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(words, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    for module in (results, day, job, command):
        monkeypatch.setattr(module, "WORK", folder)
    monkeypatch.setenv("GPU_DAY_WORK", str(folder))
    return folder


def step(name: str, code: str, **changes: Any) -> Step:
    base = Step(name=name, question=f"{name}?", words=("-c", code), usual_s=1, most_s=60)
    return replace(base, **changes)


def good(name: str, *digest: str) -> str:
    return (
        "from tools.gpu_day.results import note\n"
        f"note({name!r}, 'line of {name}', digest={[list(digest)]})"
    )


def run(steps: Sequence[Step], folder: Path, budget_s: float = 100.0) -> dict[str, Any]:
    """Run steps; return their results by name."""
    day.Runner(
        steps,
        budget_s=budget_s,
        folder=folder,
        env={**os.environ, "PYTHONPATH": str(results.ROOT)},
        together=2,
        is_rehearsal=False,
        title="title",
    ).run()
    return dict(json.loads((folder / "result.json").read_text()))


def begin_seconds_late(log: Path, most_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the seconds of a step begin when it has written to its log: a machine may be busy."""

    class Process(subprocess.Popen[bytes]):
        @override
        def wait(self, timeout: float | None = None) -> int:
            while timeout == most_s and log.stat().st_size == 0:
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)


def test_step_that_fails_hangs_or_shows_nothing_does_not_stop_the_others(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    begin_seconds_late(work / "logs" / "hangs.log", 2, monkeypatch)
    is_there = f"assert 'killed after 2 s' in open({str(out / 'summary.md')!r}).read()\n"
    steps = [
        step("probe", "raise SystemExit('no way')", turn=Turn.FIRST),
        step("hangs", SLEEPER, most_s=2, turn=Turn.FIRST),
        step("follows", good("follows"), after="probe"),
        step("long", good("long"), usual_s=1000),
        step("silent", "print('no result')"),
        step("reference", good("reference", "a", "b")),
        step("equal", good("equal", "a", "b"), of="reference"),
        step("rest", good("rest", "a", "c"), of="reference"),
        step("lonely", good("lonely", "a", "b"), of="silent"),
        step("last", is_there + good("last"), turn=Turn.ALONE),
    ]
    found = run(steps, out)
    assert {name: each["result"] for name, each in found.items()} == {
        "probe": "FAILED",
        "hangs": "TOO LATE",
        "follows": "not begun",
        "long": "not begun",
        "silent": "FAILED",
        "reference": "passed",
        "equal": "passed",
        "rest": "DIFFERS",
        "lonely": "FAILED",
        "last": "passed",
    }
    assert found["follows"]["line"] == "probe has not passed"
    assert found["long"]["line"].endswith("s were left, it takes about 1000")
    assert found["equal"]["line"] == "BITWISE EQUAL; line of equal"
    assert found["probe"]["line"] == "no way (exit code 1)"
    assert "| last | passed |" in (out / "summary.md").read_text()
    assert len(list(out.iterdir())) <= 8
    with tarfile.open(out / "logs.tar.gz") as archive:
        log = archive.extractfile("logs/hangs.log")
        assert log is not None
        child = int(log.read().split()[0])
    assert not is_running(child), "what a step has started holds the GPU"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["monday"], "DAY=monday must be one of first, nccl, te, large, bridge"),
        ([], "DAY=None must be one of"),
        (["nccl", "n-ep2", "dense"], "STEPS=dense must be steps of nccl"),
    ],
)
def test_unknown_day_or_step_is_refused(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(words)
    assert error in capsys.readouterr().err


def test_python_without_needed_packages_is_refused_before_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CARRIED", tmp_path)
    monkeypatch.setattr(command, "_NEEDED", ("no-such-package",))
    with pytest.raises(SystemExit, match="2"):
        command.main(["first"])
    error = capsys.readouterr().err
    assert f"{sys.executable} lacks no-such-package" in error and "gpu-day-prepare" in error


def test_flags_of_all_jobs_are_accepted_by_a_start_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: False)
    for each in STEPS:
        if "tools.gpu_day.job" in each.words:
            job.main([each.name, "--only-check", *each.words[3:]])
            assert day.read_result(each.name)["is_good"], day.read_result(each.name)


def test_step_of_a_rank_trains_on_this_machine(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "IS_REHEARSAL", True)
    job.main(["alone", "--", "--train-iters", "2"])
    result = json.loads((work / "results" / "alone.json").read_text())
    assert result["is_good"], result["line"]
    assert len(result["digest"]) == 1
    assert "1 ranks" in result["line"] and "loss" in result["line"]
