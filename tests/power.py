"""Proof that the tests notice a broken product: some of them run with each breakage of tests/breakages.py.

python -m tests.power [--all] [BREAKAGE ...] prints the tests that fail with each breakage, and their
messages. It fails if no test notices a breakage, if a breakage did no damage, or if a test fails with
nothing broken. `make test` runs all of these tests with nothing broken.

Unless breakages are named, it also has the simulation look for each mistake of tests/simulation/mutations.py;
with --simulation it does nothing else.
"""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.breakages import BREAKAGE, BREAKAGES, MARKS, NOTICED_BY
from tests.covering_array import case_of, runs

_FOLDER = "tests/distributed/"


def _run_with(**values: str) -> str:
    """Return the first run that has these values, of those that `make test` runs with nothing broken."""
    wanted = {"left": "windows", **values}  # where the checks are strict
    found = next(run for run in runs("test") if wanted.items() <= run.items())
    name = "test_run_with_faults_recovers_and_ends_in_the_state_of_a_run_without"
    return f"test_covering_array.py::{name}[{case_of(found)}]"


TESTS = {
    "dense": _run_with(strategy="dense-2", optimizer="distributed"),
    "buffers": _run_with(strategy="sparse-2", model="expert-bias"),
    "scaled": _run_with(strategy="sparse-2", precision="fp16"),
    "partial": _run_with(strategy="partial-4", precision="bf16"),
    "shared": "test_shared.py::test_gradients_of_shared_micro_batches_are_those_of_all_ranks_to_a_few_bits"
    "[guest computes its experts]",
    "slots": "test_slots.py::test_run_whose_tables_change_is_recovered_bitwise[whole state]",
    "checked": _run_with(strategy="sparse-2", model="expert-bias"),
    "sparse": "test_sparse.py::test_window_is_recovered_bitwise_and_the_next_one_follows_it",
}
_MESSAGE_LENGTH = 150


def main(words: list[str]) -> int:
    """Run tests unbroken, and with each named breakage or all of them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("breakages", nargs="*", metavar="BREAKAGE", help=", ".join(BREAKAGES))
    parser.add_argument("--all", action="store_true", help="each breakage with every test")
    parser.add_argument("--simulation", action="store_true", help="the simulation's mistakes alone")
    options = parser.parse_args(words)
    if options.simulation:
        return int(not find_mutations())
    is_found = bool(options.breakages) or find_mutations()
    wanted = options.breakages or list(BREAKAGES)
    if unknown := set(wanted) - set(BREAKAGES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; name some of {', '.join(BREAKAGES)}")
    chosen = {name: [TESTS[test] for test in NOTICED_BY[name]] for name in wanted}
    every = sorted({test for tests in chosen.values() for test in tests})
    failed, _ = run_tests(every, None)
    if failed:
        print(f"fail with nothing broken: {', '.join(sorted(failed))}")
        return 1
    num_noticed = sum(try_breakage(name, every if options.all else chosen[name]) for name in wanted)
    print(f"{num_noticed} of {len(wanted)} breakages are noticed")
    return int(num_noticed < len(wanted) or not is_found)


def find_mutations() -> bool:
    """Have the simulation look for all mistakes that it knows; return whether it finds all of them."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation", "--jobs", "0", "--power"]
    return subprocess.run(command, check=False).returncode == 0


def try_breakage(name: str, tests: Sequence[str]) -> bool:
    """Run tests with a breakage and print those that fail; return whether one does."""
    start = time.monotonic()
    failed, was_reached = run_tests(tests, name)
    found = f"{len(failed)} of {len(tests)} tests fail" if failed else "SURVIVES"
    if not was_reached:
        found = "DID NO DAMAGE"
    print(f"{name}: {found} ({time.monotonic() - start:.0f} s)")
    for test, how in sorted(failed.items()):
        print(f"    {test}: {how}")
    sys.stdout.flush()
    return bool(failed) and was_reached


class Outcomes:
    """Plugin of pytest that collects the outcomes of tests.

    Attributes:
        passed: names of tests that passed.
        failed: by name, the message of a test that failed.
    """

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.removeprefix(_FOLDER)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(getattr(crash, "message", report.longrepr))
            self.failed[name] = message.partition("\n")[0][:_MESSAGE_LENGTH]
        elif report.when == "call" and report.passed:
            self.passed.add(name)


def run_tests(tests: Sequence[str], breakage: str | None) -> tuple[dict[str, str], bool]:
    """Return the messages of the tests that fail, by name, and whether the breakage did damage.

    Args:
        tests: names below tests/distributed/.
        breakage: None to break nothing.

    Raises:
        RuntimeError: if not all of the tests were run.
    """
    outcomes, output = Outcomes(), io.StringIO()
    with tempfile.TemporaryDirectory(prefix="moe_ft_power_") as marks:
        os.environ.update({BREAKAGE: breakage or "", MARKS: marks})
        words = ["-p", "no:cacheprovider", *(_FOLDER + test for test in tests)]
        with redirect_stdout(output):  # in this process, so that the fork server stays warm
            pytest.main(words, plugins=[outcomes])
        if outcomes.passed | set(outcomes.failed) != set(tests):
            raise RuntimeError(f"not all of {len(tests)} tests were run:\n{output.getvalue()}")
        return outcomes.failed, any(Path(marks).iterdir())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
