"""Jobs of benchmarks under torchrun: restarted as often as said, and loud if they fail."""

from pathlib import Path

import pytest

from benchmarks.torchrun import run_under_torchrun

SCRIPT = """
import os, sys
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"moe_ft: start {start} of rank {os.environ['RANK']}", flush=True)
sys.exit(3 if int(start) < int(sys.argv[1]) else 0)
"""


def run(folder: Path, num_failures: int, max_restarts: int) -> str:
    """Run two ranks whose first starts fail; return what they have printed."""
    script, log_path = folder / "script.py", folder / "log"
    script.write_text(SCRIPT)
    run_under_torchrun(
        [str(script), str(num_failures)], 2, max_restarts=max_restarts, log_path=log_path
    )
    return log_path.read_text()


def test_job_is_restarted_until_it_ends_by_itself(tmp_path: Path) -> None:
    output = run(tmp_path, num_failures=1, max_restarts=1)
    for rank in range(2):
        assert f"moe_ft: start 1 of rank {rank}" in output


def test_job_that_fails_once_too_often_is_reported_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"the job ended with code 1\n(.*\n)*moe_ft: start 1"):
        run(tmp_path, num_failures=2, max_restarts=1)
