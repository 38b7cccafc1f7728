"""Seeded schedules of simulated jobs: a fixed set, and some that nobody has run."""

import os
import random
import re
import subprocess
import sys

import pytest

from tests.simulation.repairs.mutations import OF_ELASTIC
from tests.simulation.repairs.near import NEAR_OF_REPAIRS
from tests.unit.source import ROOT

NUM_FIXED = 240  # 70 s of a quiet core
NUM_OF_REPAIRS = 120  # 18 s
RANDOM_S = 20  # of all kinds
MANY_RANDOM_S = 240
# Shares of the seconds.
KINDS = {"recoveries": 0.5, "repairs": 0.25, "elastic": 0.25}
_TIMEOUT_S = 3600  # on a machine that is busy with other things


def run_simulation(*words: str) -> str:
    """Run the command, on one core alongside other tests; return what it prints."""
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
    return result.stdout


def run_schedules(*words: str) -> int:
    """Run schedules that may not fail; return their number."""
    printed = run_simulation(*words)
    found = re.search(r"^(\d+) schedules, 0 failures$", printed, re.MULTILINE)
    assert found is not None, printed
    return int(found[1])


@pytest.mark.timeout(_TIMEOUT_S)
def test_fixed_schedules_break_no_promise() -> None:
    assert run_schedules("--first", "0", "--count", str(NUM_FIXED)) == NUM_FIXED


@pytest.mark.timeout(_TIMEOUT_S)
def test_fixed_schedules_of_repairs_break_no_promise() -> None:
    count = str(NUM_OF_REPAIRS)
    assert run_schedules("--repairs", "--first", "0", "--count", count) == NUM_OF_REPAIRS


@pytest.mark.timeout(_TIMEOUT_S)
def test_mistakes_of_elastic_starts_break_promises_near_where_they_did_before() -> None:
    """Without a mistake, the same schedules break none. A change of the product moves all events a little."""
    names = sorted(OF_ELASTIC & {*NEAR_OF_REPAIRS})
    found = run_simulation("--power", *names, "--count", "60")
    assert f"{len(names)} of {len(names)} mistakes are found" in found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seconds", [RANDOM_S, pytest.param(MANY_RANDOM_S, marks=pytest.mark.rest)])
@pytest.mark.timeout(_TIMEOUT_S)
def test_random_schedules_break_no_promise(seconds: int, kind: str) -> None:
    first = random.SystemRandom().randrange(1 << 40)
    print(f"first seed {first}")
    words = [f"--{kind}"] if kind != "recoveries" else []
    share_s = str(seconds * KINDS[kind])
    assert run_schedules(*words, "--first", str(first), "--seconds", share_s) > 0
