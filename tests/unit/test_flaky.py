"""The gate repeats a test that failed once, and hides nothing else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flaky import OUTCOMES, main

CONFTEST = "from tests.flaky import register\ndef pytest_configure(config): register(config)\n"
# Fails in its first run, and in each run if its name says so.
SOMETIMES = """
from pathlib import Path
def test_sometimes():
    count = Path(__file__).with_suffix(".count")
    count.write_text(count.read_text() + "x" if count.exists() else "x")
    assert len(count.read_text()) in {passes}
"""
SOMETIMES_NAME = "test_flaky.py" + "::test_sometimes"
KILLED = "import os\ndef test_killed(): os._exit(1)\n"
BROKEN = "import nothing_of_this_name\n"


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of tests; the outcomes of a session that ran go to a file in it."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    return tmp_path


def session(folder: Path, name: str, content: str) -> int:
    """Run one file of tests in a session of its own, as `make test` does."""
    (folder / f"test_{name}.py").write_text(content)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_{name}.py"]
    env = {**os.environ, OUTCOMES: str(folder / "outcomes")}
    return subprocess.run(command, env=env, check=False, capture_output=True).returncode


def test_test_that_failed_once_and_passes_three_times_alone_is_named(
    gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert session(gate, "good", "def test_good(): pass\n") == 0
    assert session(gate, "flaky", SOMETIMES.format(passes="{2, 3, 4}")) == 1
    assert main(gate / "outcomes", 2) == 0
    assert capfd.readouterr().out.endswith(f"flaky:\n  {SOMETIMES_NAME}\n")


def test_test_that_fails_once_more_alone_fails_the_gate(
    gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session(gate, "flaky", SOMETIMES.format(passes="{2, 3}"))
    assert main(gate / "outcomes", 1) == 1
    assert capfd.readouterr().out.endswith(f"failed again:\n  {SOMETIMES_NAME}\n")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(KILLED, "did not end by themselves"), (BROKEN, "ended with [2]")],
    ids=["killed", "broken"],
)
def test_session_that_did_not_get_to_its_end_is_not_repeated(
    gate: Path, capfd: pytest.CaptureFixture[str], content: str, reason: str
) -> None:
    session(gate, "flaky", SOMETIMES.format(passes="{2, 3, 4}"))
    session(gate, "other", content)
    assert main(gate / "outcomes", 2) == 1
    assert reason in capfd.readouterr().out


def test_session_that_is_missing_is_not_replaced_by_repetitions(
    gate: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    session(gate, "flaky", SOMETIMES.format(passes="{2, 3, 4}"))
    assert main(gate / "outcomes", 4) == 1
    assert "1 sessions of pytest began instead of 4" in capfd.readouterr().out
