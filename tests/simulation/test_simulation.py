"""Seeded schedules of simulated jobs: a fixed set, and some that nobody has run."""

import os
import random
import re
import subprocess
import sys

import pytest

from tests.unit.source import ROOT

NUM_FIXED = 340  # 90 s of a quiet core
NUM_OF_REPAIRS = 200  # 30 s
RANDOM_S = 10
MANY_RANDOM_S = 120
_TIMEOUT_S = 3600  # on a machine that is busy with other things


def run_schedules(*words: str) -> int:
    """Run the command, on one core alongside other tests; return the number of schedules."""
    jobs = "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation", "--jobs", jobs, "--shrink"]
    result = subprocess.run(
        [*command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    found = re.search(r"^(\d+) schedules, 0 failures$", result.stdout, re.MULTILINE)
    assert found is not None, result.stdout
    return int(found[1])


@pytest.mark.timeout(_TIMEOUT_S)
def test_fixed_schedules_break_no_promise() -> None:
    assert run_schedules("--first", "0", "--count", str(NUM_FIXED)) == NUM_FIXED


@pytest.mark.timeout(_TIMEOUT_S)
def test_fixed_schedules_of_repairs_break_no_promise() -> None:
    count = str(NUM_OF_REPAIRS)
    assert run_schedules("--repairs", "--first", "0", "--count", count) == NUM_OF_REPAIRS


@pytest.mark.parametrize("kind", [[], ["--repairs"]], ids=["recoveries", "repairs"])
@pytest.mark.parametrize("seconds", [RANDOM_S, pytest.param(MANY_RANDOM_S, marks=pytest.mark.rest)])
@pytest.mark.timeout(_TIMEOUT_S)
def test_random_schedules_break_no_promise(seconds: int, kind: list[str]) -> None:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"first seed {first}")
    assert run_schedules(*kind, "--first", str(first), "--seconds", str(seconds)) > 0
