"""Steps of a first day on a GPU run one by one, and a bad one does not stop the rest."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.mark.expression import Expression

from tests.unit.source import ROOT
from tools.gpu_day import MOST_MINUTES, STEPS, TABLE, Need, Result, Step, main, run_all

NOTHING_LACKS = dict.fromkeys(Need, False)


def step(name: str, code: str, **changes: Any) -> Step:
    base = Step(name=name, shows=f"shows {name}", words=("-c", code), expected="good", needs=())
    return replace(base, **changes)


# A rank of a test is in a session of its own.
SLEEPER = """
import subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(command, start_new_session=True)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_step_that_fails_hangs_or_shows_nothing_does_not_stop_the_rest(tmp_path: Path) -> None:
    steps = [
        step("fails", "print('good'); raise SystemExit(3)"),
        step("silent", "print('12 skipped')"),
        step("hangs", SLEEPER, minutes=0.05),
        step("lacks", "print('good')", needs=(Need.TWO_GPUS,)),
        step("tables", "print('good\\n| a |\\n|---|\\n| 1 |')", expected=TABLE),
        step("passes", "import os; print('good', os.environ['X'])", env={"X": "7"}),
    ]
    assert run_all(steps, tmp_path, {**NOTHING_LACKS, Need.TWO_GPUS: True}) == 1
    summary = (tmp_path / "summary.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in summary.splitlines()]
    assert [(row[0], row[1], row[3]) for row in rows[2:]] == [
        ("fails", Result.FAILED, "exit code 3"),
        ("silent", Result.NOTHING, "the log says why"),
        ("hangs", Result.LATE, "killed after 0.05 minutes"),
        ("lacks", Result.LACKING, "needs two GPUs"),
        ("tables", Result.PASSED, ""),
        ("passes", Result.PASSED, ""),
    ]
    assert "good 7" in (tmp_path / "passes.log").read_text()
    assert "| 1 |" in (tmp_path / "tables.md").read_text()
    assert not (tmp_path / "lacks.log").exists()
    child = int((tmp_path / "hangs.log").read_text().split()[-1])
    assert not is_running(child), "what a step has started holds the GPU"


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_steps_run_one_by_one_add_to_one_summary(tmp_path: Path) -> None:
    steps = [step("first", "print('good')"), step("second", "print('good')")]
    assert run_all(steps[1:], tmp_path, NOTHING_LACKS, of=steps) == 0
    assert run_all(steps[:1], tmp_path, NOTHING_LACKS, of=steps) == 0
    lines = (tmp_path / "summary.md").read_text().splitlines()[2:]
    assert [line.split("|")[1].strip() for line in lines] == ["first", "second"]
    assert json.loads((tmp_path / "second.json").read_text())["result"] == "passed"


def test_without_a_gpu_the_steps_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"| {each.name} " in shown for each in STEPS)
    assert f"{len(STEPS)} steps would have run" in shown
    assert main(["--dry-run", "stall"]) == 0
    assert "1 steps would have run, in at most 9 minutes" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--dry-run", "nonsense"])


def test_every_step_names_something_that_exists_and_fits_into_ten_minutes() -> None:
    assert len({each.name for each in STEPS}) == len(STEPS)
    assert max(each.minutes for each in STEPS) <= MOST_MINUTES
    collected = collect("tests/gpu", "tests/unit/kernels")
    for each in STEPS:
        if each.words[1] != "pytest":
            module = each.words[1].replace(".", "/")
            assert (ROOT / f"{module}.py").is_file(), each.name
            continue
        words = [*each.words]
        expression = Expression.compile(words[words.index("-k") + 1] if "-k" in words else "")
        places = [word for word in words if word.startswith("tests/")]
        chosen = [node for node in collected if any(is_in(node, place) for place in places)]
        if "-k" in words:
            chosen = [node for node in chosen if expression.evaluate(named_in(node))]
        assert chosen, f"{each.name}: no test is {shlex.join(words)}"


def named_in(node: str) -> Any:
    return lambda name, **_: name in node


def is_in(node: str, place: str) -> bool:
    return node == place or node.startswith((f"{place}/", f"{place}::"))


def collect(*folders: str) -> list[str]:
    """Return the names of all tests in folders."""
    options = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *folders)
    run = subprocess.run((sys.executable, *options), cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:]
    return [line for line in run.stdout.splitlines() if "::" in line]


def test_every_test_for_a_gpu_is_in_a_step() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py")}
    named = {word.split("::")[0] for each in STEPS for word in each.words if "tests/" in word}
    assert files <= named
