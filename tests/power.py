"""Proves that the suite notices a broken recovery: runs some of its tests with each of tests/breakages.py.

python -m tests.power [BREAKAGE ...] prints which of the tests fail with each breakage. It fails if a breakage
survives, if it was never reached, or if a test fails with nothing broken. All tests are of `make test`; that
runs them unbroken.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from tests.breakages import BREAKAGE, BREAKAGES, MARKS

_FOLDER = "tests/distributed/"
# Quick ones, such that each breakage is in the way of some of them.
TESTS = (
    "test_recovery.py::test_dead_process_is_recovered_from_the_memory_of_its_own_node",
    "test_recovery.py::test_feature_survives_a_recovery_bit_for_bit[ramp-up-and-expert-bias]",
    "test_fault_matrix.py::test_run_with_faults_recovers_and_ends_in_the_state_of_a_run_without"
    "[ep2-dp2_kill-one_snapshot_distributed_fp16_2]",
    "test_partial.py::test_all_experts_in_every_snapshot_lose_nothing_and_recover_bitwise",
    "test_sparse.py::test_window_is_recovered_bitwise_and_the_next_one_follows_it",
)
_DEADLINE_S = 1200


def main(names: list[str]) -> int:
    """Run the tests unbroken, and with each named breakage or all of them; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("breakages", nargs="*", metavar="BREAKAGE", choices=[*BREAKAGES, []])
    wanted = parser.parse_args(names).breakages or list(BREAKAGES)
    failed, _ = run_tests(None)
    if failed:
        print(f"fail with nothing broken: {', '.join(sorted(failed))}")
        return 1
    survivors = []
    for name in wanted:
        start = time.monotonic()
        failed, was_reached = run_tests(name)
        if not was_reached:
            found = "NEVER REACHED"
        else:
            found = f"{len(failed)} of {len(TESTS)} tests fail" if failed else "SURVIVES"
        if not (failed and was_reached):
            survivors.append(name)
        print(f"{name}: {found} ({time.monotonic() - start:.0f} s)")
        for test in sorted(failed):
            print(f"    {test}")
        sys.stdout.flush()
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} breakages are noticed")
    return bool(survivors)


def run_tests(breakage: str | None) -> tuple[set[str], bool]:
    """Return which tests fail, and whether the breakage has done damage.

    Args:
        breakage: name of one, None for none.

    Raises:
        RuntimeError: if not all of the tests were run.
    """
    with tempfile.TemporaryDirectory(prefix="moe_ft_power_") as folder:
        marks, result = Path(folder) / "marks", Path(folder) / "result.xml"
        marks.mkdir()
        env = {**os.environ, MARKS: str(marks)}
        env |= {BREAKAGE: breakage} if breakage is not None else {}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={result}", *(_FOLDER + test for test in TESTS)]
        found = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
        cases = list(ElementTree.parse(result).iter("testcase")) if result.exists() else []
        if len(cases) != len(TESTS):
            raise RuntimeError(f"{len(cases)} of {len(TESTS)} tests were run:\n{found.stdout}")
        failed = {_name(each) for each in cases if len(each) and each[0].tag != "system-out"}
        return failed, any(marks.iterdir())


def _name(case: ElementTree.Element) -> str:
    module = case.get("classname", "").rpartition(".")[2]
    return f"{module}.py::{case.get('name')}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
