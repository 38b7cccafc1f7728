"""Tests that failed in a run of `make test`, and whether each passes three times when it runs alone.

    MOE_FT_TEST_OUTCOMES=FILE make --keep-going test || python -m tests.flaky FILE SESSIONS

Each session of pytest adds a line to the file when it begins, and one when it ends. A session that did not
end by itself is a failure that no repetition mends, and so are many failed tests. .ci/run uses this;
`make test` is strict.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

OUTCOMES = "MOE_FT_TEST_OUTCOMES"
NUM_REPETITIONS = 3
MOST_FAILED = 8  # more have a cause in common


class Outcome:
    """Plugin of pytest that writes how a session ends, and the names of what failed in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: dict[str, None] = {}

    def pytest_sessionstart(self) -> None:
        self._append({"begin": os.getpid()})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._append({"end": os.getpid(), "code": int(exitstatus), "failed": list(self._failed)})

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def _append(self, line: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def register(config: pytest.Config) -> None:
    """Have a session write its outcome if the environment asks for it, and no session that it starts."""
    if path := os.environ.pop(OUTCOMES, None):
        config.pluginmanager.register(Outcome(Path(path)))


def why_not_to_repeat(lines: Sequence[str], num_sessions: int) -> str:
    """Return why failures are no matter of single tests; empty if they may be."""
    notes = [json.loads(line) for line in lines]
    ends = {note["end"]: note for note in notes if "end" in note}
    begun = [note["begin"] for note in notes if "begin" in note]
    if len(begun) != num_sessions:
        return f"{len(begun)} sessions of pytest began instead of {num_sessions}"
    if killed := set(begun) - ends.keys():
        return f"sessions of pytest did not end by themselves: processes {sorted(killed)}"
    allowed = {int(pytest.ExitCode.OK), int(pytest.ExitCode.TESTS_FAILED)}
    if strange := {note["code"] for note in ends.values()} - allowed:
        return f"sessions of pytest ended with {sorted(strange)}"
    if any(note["code"] and not note["failed"] for note in ends.values()):
        return "a session of pytest failed without a failed test"
    failed = failed_tests(lines)
    if not failed:
        return "something else than a test failed"
    if len(failed) > MOST_FAILED:
        return f"{len(failed)} tests failed, more than {MOST_FAILED}"
    return ""


def failed_tests(lines: Sequence[str]) -> list[str]:
    """Return the names of all tests that failed, in their order."""
    notes = [json.loads(line) for line in lines]
    return list(dict.fromkeys(name for note in notes for name in note.get("failed", ())))


def passes_alone(test: str) -> bool:
    """Run a test alone, as often as it must pass."""
    command = [sys.executable, "-m", "pytest", "-q", test]
    for number in range(1, NUM_REPETITIONS + 1):
        print(f"{test}: alone, {number} of {NUM_REPETITIONS}", flush=True)
        if subprocess.run(command, check=False).returncode:
            return False
    return True


def main(path: Path, num_sessions: int) -> int:
    """Repeat what failed; return 0 if all of it passed each time."""
    lines = path.read_text().splitlines() if path.exists() else []
    if reason := why_not_to_repeat(lines, num_sessions):
        print(f"failed, and nothing is repeated: {reason}")
        return 1
    os.environ.pop(OUTCOMES, None)
    failed = failed_tests(lines)
    still = [test for test in failed if not passes_alone(test)]
    if still:
        print("failed again:", *still, sep="\n  ")
        return 1
    print("flaky:", *failed, sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2])))
